"""One call as JSON, for operators.

Signatures are described by length and fingerprint. The frames contain them in full, and so do the raw response and the
request, which have routes of their own.
"""

from dataclasses import asdict
from datetime import datetime
from typing import Any, Final, Self

from pydantic import Field

from server.conversation.call import CallEnd, CallStart
from server.conversation.event import ProviderEvent
from server.conversation.payload import Layer, LayerOrder
from server.conversation.turn import StopReason
from server.inspection.calls import FoldedAnswer, InspectedCall, RebuiltRequest, RequestProof, SentBlock
from server.inspection.manifest_difference import ComparedBlock
from server.inspection.signatures import SignatureState
from server.web.api.inspection_views import TENANT_ID, CallOutlineView
from server.web.api.views import CONVERSATION_ID, EXAMPLE_TIME, BlockView, UsageView, View, view_blocks

_HASH: Final = "9f86d081884c7d659a2feaa0c55ad015"
_LONG_HASH: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
EVENT_LIMIT: Final = 2000
"""Maximum number of events and frames. The raw response has all bytes."""
_EVENT_NAMES: Final = {
    "ThinkingDelta": "thinking.delta",
    "TextDelta": "text.delta",
    "ToolCallBegin": "tool_call.begin",
    "ToolCallDelta": "tool_call.delta",
    "ToolCallEnd": "tool_call.end",
    "UsageReported": "usage",
}


def name_event(event: ProviderEvent) -> str:
    """Return the public name of an event."""
    return _EVENT_NAMES[type(event).__name__]


class LayerView(View):
    """The size of one layer of the request."""

    layer: Layer = Field(examples=["static"])
    blocks: int = Field(validation_alias="block_count", examples=[2])
    bytes: int = Field(validation_alias="size_bytes", examples=[8200])
    tokens: int = Field(validation_alias="token_count", examples=[2100])


class ManifestEntryView(View):
    """A block of a request."""

    layer: Layer = Field(examples=["buffered"])
    kind: str = Field(description="`tools`, `static`, `dynamic`, `signed_summary` or `message`.", examples=["message"])
    role: str = Field(examples=["user"])
    seq: int | None = Field(description="The turn that it was built from.", examples=[1])
    hash: str = Field(examples=[_HASH])
    length: int = Field(description="Bytes.", examples=[120])
    marked: bool = Field(description="Whether a cache marker follows it.", examples=[False])


class SentBlockView(ManifestEntryView):
    """A block of the request with its size."""

    bytes: int = Field(description="Without a dynamic block that it contains.", examples=[120])
    tokens: int = Field(examples=[30])

    @classmethod
    def showing(cls, block: SentBlock) -> Self:
        entry = ManifestEntryView.of(block.entry)
        return cls(**entry.model_dump(), bytes=block.size_bytes, tokens=block.token_count)


class ComparedBlockView(ManifestEntryView):
    """A block of this request or of the previous one."""

    change: str = Field(description="`same`, `added` or `removed`.", examples=["same"])

    @classmethod
    def comparing(cls, block: ComparedBlock) -> Self:
        return cls(**ManifestEntryView.of(block.entry).model_dump(), change=block.change)


class RequestView(View):
    """The request, rebuilt from stored data."""

    proof: RequestProof = Field(description="Whether the rebuilt bytes have the stored hash.", examples=["equal"])
    bytes: int | None = Field(examples=[9100])
    stored_hash: str = Field(examples=[_LONG_HASH])
    rebuilt_hash: str | None = Field(examples=[_LONG_HASH])
    first_difference: int | None = Field(description="Index of the first block that differs.", examples=[None])
    error_code: str | None = Field(description="Why it cannot be rebuilt.", examples=[None])

    @classmethod
    def of(cls, request: RebuiltRequest) -> Self:
        return cls(
            proof=request.proof,
            bytes=None if request.body is None else len(request.body),
            stored_hash=request.stored_hash,
            rebuilt_hash=request.rebuilt_hash,
            first_difference=request.first_difference,
            error_code=request.error_code,
        )


