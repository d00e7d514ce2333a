"""One call under the lens: what was sent, proven by its hash; what came back, byte by byte and as what it means."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, TypeAlias

from server.conversation.call import Call
from server.conversation.errors import AnswerUnreadable, ProviderFailed, StrataError
from server.conversation.event import ProviderEvent
from server.conversation.manifest import build_manifest, decode_manifest, list_contents
from server.conversation.payload import ManifestEntry
from server.conversation.store import Store
from server.conversation.turn import ModelResponseTurn, Turn
from server.conversation.usage import Usage
from server.inspection.call_explanation import NOT_RECORDED, PROVIDER_UNKNOWN, UNREADABLE
from server.inspection.manifest_difference import (
    ComparedBlock,
    LayerShare,
    compare_manifests,
    find_difference,
    measure_blocks,
    share_layers,
    share_tokens,
)
from server.inspection.past_payload import rebuild_call
from server.inspection.port import CallOutline, CallPlace, Inspector
from server.inspection.signature_report import PartSignature, report_received, report_sent
from server.providers.model_profile import find_profile
from server.providers.pricing import Cost, CostLine, itemise_call, price_call
from server.providers.provider import Fold, Provider, ProviderAnswer
from server.providers.token_estimate import TokenEstimate

ReadFrames: TypeAlias = Callable[[bytes], Sequence[tuple[str, bytes]]]
"""The frames of a body: event's name and data."""

SENT_LIMIT: Final = 200
"""Of so many turns of a request, the newest, the signatures are looked at."""
_OK: Final = 200
_log = logging.getLogger("strata.inspection")


class RequestProof(StrEnum):
    """What became of making a request again."""

    EQUAL = "equal"
    """The same bytes: their hash is the stored one."""
    DIFFERENT = "different"
    IMPOSSIBLE = "impossible"
    """It could not be made: see the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltRequest:
    """A request, made again from what is stored."""

    proof: RequestProof
    body: bytes | None
    stored_hash: str
    rebuilt_hash: str | None
    first_difference: int | None = None
    """The first block of the manifest that differs; None where the blocks are the same and the rest is not."""
    error_code: str | None = None
    manifest: Sequence[ManifestEntry] = ()
    """Of the request as it was made again."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """What its blocks say, by their hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBlock:
    """A block of the manifest with its size."""

    entry: ManifestEntry
    size_bytes: int
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAnswer:
    """What the raw bytes mean, read again now."""

    events: Sequence[ProviderEvent]
    answer: ProviderAnswer
    error_code: str | None
    """Why reading ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInspection:
    """All that is known of a call."""

    tenant_id: str
    conversation_id: str
    call: Call
    attempts: Sequence[CallOutline]
    layers: Sequence[LayerShare]
    blocks: Sequence[SentBlock]
    are_tokens_reported: bool
    """Whether the tokens are those that the provider counted, shared out by bytes; else they are estimates."""
    request: RebuiltRequest
    frames: Sequence[tuple[str, bytes]]
    folded: FoldedAnswer | None
    """None where there are no bytes, or they are no stream."""
    sent_signatures: Sequence[PartSignature]
    received_signatures: Sequence[PartSignature]
    cost: Cost | None
    bill: Sequence[CostLine]
    """The cost, line by line; empty while the call runs."""
    turn: ModelResponseTurn | None
    """The answer that the turn came to; None while it runs, and for a call of no turn."""
    asked_at: datetime | None
    """When the input was stored that the turn answers."""
    previous: Call | None
    next_place: CallPlace | None
    difference: Sequence[ComparedBlock]
    """To the previous call's request; empty where there is none."""

    @property
    def gave_answer(self) -> bool:
        """Whether the turn's answer is the one of this call, and not of another attempt."""
        return self.turn is not None and self.turn.attempt == self.call.start.attempt

    @property
    def differs_from_turn(self) -> bool:
        """Whether the bytes, read again now, say anything else than the stored answer."""
        folded, turn = self.folded, self.turn
        if folded is None or turn is None or not self.gave_answer:
            return False
        return tuple(folded.answer.blocks) != tuple(turn.blocks)


