"""One call in full: the projection that all renderings (JSON, pages, terminal) use.

The request is rebuilt and compared with the stored hash. The raw response is folded again. Outcome, cache, notes and
signatures are explained here once.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, TypeAlias

from server.conversation.block import JsonValue
from server.conversation.call import Call
from server.conversation.errors import AnswerUnreadable, ProviderFailed, StrataError
from server.conversation.event import ProviderEvent
from server.conversation.manifest import build_manifest, decode_manifest, list_contents
from server.conversation.payload import ManifestEntry
from server.conversation.store import Store
from server.conversation.turn import ModelResponseTurn, Turn, describe_ending
from server.conversation.usage import Usage
from server.inspection.call_explanation import (
    NOT_RECORDED,
    PROVIDER_UNKNOWN,
    UNREADABLE,
    CacheExplanation,
    Outcome,
    explain_cache,
    explain_error,
    explain_outcome,
    explain_repair,
    explain_template,
    explain_warning,
    explain_withheld,
)
from server.inspection.manifest_difference import (
    ComparedBlock,
    DifferenceRow,
    LayerShare,
    compare_manifests,
    find_difference,
    measure_blocks,
    share_layers,
    share_tokens,
    summarize_difference,
)
from server.inspection.past_payload import rebuild_call
from server.inspection.port import CallKey, Inspector
from server.inspection.signatures import BlockSignature, SignatureState, list_received, list_sent
from server.inspection.timeline import CallOutline
from server.providers.model_profile import find_profile
from server.providers.pricing import Cost, CostLine, itemise_call, price_call
from server.providers.provider import Fold, Provider, ProviderAnswer
from server.providers.token_estimate import TokenEstimate

ReadFrames: TypeAlias = Callable[[bytes], Sequence[tuple[str, bytes]]]
"""Splits a body into frames: the event name and data of each."""

MAX_SENT_TURNS: Final = 200
"""Signatures are listed for the newest turns of a request, at most this many."""
_OK: Final = 200
_SEVERITY: Final = (
    SignatureState.MISSING,
    SignatureState.WITHHELD,
    SignatureState.PRESENT,
    SignatureState.UNSIGNED,
)
_log = logging.getLogger("strata.inspection")


class RequestProof(StrEnum):
    """The result of rebuilding a request."""

    EQUAL = "equal"
    """The rebuilt bytes have the stored hash."""
    DIFFERENT = "different"
    IMPOSSIBLE = "impossible"
    """The request cannot be rebuilt: see the error code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltRequest:
    """A request rebuilt from stored data."""

    proof: RequestProof
    body: bytes | None
    stored_hash: str
    rebuilt_hash: str | None
    first_difference: int | None = None
    """Index of the first block that differs. None if only the settings or cache markers differ."""
    error_code: str | None = None
    manifest: Sequence[ManifestEntry] = ()
    """The manifest of the rebuilt request."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """The contents of its blocks, by hash."""

    @property
    def error(self) -> str:
        """Why the request cannot be rebuilt, as a sentence; empty if it can."""
        return explain_error(self.error_code).message if self.error_code else ""

    @property
    def rebuilt_block(self) -> ManifestEntry | None:
        """The rebuilt block at `first_difference`. None if the rebuilt request is shorter."""
        index = self.first_difference
        return None if index is None or index >= len(self.manifest) else self.manifest[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBlock:
    """A block of the manifest with its size."""

    entry: ManifestEntry
    size_bytes: int
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAnswer:
    """The raw response, folded again."""

    events: Sequence[ProviderEvent]
    answer: ProviderAnswer
    error_code: str | None
    """Why folding ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNote:
    """A repair, template failure or warning, with an explanation."""

    group: str
    """`repair`, `template failure` or `warning`."""
    kind: str
    explanation: str
    """Empty for a kind that this release does not have."""
    details: Mapping[str, JsonValue]
    """The members without the kind and without empty values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSignature:
    """A signature that the call sent or received."""

    is_received: bool
    signature: BlockSignature
    reason: str
    """Why it was withheld, explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """A part of the time that a call took."""

    name: str
    """`before`, `waiting` or `streaming`."""
    label: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedCall:
    """Everything that is known about a call."""

    tenant_id: str
    conversation_id: str
    call: Call
    attempts: Sequence[CallOutline]
    layers: Sequence[LayerShare]
    blocks: Sequence[SentBlock]
    are_tokens_reported: bool
    """Whether token counts are shares of the provider's count; otherwise they are estimates."""
    request: RebuiltRequest
    frames: Sequence[tuple[str, bytes]]
    folded: FoldedAnswer | None
    """None if there are no bytes, or they are not a stream."""
    sent_signatures: Sequence[BlockSignature]
    received_signatures: Sequence[BlockSignature]
    cost: Cost | None
    cost_lines: Sequence[CostLine]
    """The cost by bucket. Empty while the call is running."""
    turn: ModelResponseTurn | None
    """The stored answer of the turn. None while the turn runs, and for a call that belongs to no turn."""
    input_stored_at: datetime | None
    """When the input of the turn was stored."""
    previous: Call | None
    next_call: CallKey | None
    compared: Sequence[ComparedBlock]
    """The difference from the previous call's request. Empty without a previous call."""

    @property
    def is_turn_answer(self) -> bool:
        """Whether this attempt gave the stored answer."""
        return self.turn is not None and self.turn.attempt == self.call.start.attempt

    @property
    def differs_from_turn(self) -> bool:
        """Whether the folded bytes differ from the stored answer."""
        folded, turn = self.folded, self.turn
        if folded is None or turn is None or not self.is_turn_answer:
            return False
        return tuple(folded.answer.blocks) != tuple(turn.blocks)

    @property
    def outcome(self) -> Outcome:
        """How the call ended."""
        return explain_outcome(self.call, self.turn, self.folded.answer.stop_reason if self.folded else None)

    @property
    def ending(self) -> str:
        """What the provider said about the end of the answer, as sentences; empty if nothing."""
        return describe_ending(self.turn.ending) if self.turn is not None and self.is_turn_answer else ""

    @property
    def cache(self) -> CacheExplanation:
        """What was read from the cache, compared with the expectation."""
        return explain_cache(self.call)

    @property
    def difference(self) -> tuple[DifferenceRow, ...]:
        """The difference from the previous request, with runs of equal blocks collapsed."""
        return summarize_difference(self.compared)

    @property
    def notes(self) -> tuple[CallNote, ...]:
        """Repairs, template failures and warnings, in this order."""
        start = self.call.start
        return (
            *_explain_notes("repair", start.repairs, explain_repair),
            *_explain_notes("template failure", start.template_failures, explain_template),
            *_explain_notes("warning", start.warnings, explain_warning),
        )

    @property
    def signatures(self) -> tuple[CallSignature, ...]:
        """All signatures: problems first, then by turn, newest first."""
        listed = [
            *((True, signature) for signature in self.received_signatures),
            *((False, signature) for signature in self.sent_signatures),
        ]
        listed.sort(key=lambda pair: (_SEVERITY.index(pair[1].state), -pair[1].seq, pair[1].index))
        return tuple(
            CallSignature(
                is_received=is_received,
                signature=signature,
                reason=explain_withheld(signature.reason) if signature.reason else "",
            )
            for is_received, signature in listed
        )

    @property
    def spans(self) -> tuple[TimeSpan, ...]:
        """Where the time went. While the call is running, only the time before it."""
        start, end = self.call.start, self.call.end
        earlier = [outline for outline in self.attempts if outline.attempt < start.attempt]
        attempt_ended_at = earlier[-1].ended_at if earlier else None
        label = "since the previous attempt ended" if attempt_ended_at else "since the input was stored"
        before = _seconds_between(attempt_ended_at or self.input_stored_at or start.started_at, start.started_at)
        spans = [TimeSpan(name="before", label=label, seconds=before)]
        if end is not None:
            waited = _seconds_between(start.started_at, end.first_byte_at or end.ended_at)
            spans.append(TimeSpan(name="waiting", label="until the first byte", seconds=waited))
            if end.first_byte_at is not None:
                streamed = _seconds_between(end.first_byte_at, end.ended_at)
                spans.append(TimeSpan(name="streaming", label="until the last byte", seconds=streamed))
        return tuple(spans)


