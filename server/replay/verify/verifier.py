"""Verification of stored calls: raw bytes are parsed again, requests are rebuilt, and both are compared. Offline."""

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from server.conversation.call import Call
from server.conversation.errors import RawBytesRemoved, StrataError
from server.conversation.manifest import decode_manifest, encode_manifest
from server.conversation.payload import ManifestEntry, Payload
from server.conversation.store import PayloadSource, RebuildSource
from server.inspection.differences import ValueDifference, find_value_difference
from server.inspection.manifest_difference import find_difference
from server.inspection.past_payload import PastPayload, rebuild_whole
from server.providers.provider import Provider
from server.replay.verify.answer_check import check_answer, check_record
from server.replay.verify.recorded_calls import CallFilter, Flaw, RecordedCall, RecordedCalls
from server.replay.verify.verification import (
    UNREADABLE,
    Counts,
    Mismatch,
    Subject,
    Verified,
    add_counts,
    describe_unreadable,
)

_NOT_ITS_BYTES: Final = "The stored answer differs from its raw bytes."
_NOT_ITS_CALL: Final = "The turn differs from the call that produced it."


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What to compare, and for which calls."""

    wanted: CallFilter = field(default_factory=CallFilter)
    requests: bool = True
    answers: bool = True
    mismatch_limit: int = 100
    """How many mismatches of one batch of conversations are kept. All are counted."""


class Verifier:
    """Checks conversations, call by call."""

    def __init__(self, calls: RecordedCalls, offline_providers: Mapping[str, Provider], options: VerifyOptions) -> None:
        """`offline_providers`: by name; they encode requests and parse answers without a key."""
        self._calls = calls
        self._offline_providers = offline_providers
        self._options = options

    async def verify(self, conversation_ids: Sequence[str]) -> Verified:
        """Verify these conversations. Those that do not exist, or were erased meanwhile, are left out."""
        counts, kept = Counts(), list[Mismatch]()
        async for conversation_id, calls in self._calls.conversations(conversation_ids, self._options.wanted):
            checked = await _Check(conversation_id, self._offline_providers, self._options).run(calls)
            if checked.counts.mismatch_count and not await self._calls.has_conversation(conversation_id):
                continue
            counts = add_counts(counts, checked.counts)
            kept += checked.mismatches[: self._options.mismatch_limit - len(kept)]
        return Verified(counts=counts, mismatches=tuple(kept))


class _Check:
    """The verification of one conversation."""

    def __init__(self, conversation_id: str, offline_providers: Mapping[str, Provider], options: VerifyOptions) -> None:
        self._conversation_id = conversation_id
        self._offline_providers = offline_providers
        self._options = options
        self._counts = Counter(conversation_count=1)
        self._unknown = Counter[str]()
        self._kept: list[Mismatch] = []

    async def run(self, calls: AsyncIterator[RecordedCall | Flaw]) -> Verified:
        async for item in calls:
            if isinstance(item, Flaw):
                self._add_flaw(item, None)
            else:
                await self._check(item)
        counts = Counts(**self._counts, unknown_providers=dict(self._unknown))
        return Verified(counts=counts, mismatches=tuple(self._kept))

    async def _check(self, recorded: RecordedCall) -> None:
        call = recorded.call
        self._count(call_count=1)
        for flaw in recorded.flaws:
            self._add_flaw(flaw, call)
        provider = self._offline_providers.get(call.start.provider)
        if provider is None:
            self._count(unknown_count=1)
            self._unknown[call.start.provider] += 1
            return
        if self._options.answers:
            self._check_answer(recorded, provider)
        if self._options.requests and recorded.source is not None and call.start.request_hash:
            await self._check_request(recorded, recorded.source, provider)

    def _check_answer(self, recorded: RecordedCall, provider: Provider) -> None:
        end = recorded.call.end
        if end is None:
            self._count(running_count=1)
            return
        difference = None
        if end.raw_response is not None:
            self._count(answer_count=1, raw_bytes=len(end.raw_response))
            try:
                difference = check_answer(recorded, end, provider.open_fold)
            # A bug in a fold is reported for the call that triggers it. Other calls are still checked.
            except Exception as error:  # noqa: BLE001  reason: reported as a mismatch
                note = describe_unreadable("The stored answer", error)
                self._add(recorded.call, Subject.ANSWER, position="answer", note=note)
            self._add_difference(recorded.call, difference, _NOT_ITS_BYTES)
        elif all(not flaw.position.startswith("raw_") for flaw in recorded.flaws):
            # Stored bytes that cannot be read are a flaw; they were not removed by retention.
            self._count(without_bytes_count=1)
        if difference is None and recorded.answer is not None:
            self._add_difference(recorded.call, check_record(recorded.answer, recorded.call, end), _NOT_ITS_CALL)

    async def _check_request(self, recorded: RecordedCall, source: PayloadSource, provider: Provider) -> None:
        call = recorded.call
        self._count(request_count=1)
        self._check_model(call, source)
        try:
            rebuild = RebuildSource(call=call, source=source, continued=recorded.continued)
            rebuilt = rebuild_whole(rebuild, provider=provider)
            body = await provider.encode_request(rebuilt.payload)
        except RawBytesRemoved:
            # The request repeats the answer that it continued, and the bytes of that answer were removed.
            self._count(without_bytes_count=1)
        except StrataError as error:
            self._add(call, Subject.REQUEST, position="request", note=f"It cannot be rebuilt: {error} [{error.code}]")
        except UNREADABLE as error:
            note = f"It cannot be rebuilt: its source is damaged ({type(error).__name__})."
            self._add(call, Subject.REQUEST, position="request", note=note)
        else:
            found = hashlib.sha256(body).digest()
            if found != call.start.request_hash:
                self._add_request_difference(call, rebuilt, body, found)
            else:
                self._check_manifest(call, rebuilt.manifest)

    def _check_model(self, call: Call, source: PayloadSource) -> None:
        """Check the provider and the model, which a request does not always contain."""
        definition = source.assistant.definition
        stored = {"provider": call.start.provider, "model": call.start.model}
        difference = find_value_difference(stored, {"provider": definition.provider, "model": definition.model}, "call")
        self._add_difference(call, difference, "The provider or the model is not the assistant's.", Subject.REQUEST)

    def _check_manifest(self, call: Call, rebuilt: Sequence[ManifestEntry]) -> None:
        """Check the manifest of a request that is the same. Cache markers are ignored: they depend on the release."""
        stored, found = list(call.start.manifest), list(encode_manifest(rebuilt))
        if stored == found:
            return
        try:
            bare = [[replace(entry, marked=False) for entry in each] for each in (decode_manifest(stored), rebuilt)]
        except UNREADABLE as error:
            self._add(call, Subject.BYTES, position="manifest", note=describe_unreadable("The manifest", error))
            return
        one, other = ([*encode_manifest(entries)] for entries in bare)
        note = "The request is the same, but its manifest differs."
        self._add_difference(call, find_value_difference(one, other, "manifest"), note, Subject.BYTES)

    def _add_request_difference(self, call: Call, payload: PastPayload, body: bytes, found_hash: bytes) -> None:
        mismatch = Mismatch(
            conversation_id=self._conversation_id,
            turn_seq=call.turn_seq,
            attempt=call.start.attempt,
            subject=Subject.REQUEST,
            position="request",
            note="All blocks are the same. The settings, the cache markers or the stored hash differ.",
            stored=call.start.request_hash.hex(),
            found=found_hash.hex(),
        )
        try:
            stored = decode_manifest(call.start.manifest)
        except UNREADABLE:
            self._keep(replace(mismatch, note="The request differs, and its manifest cannot be read."))
            return
        rebuilt = payload.manifest
        index = find_difference(stored, rebuilt)
        if index is None:
            self._keep(mismatch)
            return
        one, other = (blocks[index] if index < len(blocks) else None for blocks in (stored, rebuilt))
        self._keep(
            replace(
                mismatch,
                position=f"block {index + 1} of {len(stored)}{_offset_of(other, payload.payload, body)}",
                note=f"The first block that differs is {_name(one or other)}.",
                stored=_describe(one),
                found=_describe(other),
            )
        )

    def _add_difference(
        self, call: Call, difference: ValueDifference | None, note: str, subject: Subject = Subject.ANSWER
    ) -> None:
        if difference is not None:
            self._add(
                call,
                subject,
                position=difference.path,
                note=note,
                stored=difference.stored,
                found=difference.found,
            )

    def _add_flaw(self, flaw: Flaw, call: Call | None) -> None:
        self._add(call, Subject.BYTES, position=flaw.position, note=flaw.note, stored=flaw.stored, found=flaw.found)

    def _add(
        self,
        call: Call | None,
        subject: Subject,
        *,
        position: str,
        note: str,
        stored: str | None = None,
        found: str | None = None,
    ) -> None:
        self._keep(
            Mismatch(
                conversation_id=self._conversation_id,
                turn_seq=None if call is None else call.turn_seq,
                attempt=None if call is None else call.start.attempt,
                subject=subject,
                position=position,
                note=note,
                stored=stored,
                found=found,
            )
        )

    def _keep(self, mismatch: Mismatch) -> None:
        self._count(mismatch_count=1)
        if len(self._kept) < self._options.mismatch_limit:
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
    """Return the offset of the block in the rebuilt request, if its bytes occur there."""
    if entry is None or entry.seq is None:
        return ""
    data = next((message.data for message in payload.messages if message.seq == entry.seq), b"")
    offset = body.find(data) if data else -1
    return "" if offset < 0 else f", at byte {offset}"