class CallInspector:
    """Looks at calls."""

    def __init__(
        self,
        inspector: Inspector,
        store: Store,
        offline_providers: Mapping[str, Provider],
        read_frames: ReadFrames,
        estimate: TokenEstimate,
    ) -> None:
        """`offline_providers` write requests and read answers, by provider; they need no key."""
        self._inspector = inspector
        self._store = store
        self._offline_providers = offline_providers
        self._read_frames = read_frames
        self._estimate = estimate

    async def inspect_call(
        self, tenant_id: str | None, conversation_id: str, turn_seq: int, attempt: int
    ) -> CallInspection:
        """Raises `ConversationNotFound`, `CallNotFound`."""
        stored = await self._inspector.load_stored_call(tenant_id, conversation_id, turn_seq, attempt)
        call, owner = stored.call, stored.tenant_id
        manifest = decode_manifest(call.start.manifest)
        sizes = measure_blocks(manifest)
        reported = 0 if call.end is None else call.end.usage.input_tokens
        tokens = reported or self._estimate.estimate(call.start.model, sum(sizes))
        folded = self._fold(call)
        previous = None if stored.previous is None else decode_manifest(stored.previous.start.manifest)
        raw = _raw_of(call)
        turns = await self._load_turns(owner, conversation_id, turn_seq)
        return CallInspection(
            tenant_id=owner,
            conversation_id=conversation_id,
            call=call,
            attempts=stored.attempts,
            layers=share_layers(manifest, tokens),
            blocks=_blocks_of(manifest, sizes, tokens),
            are_tokens_reported=bool(reported),
            request=await self._rebuild(owner, conversation_id, call, manifest),
            frames=self._read_frames(raw) if raw and _is_stream(call) else (),
            folded=folded,
            sent_signatures=await self._report_sent(owner, conversation_id, call, manifest),
            received_signatures=_report_received(call, folded),
            cost=_price(call, folded),
            bill=_itemise(call, folded),
            turn=next((turn for turn in turns if isinstance(turn, ModelResponseTurn)), None),
            asked_at=next((turn.created_at for turn in turns if turn.seq == call.trigger_seq), None),
            previous=stored.previous,
            next_place=stored.next_place,
            difference=() if previous is None else compare_manifests(previous, manifest),
        )

    async def rebuild_request(
        self, tenant_id: str | None, conversation_id: str, turn_seq: int, attempt: int
    ) -> RebuiltRequest:
        """The request alone. Raises `ConversationNotFound`, `CallNotFound`."""
        stored = await self._inspector.load_stored_call(tenant_id, conversation_id, turn_seq, attempt)
        manifest = decode_manifest(stored.call.start.manifest)
        return await self._rebuild(stored.tenant_id, conversation_id, stored.call, manifest)

    async def _rebuild(
        self, tenant_id: str, conversation_id: str, call: Call, manifest: Sequence[ManifestEntry]
    ) -> RebuiltRequest:
        stored_hash = call.start.request_hash
        scribe = self._offline_providers.get(call.start.provider)
        if scribe is None:
            return _impossible(stored_hash, PROVIDER_UNKNOWN)
        if not stored_hash:
            return _impossible(stored_hash, NOT_RECORDED)
        try:
            source = await self._store.load_rebuild_source(
                tenant_id, conversation_id, call.turn_seq, call.start.attempt
            )
            payload = rebuild_call(source, provider=scribe)
            body = await scribe.encode_request(payload)
        except StrataError as error:
            return _impossible(stored_hash, error.code)
        except (LookupError, TypeError, ValueError):
            # What is stored may be damaged, and this is where somebody looks who has to find out.
            _log.warning("call.unreadable", exc_info=True, extra={"conversation_id": conversation_id})
            return _impossible(stored_hash, UNREADABLE)
        rebuilt = build_manifest(payload)
        found = hashlib.sha256(body).digest()
        is_equal = found == stored_hash
        return RebuiltRequest(
            proof=RequestProof.EQUAL if is_equal else RequestProof.DIFFERENT,
            body=body,
            stored_hash=stored_hash.hex(),
            rebuilt_hash=found.hex(),
            first_difference=None if is_equal else find_difference(manifest, rebuilt),
            manifest=rebuilt,
            contents=list_contents(payload),
        )

    async def _load_turns(self, tenant_id: str, conversation_id: str, turn_seq: int) -> Sequence[Turn]:
        """The input that a call answers, and the answer; nothing for a call of no turn."""
        if turn_seq < 1:
            return ()
        return await self._store.load_turns(tenant_id, conversation_id, turn_seq - 1, turn_seq)

    async def _report_sent(
        self, tenant_id: str, conversation_id: str, call: Call, manifest: Sequence[ManifestEntry]
    ) -> tuple[PartSignature, ...]:
        seqs = [entry.seq for entry in manifest if entry.seq is not None and entry.role == "model"]
        if not seqs:
            return ()
        first = max(min(seqs), max(seqs) - SENT_LIMIT + 1)
        turns = await self._store.load_turns(tenant_id, conversation_id, first, max(seqs))
        return report_sent([turn for turn in turns if turn.seq in seqs], call.start.warnings)

    def _fold(self, call: Call) -> FoldedAnswer | None:
        raw, scribe = _raw_of(call), self._offline_providers.get(call.start.provider)
        if not raw or scribe is None or not _is_stream(call):
            return None
        events: list[ProviderEvent] = []
        try:
            return _fold_whole(scribe.open_fold(), raw, events)
        # Whoever looks at a call has to find out what is wrong with it.
        except Exception:  # noqa: BLE001  reason: logged with its traceback, and shown as what it is
            _log.exception("call.answer_unreadable", extra={"turn_seq": call.turn_seq})
            return FoldedAnswer(events=events, answer=ProviderAnswer(), error_code=AnswerUnreadable.code)