class SignatureView(View):
    """The signature of a block."""

    seq: int = Field(examples=[2])
    index: int = Field(description="Index of the block in its turn, from 0.", examples=[0])
    block_type: str = Field(examples=["thinking"])
    state: SignatureState = Field(examples=["present"])
    length: int | None = Field(examples=[48])
    fingerprint: str | None = Field(examples=["0123456789abcdef"])
    reason: str | None = Field(description="Why it was withheld.", examples=[None])


class EventView(View):
    """An event of the folded response."""

    type: str = Field(examples=["text.delta"])
    data: dict[str, Any] = Field(examples=[{"text": "It rains."}])

    @classmethod
    def of(cls, event: ProviderEvent) -> Self:
        return cls(type=name_event(event), data=asdict(event))


class FoldedView(View):
    """The raw response, folded again."""

    events: list[EventView]
    event_count: int = Field(
        description="Number of all events; of a long answer, `events` has the first ones.", examples=[12]
    )
    blocks: list[BlockView]
    stop_reason: StopReason | None = Field(examples=["end_turn"])
    error_code: str | None = Field(description="Why folding ended early.", examples=[None])

    @classmethod
    def of(cls, folded: FoldedAnswer) -> Self:
        return cls(
            events=[EventView.of(event) for event in folded.events[:EVENT_LIMIT]],
            event_count=len(folded.events),
            blocks=view_blocks(folded.answer.blocks),
            stop_reason=folded.answer.stop_reason,
            error_code=folded.error_code,
        )


class CostView(View):
    """The cost by bucket, in USD. Null if the price is not known."""

    fresh_input: float | None = Field(validation_alias="fresh_input_usd", examples=[0.00024])
    cache_read: float | None = Field(validation_alias="cache_read_usd", examples=[0.00082])
    cache_write: float | None = Field(validation_alias="cache_write_usd", examples=[0.0])
    output: float | None = Field(validation_alias="output_usd", examples=[0.0005])
    reasoning: float | None = Field(validation_alias="reasoning_usd", examples=[0.0002])
    total: float | None = Field(validation_alias="total_usd", examples=[0.00176])


class CallRef(View):
    """The turn and attempt of a call."""

    turn_seq: int = Field(examples=[2])
    attempt: int = Field(examples=[1])


class FrameView(View):
    """One SSE frame."""

    event: str = Field(description="The event name; empty if the frame has none.", examples=[""])
    data: str = Field(description="Invalid UTF-8 is replaced.", examples=['{"candidates":[]}'])


