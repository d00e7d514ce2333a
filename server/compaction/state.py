"""The state of a conversation as the planner sees it: exchanges, and estimates of their tokens.

An exchange is a user task and everything up to the last model response before the next user task. Every turn belongs to
exactly one exchange: turns before the first task form an exchange of their own, and turns that follow an answer without
a new task belong to the exchange of that answer. A cut between exchanges therefore loses no turn and separates no tool
call from its result.

The state is read in the same way after a turn, in a job, and for a client's request, so their decisions agree. Tokens
are estimates, good enough to choose the time of a compaction: requests are estimated by their bytes, answers by the
output and reasoning tokens that the provider reported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from server.conversation.block import ImageBlock, ToolCallBlock, ToolResultBlock
from server.conversation.manifest import encode_tools, find_separate_dynamic
from server.conversation.payload import LayerOrder
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import TurnKind, TurnState
from server.payload.dynamic_clock import decode_clock
from server.payload.settings import read_order
from server.payload.signatures import SignatureScope, build_signature_scope
from server.providers.model_profile import find_profile
from server.providers.token_estimate import TokenEstimate

_IMAGE_TOKENS: Final = 1_000
"""Approximately, for a medium-sized image on either provider."""
_CACHE_SECONDS: Final = 300.0
"""Claude's short lifetime. Gemini guarantees none; a few minutes are observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTurn:
    """A turn of the buffer: its size, and the tool calls and results in it."""

    seq: int
    kind: TurnKind
    state: TurnState = TurnState.COMPLETE
    call_ids: tuple[str, ...] = ()
    result_ids: tuple[str, ...] = ()
    sent_tokens: int
    """As sent to the provider: with signatures, thinking, and the dynamic block if that is inside the input."""
    segment_tokens: int
    """As it will be in the transcript, without reasoning."""
    thinking_tokens: int = 0
    """The part of `sent_tokens` that a prefix-bound model loses when the text before it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A user task and everything up to the next one."""

    first_seq: int
    last_seq: int
    sent_tokens: int
    segment_tokens: int
    thinking_tokens: int
    answer_count: int
    """The number of model responses: the calls that carried the buffer."""
    unsent_tokens: int
    """The tokens of its last answer. If the exchange is the newest, no request has carried them yet."""
    is_open: bool
    """Tool calls have no results yet. A following user task abandons them, so only the newest exchange can be open."""
    is_whole: bool
    """It ends with an answer and no tool call is pending: the next turn begins a new exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionState:
    """All that the decision depends on."""

    exchanges: Sequence[Exchange]
    """The exchanges of the buffer, oldest first."""
    static_tokens: int
    """Including tools and segments."""
    dynamic_tokens: int
    """Of a separate dynamic block, as in the layered order."""
    caches_buffer: bool
    """Whether the provider can cache the buffer: not if an explicit cache replaces the static text, nor if a separate
    dynamic block before the buffer changes with each request."""
    last_call_at: datetime | None
    """When the provider's cache was last used; None if it never was."""
    cache_lifetime_seconds: float
    typical_gap_seconds: float | None = None
    """Between an answer and the next user task of this conversation; None if unknown."""
    exchange_count: int = 0
    """Of the whole conversation so far, including compacted exchanges."""
    typical_exchange_count: float | None = None
    """How many exchanges conversations of this assistant usually have; None if unknown."""


def split_exchanges(turns: Sequence[BufferTurn]) -> tuple[Exchange, ...]:
    """Divide the turns into exchanges, in order. Each turn is in exactly one."""
    groups = list(_group(turns))
    last = len(groups) - 1
    return tuple(_summarise(group, is_newest=index == last) for index, group in enumerate(groups))


def _group(turns: Sequence[BufferTurn]) -> Iterator[Sequence[BufferTurn]]:
    start = 0
    for index, turn in enumerate(turns):
        if turn.kind is TurnKind.USER_TASK and index > start:
            yield turns[start:index]
            start = index
    if turns:
        yield turns[start:]


def _summarise(turns: Sequence[BufferTurn], *, is_newest: bool) -> Exchange:
    last = turns[-1]
    answered = last.kind is TurnKind.MODEL_RESPONSE
    is_open = is_newest and bool(_unanswered_calls(turns))
    return Exchange(
        first_seq=turns[0].seq,
        last_seq=last.seq,
        sent_tokens=sum(turn.sent_tokens for turn in turns),
        segment_tokens=sum(turn.segment_tokens for turn in turns),
        thinking_tokens=sum(turn.thinking_tokens for turn in turns),
        answer_count=sum(turn.kind is TurnKind.MODEL_RESPONSE for turn in turns),
        unsent_tokens=last.sent_tokens if answered else 0,
        is_open=is_open,
        is_whole=answered and not is_open,
    )


def _unanswered_calls(turns: Sequence[BufferTurn]) -> set[str]:
    """Return the calls of the last answer that have no result. An answer that did not complete has no pending calls."""
    last = max((index for index, turn in enumerate(turns) if turn.kind is TurnKind.MODEL_RESPONSE), default=None)
    if last is None or turns[last].state is not TurnState.COMPLETE:
        return set()
    results = {id_ for turn in turns[last + 1 :] for id_ in turn.result_ids}
    return set(turns[last].call_ids) - results