def _fold_whole(fold: Fold, raw: bytes, events: list[ProviderEvent]) -> FoldedAnswer:
    try:
        _collect(events, fold.feed(raw))
        fold.finish()
    except ProviderFailed as error:
        return FoldedAnswer(events=events, answer=fold.answer, error_code=error.code)
    return FoldedAnswer(events=events, answer=fold.answer, error_code=None)


def _collect(events: list[ProviderEvent], found: Iterable[ProviderEvent]) -> None:
    """One by one: what came before a failure is kept."""
    for event in found:
        events.append(event)  # noqa: PERF402  reason: extending would lose what came before a failure


def _impossible(stored_hash: bytes, code: str) -> RebuiltRequest:
    return RebuiltRequest(
        proof=RequestProof.IMPOSSIBLE, body=None, stored_hash=stored_hash.hex(), rebuilt_hash=None, error_code=code
    )


def _raw_of(call: Call) -> bytes | None:
    return None if call.end is None else call.end.raw_response


def _is_stream(call: Call) -> bool:
    """A call whose body is an answer; another status has the provider's error."""
    return call.end is not None and call.end.status in {None, _OK}


def _blocks_of(manifest: Sequence[ManifestEntry], sizes: Sequence[int], tokens: int) -> tuple[SentBlock, ...]:
    shares = share_tokens(sizes, tokens)
    return tuple(
        SentBlock(entry=entry, size_bytes=size, token_count=share)
        for entry, size, share in zip(manifest, sizes, shares, strict=True)
    )


def _report_received(call: Call, folded: FoldedAnswer | None) -> tuple[PartSignature, ...]:
    if folded is None:
        return ()
    # Only here: a provider that this release does not know has no profiles.
    profile = find_profile(call.start.provider, call.start.model)
    return report_received(call.turn_seq, folded.answer.blocks, profile)


def _price(call: Call, folded: FoldedAnswer | None) -> Cost | None:
    """By bucket; None where the price or the usage is not known, or the call has not ended."""
    if call.end is None or (call.end.cost_usd is None and call.end.usage == Usage()):
        return None
    long_writes = 0 if folded is None else folded.answer.long_write_tokens
    return price_call(call.start.model, call.start.started_at, call.end.usage, long_write_tokens=long_writes)


def _itemise(call: Call, folded: FoldedAnswer | None) -> tuple[CostLine, ...]:
    if call.end is None:
        return ()
    long_writes = 0 if folded is None else folded.answer.long_write_tokens
    return itemise_call(call.start.model, call.start.started_at, call.end.usage, long_write_tokens=long_writes)