class CallView(View):
    """Everything that is known about a call."""

    tenant_id: str = Field(examples=[TENANT_ID])
    conversation_id: str = Field(examples=[CONVERSATION_ID])
    turn_seq: int = Field(examples=[2])
    attempt: int = Field(examples=[1])
    provider: str = Field(examples=["gemini"])
    model: str = Field(examples=["gemini-3.1-pro-preview"])
    account: str = Field(description="Fingerprint of the credentials.", examples=["0123456789abcdef"])
    epoch: int = Field(examples=[1])
    layer_order: LayerOrder = Field(examples=["layered"])
    dynamic: str = Field(description="The dynamic layer as sent.", examples=['{"todos":["pack"]}'])
    attempts: list[CallOutlineView] = Field(description="All calls of the same turn.")
    layers: list[LayerView]
    blocks: list[SentBlockView] = Field(description="The manifest.")
    tokens_reported: bool = Field(
        description="Whether token counts are shares of the provider's count; otherwise they are estimates.",
        examples=[True],
    )
    request: RequestView
    previous: CallRef | None = Field(description="The previous call; null if there is none.")
    next: CallRef | None = Field(description="The next call; null if there is none.")
    difference: list[ComparedBlockView] = Field(
        description="The difference from the request of the previous call, block by block."
    )
    sent_signatures: list[SignatureView] = Field(description="Signatures of the answers in the request.")
    received_signatures: list[SignatureView]
    repairs: list[dict[str, Any]] = Field(examples=[[]])
    template_failures: list[dict[str, Any]] = Field(examples=[[]])
    warnings: list[dict[str, Any]] = Field(examples=[[]])
    caching: dict[str, Any] = Field(description="The cache settings of the request.", examples=[{"cache_seconds": 300}])
    cache_expected_tokens: int | None = Field(examples=[4096])
    cache_miss_reason: str | None = Field(
        description="Why less was read from the cache than possible.", examples=[None]
    )
    started_at: datetime = Field(examples=[EXAMPLE_TIME])
    first_byte_at: datetime | None = Field(examples=[EXAMPLE_TIME])
    ended_at: datetime | None = Field(examples=[EXAMPLE_TIME])
    status: int | None = Field(examples=[200])
    headers: dict[str, str] = Field(examples=[{"request-id": "req_1"}])
    response_id: str | None = Field(examples=["resp_1"])
    error_code: str | None = Field(examples=[None])
    usage: UsageView | None
    usage_reported: dict[str, Any] | None = Field(
        description="As the provider reported it.", examples=[{"promptTokenCount": 15}]
    )
    cost: CostView | None
    raw_bytes: int | None = Field(description="Null if no bytes are stored.", examples=[2210])
    frames: list[FrameView]
    frame_count: int = Field(examples=[12])
    folded: FoldedView | None
    differs_from_turn: bool = Field(
        description="Whether the folded response differs from the stored turn.", examples=[False]
    )

    @classmethod
    def of(cls, found: InspectedCall) -> Self:
        return cls(
            tenant_id=found.tenant_id,
            conversation_id=found.conversation_id,
            turn_seq=found.call.turn_seq,
            attempts=[CallOutlineView.of(call) for call in found.attempts],
            **_read_start(found.call.start),
            **_read_end(found.call.end),
            **_views_of(found),
        )


_START: Final = (
    "attempt",
    "provider",
    "model",
    "account",
    "epoch",
    "layer_order",
    "cache_expected_tokens",
    "started_at",
)
_END: Final = ("cache_miss_reason", "first_byte_at", "ended_at", "status", "response_id", "error_code")


def _read_start(start: CallStart) -> dict[str, Any]:
    return {
        **{name: getattr(start, name) for name in _START},
        "dynamic": start.dynamic.decode("utf-8", "surrogatepass"),
        "caching": dict(start.caching),
        "repairs": [dict(note) for note in start.repairs],
        "template_failures": [dict(note) for note in start.template_failures],
        "warnings": [dict(note) for note in start.warnings],
    }


def _read_end(end: CallEnd | None) -> dict[str, Any]:
    reported = None if end is None else end.usage_reported
    return {
        **{name: None if end is None else getattr(end, name) for name in _END},
        "headers": {} if end is None else dict(end.headers),
        "usage": None if end is None else UsageView.of(end.usage),
        "usage_reported": None if reported is None else dict(reported),
        "raw_bytes": None if end is None or end.raw_response is None else len(end.raw_response),
    }


def _views_of(found: InspectedCall) -> dict[str, Any]:
    previous, following = found.previous, found.next_call
    return {
        "layers": [LayerView.of(share) for share in found.layers],
        "blocks": [SentBlockView.showing(block) for block in found.blocks],
        "tokens_reported": found.are_tokens_reported,
        "request": RequestView.of(found.request),
        "previous": None if previous is None else CallRef(turn_seq=previous.turn_seq, attempt=previous.start.attempt),
        "next": None if following is None else CallRef(turn_seq=following.turn_seq, attempt=following.attempt),
        "difference": [ComparedBlockView.comparing(block) for block in found.compared],
        "sent_signatures": [SignatureView.of(each) for each in found.sent_signatures],
        "received_signatures": [SignatureView.of(each) for each in found.received_signatures],
        "cost": None if found.cost is None else CostView.of(found.cost),
        "frames": [
            FrameView(event=event, data=data.decode("utf-8", "replace")) for event, data in found.frames[:EVENT_LIMIT]
        ],
        "frame_count": len(found.frames),
        "folded": None if found.folded is None else FoldedView.of(found.folded),
        "differs_from_turn": found.differs_from_turn,
    }