def count_request(state: CompactionState) -> int:
    """Return the tokens of a request without a new task."""
    buffered = sum(exchange.sent_tokens for exchange in state.exchanges)
    return state.static_tokens + state.dynamic_tokens + buffered


def read_state(
    source: PayloadSource,
    *,
    static_length: int,
    estimate: TokenEstimate,
    typical_exchange_count: float | None = None,
) -> CompactionState:
    """Estimate all that the decision depends on.

    `static_length` is the length of the static text in characters. `typical_exchange_count` is None if unknown.
    """
    definition = source.assistant.definition
    profile = find_profile(definition.provider, definition.model)
    order = read_order(definition.settings, profile)
    scope = None
    if profile.prefix_bound and source.epoch is not None:
        scope = build_signature_scope(definition.provider, "", profile, source.epoch)
    turns = tuple(_measure(source.buffered, order, definition.model, estimate, scope))
    return CompactionState(
        exchanges=split_exchanges(turns),
        static_tokens=estimate.estimate(definition.model, static_length + len(encode_tools(definition.tools))),
        dynamic_tokens=_dynamic_tokens(source, order, estimate),
        caches_buffer=_caches_buffer(source, order),
        last_call_at=max(
            (turn.created_at for turn in source.buffered if turn.prefix_hash is not None and turn.created_at),
            default=None,
        ),
        cache_lifetime_seconds=_cache_lifetime(source),
        typical_gap_seconds=_typical_gap(source.buffered),
        exchange_count=source.exchange_count,
        typical_exchange_count=typical_exchange_count,
    )


def _measure(
    turns: Sequence[BufferedTurn], order: LayerOrder, model: str, estimate: TokenEstimate, scope: SignatureScope | None
) -> Iterator[BufferTurn]:
    """`scope`: thinking is sent only if it was created with the prefix of this scope. None if thinking is sent in any
    case.
    """
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        sent = estimate.estimate(model, len(turn.native.data))
        transcript = sent
        blocks = turn.blocks or ()
        thinking = 0
        if turn.kind is TurnKind.MODEL_RESPONSE:
            transcript = turn.output_tokens or sent
            if scope is None or scope.has_prefix(turn.prefix_hash):
                thinking = _count_thinking(turn, sent - transcript)
            sent = transcript + thinking
        else:
            dynamic = None if following is None else _inside_input(following, order)
            images = sum(isinstance(block, ImageBlock) for block in blocks)
            sent += estimate.estimate(model, len(dynamic or b"")) + images * _IMAGE_TOKENS
        yield BufferTurn(
            seq=turn.seq,
            kind=turn.kind,
            state=turn.state,
            call_ids=tuple(block.id for block in blocks if isinstance(block, ToolCallBlock)),
            result_ids=tuple(block.tool_call_id for block in blocks if isinstance(block, ToolResultBlock)),
            sent_tokens=sent,
            segment_tokens=transcript,
            thinking_tokens=thinking,
        )


def _inside_input(answer: BufferedTurn, order: LayerOrder) -> bytes | str | None:
    return answer.input_time if order is LayerOrder.LAYERED else answer.dynamic or answer.input_time


def _count_thinking(turn: BufferedTurn, rest: int) -> int:
    """Return the tokens of an answer besides its text, given the `rest` by bytes. At most the reported reasoning: most
    of those bytes are a signature, not text.
    """
    thought = rest if turn.reasoning_tokens is None else min(rest, turn.reasoning_tokens)
    return max(0, thought)


def _dynamic_tokens(source: PayloadSource, order: LayerOrder, estimate: TokenEstimate) -> int:
    """The tokens of a separate dynamic message. In the append-only order the layer is counted with the input that
    contains it.
    """
    if order is LayerOrder.APPEND_ONLY:
        return 0
    separate = find_separate_dynamic(source.previous_manifest)
    length = 0 if separate is None else separate.length
    return estimate.estimate(source.assistant.definition.model, length)


def _caches_buffer(source: PayloadSource, order: LayerOrder) -> bool:
    previous = source.previous_call
    if order is LayerOrder.APPEND_ONLY or previous is None:
        return True
    return "cached_content" not in previous.caching and not decode_clock(previous.caching).is_volatile


def _cache_lifetime(source: PayloadSource) -> float:
    requested = None if source.previous_call is None else source.previous_call.caching.get("cache_seconds")
    return float(requested) if requested else _CACHE_SECONDS


def _typical_gap(turns: Sequence[BufferedTurn]) -> float | None:
    """The median time between an answer and the next task."""
    gaps = [
        (task.created_at - answer.created_at).total_seconds()
        for answer, task in pairwise(turns)
        if answer.kind is TurnKind.MODEL_RESPONSE
        and task.kind is TurnKind.USER_TASK
        and answer.created_at is not None
        and task.created_at is not None
    ]
    return median(gaps) if gaps else None