class CallInspector:
    """Loads calls and builds their projection."""

    def __init__(
        self,
        inspector: Inspector,
        store: Store,
        offline_providers: Mapping[str, Provider],
        read_frames: ReadFrames,
        estimate: TokenEstimate,
    ) -> None:
        """`offline_providers` encode requests and fold answers, by provider name; they need no API key."""
        self._inspector = inspector
        self._store = store
        self._offline_providers = offline_providers
        self._read_frames = read_frames
        self._estimate = estimate

    async def inspect_call(
        self, tenant_id: str | None, conversation_id: str, turn_seq: int, attempt: int
    ) -> InspectedCall:
        """Load and project a call. Raises `ConversationNotFound` and `CallNotFound`."""
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
        return InspectedCall(
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
            sent_signatures=await self._list_sent(owner, conversation_id, call, manifest),
            received_signatures=_list_received(call, folded),
            cost=_price(call, folded),
            cost_lines=_itemise(call, folded),
            turn=next((turn for turn in turns if isinstance(turn, ModelResponseTurn)), None),
            input_stored_at=next((turn.created_at for turn in turns if turn.seq == call.trigger_seq), None),
            previous=stored.previous,
            next_call=stored.next_call,
            compared=() if previous is None else compare_manifests(previous, manifest),
        )

    async def rebuild_request(
        self, tenant_id: str | None, conversation_id: str, turn_seq: int, attempt: int
    ) -> RebuiltRequest:
        """Rebuild the request of a call. Raises `ConversationNotFound` and `CallNotFound`."""
        stored = await self._inspector.load_stored_call(tenant_id, conversation_id, turn_seq, attempt)
        manifest = decode_manifest(stored.call.start.manifest)
        return await self._rebuild(stored.tenant_id, conversation_id, stored.call, manifest)

    async def _rebuild(
        self, tenant_id: str, conversation_id: str, call: Call, manifest: Sequence[ManifestEntry]
    ) -> RebuiltRequest:
        stored_hash = call.start.request_hash
        provider = self._offline_providers.get(call.start.provider)
        if provider is None:
            return _impossible(stored_hash, PROVIDER_UNKNOWN)
        if not stored_hash:
            return _impossible(stored_hash, NOT_RECORDED)
        try:
            source = await self._store.load_rebuild_source(
                tenant_id, conversation_id, call.turn_seq, call.start.attempt
            )
            payload = rebuild_call(source, provider=provider)
            body = await provider.encode_request(payload)
        except StrataError as error:
            return _impossible(stored_hash, error.code)
        except (LookupError, TypeError, ValueError):
            # Damaged rows must not break the page on which an operator looks for the damage.
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
        """Load the input and the answer of a turn; nothing for a call that belongs to no turn."""
        if turn_seq < 1:
            return ()
        return await self._store.load_turns(tenant_id, conversation_id, turn_seq - 1, turn_seq)

    async def _list_sent(
        self, tenant_id: str, conversation_id: str, call: Call, manifest: Sequence[ManifestEntry]
    ) -> tuple[BlockSignature, ...]:
        seqs = [entry.seq for entry in manifest if entry.seq is not None and entry.role == "model"]
        if not seqs:
            return ()
        first = max(min(seqs), max(seqs) - MAX_SENT_TURNS + 1)
        turns = await self._store.load_turns(tenant_id, conversation_id, first, max(seqs))
        return list_sent([turn for turn in turns if turn.seq in seqs], call.start.warnings)

    def _fold(self, call: Call) -> FoldedAnswer | None:
        raw, provider = _raw_of(call), self._offline_providers.get(call.start.provider)
        if not raw or provider is None or not _is_stream(call):
            return None
        events: list[ProviderEvent] = []
        try:
            return _fold_whole(provider.open_fold(), raw, events)
        except Exception:  # noqa: BLE001  reason: logged with its traceback, and shown as an unreadable answer
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
    for event in found:
        events.append(event)  # noqa: PERF402  reason: `extend` would lose the events before a failure


