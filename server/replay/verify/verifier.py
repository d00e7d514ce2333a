"""Verifying what is stored: raw bytes read again, requests made again, and both compared. Nobody is asked anything."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from server.conversation.call import Call
from server.conversation.errors import RawBytesRemoved, StrataError
from server.conversation.manifest import decode_manifest, encode_manifest
from server.conversation.payload import ManifestEntry, Payload
from server.conversation.store import PayloadSource, RebuildSource
from server.inspection.manifest_difference import find_difference
from server.inspection.past_payload import PastPayload, rebuild_whole
from server.inspection.value_difference import ValueDifference, find_value_difference
from server.providers.provider import Provider
from server.replay.verify.answer_check import check_answer, check_record
from server.replay.verify.call_walk import CallFilter, CallWalk, Flaw, PastCall, WalkedConversation
from server.replay.verify.verification import (
    UNREADABLE,
    Counts,
    Mismatch,
    Subject,
    Verified,
    add_counts,
    tell_unreadable,
)

_NOT_ITS_BYTES: Final = "The raw bytes say something else than what is stored."
_NOT_ITS_CALL: Final = "The turn says something else than the call that gave it."


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOrder:
    """What to compare, and of which calls."""

    wanted: CallFilter = field(default_factory=CallFilter)
    requests: bool = True
    answers: bool = True
    mismatch_limit: int = 100
    """So many are kept of the conversations that are given at once; all are counted."""


class Verifier:
    """Checks conversations, call by call."""

    def __init__(self, walk: CallWalk, offline_providers: Mapping[str, Provider], order: VerifyOrder) -> None:
        """`offline_providers` write requests and read answers, by provider; they need no key."""
        self._walk = walk
        self._offline_providers = offline_providers
        self._order = order

    async def verify(self, conversation_ids: Sequence[str]) -> Verified:
        """What came of these conversations. Those that are not there, or not any more, are left out."""
        counts, kept = Counts(), list[Mismatch]()
        async for conversation in self._walk.conversations(conversation_ids, self._order.wanted):
            checked = await _Check(conversation, self._offline_providers, self._order).run()
            if checked.counts.mismatch_count and not await conversation.is_there():
                continue
            counts = add_counts(counts, checked.counts)
            kept += checked.mismatches[: self._order.mismatch_limit - len(kept)]
        return Verified(counts=counts, mismatches=tuple(kept))


class _Check:
    """One conversation."""

    def __init__(
        self, conversation: WalkedConversation, offline_providers: Mapping[str, Provider], order: VerifyOrder
    ) -> None:
        self._conversation = conversation
        self._offline_providers = offline_providers
        self._order = order
        self._counts = Counter(conversation_count=1)
        self._unknown = Counter[str]()
        self._kept: list[Mismatch] = []

    async def run(self) -> Verified:
        async for item in self._conversation.items():
            if isinstance(item, Flaw):
                self._add_flaw(item, None)
            else:
                await self._check(item)
        counts = Counts(**self._counts, unknown_providers=dict(self._unknown))
        return Verified(counts=counts, mismatches=tuple(self._kept))

    async def _check(self, past: PastCall) -> None:
        call = past.call
        self._count(call_count=1)
        for flaw in past.flaws:
            self._add_flaw(flaw, call)
        scribe = self._offline_providers.get(call.start.provider)
        if scribe is None:
            self._count(unknown_count=1)
            self._unknown[call.start.provider] += 1
            return
        if self._order.answers:
            self._check_answer(past, scribe)
        if self._order.requests and past.source is not None and call.start.request_hash:
            await self._check_request(past, past.source, scribe)

    def _check_answer(self, past: PastCall, scribe: Provider) -> None:
        end = past.call.end
        if end is None:
            self._count(running_count=1)
            return
        difference = None
        if end.raw_response is not None:
            self._count(answer_count=1, raw_bytes=len(end.raw_response))
            try:
                difference = check_answer(past, end, scribe.open_fold)
            # A bug of a fold is found out, and told of the call that it meets. The others are looked at all the same.
            except Exception as error:  # noqa: BLE001  reason: told as a mismatch
                note = tell_unreadable("What is stored of the answer", error)
                self._add(past.call, Subject.ANSWER, place="answer", note=note)
            self._add_difference(past.call, difference, _NOT_ITS_BYTES)
        elif all(not flaw.place.startswith("raw_") for flaw in past.flaws):
            # Bytes that are there and cannot be read are a flaw, and not past their time.
            self._count(without_bytes_count=1)
        if difference is None and past.answer is not None:
            self._add_difference(past.call, check_record(past.answer, past.call, end), _NOT_ITS_CALL)

    async def _check_request(self, past: PastCall, source: PayloadSource, scribe: Provider) -> None:
        call = past.call
        self._count(request_count=1)
        self._check_model(call, source)
        try:
            rebuild = RebuildSource(call=call, source=source, continued=past.continued)
            rebuilt = rebuild_whole(rebuild, provider=scribe)
            body = await scribe.encode_request(rebuilt.payload)
        except RawBytesRemoved:
            # Nobody can say any more what it said of the answer that it continued.
            self._count(without_bytes_count=1)
        except StrataError as error:
            self._add(call, Subject.REQUEST, place="request", note=f"It cannot be made again: {error} [{error.code}]")
        except UNREADABLE as error:
            note = f"It cannot be made again: what it was made of is damaged ({type(error).__name__})."
            self._add(call, Subject.REQUEST, place="request", note=note)
        else:
            found = hashlib.sha256(body).digest()
            if found != call.start.request_hash:
                self._tell_difference(call, rebuilt, body, found)
            else:
                self._check_manifest(call, rebuilt.manifest)

    def _check_model(self, call: Call, source: PayloadSource) -> None:
        """Whom it was sent to need not stand in a request."""
        definition = source.assistant.definition
        stored = {"provider": call.start.provider, "model": call.start.model}
        difference = find_value_difference(stored, {"provider": definition.provider, "model": definition.model}, "call")
        self._add_difference(call, difference, "It is not the assistant's.", Subject.REQUEST)

    def _check_manifest(self, call: Call, rebuilt: Sequence[ManifestEntry]) -> None:
        """Of a request that is the same: whether it was written down as what it is. Markers follow the release."""
        stored, found = list(call.start.manifest), list(encode_manifest(rebuilt))
        if stored == found:
            return
        try:
            bare = [[replace(entry, marked=False) for entry in each] for each in (decode_manifest(stored), rebuilt)]
        except UNREADABLE as error:
            self._add(call, Subject.BYTES, place="manifest", note=tell_unreadable("The manifest", error))
            return
        one, other = ([*encode_manifest(entries)] for entries in bare)
        note = "The request is the same, and its manifest says something else of it."
        self._add_difference(call, find_value_difference(one, other, "manifest"), note, Subject.BYTES)

    def _tell_difference(self, call: Call, past: PastPayload, body: bytes, found_hash: bytes) -> None:
        mismatch = Mismatch(
            conversation_id=self._conversation.id,
            turn_seq=call.turn_seq,
            attempt=call.start.attempt,
            subject=Subject.REQUEST,
            place="request",
            note="All blocks are the same: the settings, the cache markers or the stored hash are not.",
            stored=call.start.request_hash.hex(),
            found=found_hash.hex(),
        )
        try:
            stored = decode_manifest(call.start.manifest)
        except UNREADABLE:
            self._keep(replace(mismatch, note="The request is another one, and its manifest cannot be read."))
            return
        rebuilt = past.manifest
        place = find_difference(stored, rebuilt)
        if place is None:
            self._keep(mismatch)
            return
        one, other = (blocks[place] if place < len(blocks) else None for blocks in (stored, rebuilt))
        self._keep(
            replace(
                mismatch,
                place=f"block {place + 1} of {len(stored)}{_offset_of(other, past.payload, body)}",
                note=f"The first block that differs is {_name(one or other)}.",
                stored=_describe(one),
                found=_describe(other),
            )
        )

    def _add_difference(
        self, call: Call, difference: ValueDifference | None, note: str, subject: Subject = Subject.ANSWER
    ) -> None:
        if difference is not None:
            self._add(call, subject, place=difference.path, note=note, stored=difference.stored, found=difference.found)

    def _add_flaw(self, flaw: Flaw, call: Call | None) -> None:
        self._add(call, Subject.BYTES, place=flaw.place, note=flaw.note, stored=flaw.stored, found=flaw.found)

    def _add(
        self,
        call: Call | None,
        subject: Subject,
        *,
        place: str,
        note: str,
        stored: str | None = None,
        found: str | None = None,
    ) -> None:
        self._keep(
            Mismatch(
                conversation_id=self._conversation.id,
                turn_seq=None if call is None else call.turn_seq,
                attempt=None if call is None else call.start.attempt,
                subject=subject,
                place=place,
                note=note,
                stored=stored,
                found=found,
            )
        )

    def _keep(self, mismatch: Mismatch) -> None:
        self._count(mismatch_count=1)
        if len(self._kept) < self._order.mismatch_limit:
            self._kept.append(mismatch)

    def _count(self, **counts: int) -> None:
        self._counts.update(counts)


def _name(entry: ManifestEntry | None) -> str:
    if entry is None:
        return "none"
    turn = "" if entry.seq is None else f" of turn {entry.seq}"
    return f"the {entry.layer} layer's {entry.kind}{turn}"


def _describe(entry: ManifestEntry | None) -> str | None:
    return None if entry is None else f"{entry.kind} {entry.hash}, {entry.length} bytes"


def _offset_of(entry: ManifestEntry | None, payload: Payload, body: bytes) -> str:
    """Where the block stands in the request that was made again, as far as it is there literally."""
    if entry is None or entry.seq is None:
        return ""
    data = next((message.data for message in payload.messages if message.seq == entry.seq), b"")
    place = body.find(data) if data else -1
    return "" if place < 0 else f", at byte {place}"