def _impossible(stored_hash: bytes, code: str) -> RebuiltRequest:
    return RebuiltRequest(
        proof=RequestProof.IMPOSSIBLE, body=None, stored_hash=stored_hash.hex(), rebuilt_hash=None, error_code=code
    )


def _raw_of(call: Call) -> bytes | None:
    return None if call.end is None else call.end.raw_response


def _is_stream(call: Call) -> bool:
    """Whether the body is an answer. With another status it is the provider's error."""
    return call.end is not None and call.end.status in {None, _OK}


def _blocks_of(manifest: Sequence[ManifestEntry], sizes: Sequence[int], tokens: int) -> tuple[SentBlock, ...]:
    shares = share_tokens(sizes, tokens)
    return tuple(
        SentBlock(entry=entry, size_bytes=size, token_count=share)
        for entry, size, share in zip(manifest, sizes, shares, strict=True)
    )


def _list_received(call: Call, folded: FoldedAnswer | None) -> tuple[BlockSignature, ...]:
    if folded is None:
        return ()
    # An unknown provider has no profiles, but its answers are not folded either.
    profile = find_profile(call.start.provider, call.start.model)
    return list_received(call.turn_seq, folded.answer.blocks, profile)


def _price(call: Call, folded: FoldedAnswer | None) -> Cost | None:
    """None if the price or the usage is unknown, or the call has not ended."""
    if call.end is None or (call.end.cost_usd is None and call.end.usage == Usage()):
        return None
    long_writes = 0 if folded is None else folded.answer.long_write_tokens
    return price_call(call.start.model, call.start.started_at, call.end.usage, long_write_tokens=long_writes)


def _itemise(call: Call, folded: FoldedAnswer | None) -> tuple[CostLine, ...]:
    if call.end is None:
        return ()
    long_writes = 0 if folded is None else folded.answer.long_write_tokens
    return itemise_call(call.start.model, call.start.started_at, call.end.usage, long_write_tokens=long_writes)


def _explain_notes(
    group: str, notes: Sequence[Mapping[str, JsonValue]], explain: Callable[[Mapping[str, JsonValue]], str]
) -> Iterator[CallNote]:
    for note in notes:
        yield CallNote(
            group=group,
            kind=str(note.get("kind", "")),
            explanation=explain(note),
            details={name: value for name, value in note.items() if name != "kind" and value not in (None, [], "")},
        )


def _seconds_between(start: datetime, end: datetime) -> float:
    """Never negative: the times may come from different clocks."""
    return max(0.0, (end - start).total_seconds())
