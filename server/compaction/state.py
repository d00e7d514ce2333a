"""Exchanges: the pieces in which a history is compacted.

An exchange is a user task up to the last model response before the next user task. Every turn belongs to exactly one:
what stands before the first task is an exchange of its own, and what follows an answer without a new task belongs to
the exchange of that answer. A cut between exchanges therefore loses nothing and parts no call from its result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from server.conversation.block import ImageBlock, ToolCallBlock, ToolResultBlock
from server.conversation.manifest import decode_manifest, encode_tools
from server.conversation.payload import Layer, LayerOrder
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import TurnKind, TurnState
from server.payload.settings import read_order
from server.payload.signatures import SignatureScope, build_signature_scope
from server.providers.model_profile import find_profile
from server.providers.token_estimate import TokenEstimate

_IMAGE_TOKENS: Final = 1_000
"""About, for an image of middle size on either provider."""
_CACHE_SECONDS: Final = 300.0
"""Of Claude's short lifetime. Gemini promises nothing; minutes, as far as anybody has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTurn:
    """A turn of the buffer as the compactor sees it: what it weighs, and which calls hang on it."""

    seq: int
    kind: TurnKind
    state: TurnState = TurnState.COMPLETE
    call_ids: tuple[str, ...] = ()
    result_ids: tuple[str, ...] = ()
    sent_tokens: int
    """As it goes to the provider: with signatures, thinking, and the dynamic block where that stays in its input."""
    segment_tokens: int
    """As it will be in the transcript, without reasoning."""
    thinking_tokens: int = 0
    """Of the sent ones: those that a prefix-bound model loses when what stands before them changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A user task and everything up to the next one."""

    first_seq: int
    last_seq: int
    sent_tokens: int
    segment_tokens: int
    thinking_tokens: int
    answer_count: int
    """How often the model answered in it: the calls that carried the buffer."""
    unsent_tokens: int
    """Of its last answer: no request has carried them yet, as long as the exchange is the newest."""
    is_open: bool
    """Calls wait for results. A following user task declares them dead, so only the newest exchange can be open."""
    is_whole: bool
    """It ends with an answer, and nothing waits: the next turn begins a new exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionState:
    """All that the decision depends on."""

    exchanges: Sequence[Exchange]
    """Of the buffer, oldest first."""
    static_tokens: int
    """Tools and segments included."""
    dynamic_tokens: int
    order: LayerOrder
    last_call_at: datetime | None
    """When the provider's cache was used last; None where it never was."""
    cache_lifetime_seconds: float
    typical_gap_seconds: float | None = None
    """Between an answer and the next user task of this conversation; None where it is not known."""
    exchange_count: int = 0
    """Of the whole conversation so far, those that were compacted included."""
    typical_exchange_count: float | None = None
    """How long conversations of this kind get; None where it is not known."""


def split_exchanges(turns: Sequence[BufferTurn]) -> tuple[Exchange, ...]:
    """The exchanges of the turns, in order. Each turn is in exactly one."""
    groups = list(_group(turns))
    last = len(groups) - 1
    return tuple(_read(group, is_newest=place == last) for place, group in enumerate(groups))


def _group(turns: Sequence[BufferTurn]) -> Iterator[Sequence[BufferTurn]]:
    start = 0
    for place, turn in enumerate(turns):
        if turn.kind is TurnKind.USER_TASK and place > start:
            yield turns[start:place]
            start = place
    if turns:
        yield turns[start:]


def _read(turns: Sequence[BufferTurn], *, is_newest: bool) -> Exchange:
    last = turns[-1]
    answered = last.kind is TurnKind.MODEL_RESPONSE
    is_open = is_newest and bool(_waiting(turns))
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


def _waiting(turns: Sequence[BufferTurn]) -> set[str]:
    """The calls of the last answer that have no result. Of an answer that broke off nothing waits."""
    place = max((place for place, turn in enumerate(turns) if turn.kind is TurnKind.MODEL_RESPONSE), default=None)
    if place is None or turns[place].state is not TurnState.COMPLETE:
        return set()
    results = {id_ for turn in turns[place + 1 :] for id_ in turn.result_ids}
    return set(turns[place].call_ids) - results


def count_request(state: CompactionState) -> int:
    """The tokens of a request without a new task."""
    buffered = sum(exchange.sent_tokens for exchange in state.exchanges)
    return state.static_tokens + state.dynamic_tokens + buffered


def read_state(
    source: PayloadSource,
    *,
    static_length: int,
    estimate: TokenEstimate,
    typical_exchange_count: float | None = None,
) -> CompactionState:
    """All that the decision depends on.

    `static_length`: of the static text, in characters. `typical_exchange_count`: how long conversations of the
    assistant get; None where it is not known.
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
        order=order,
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
    """`scope`: behind whose prefix thinking has to be made to be sent; None where it does not matter."""
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        sent = estimate.estimate(model, len(turn.native.data))
        told = sent
        blocks = turn.blocks or ()
        thinking = 0
        if turn.kind is TurnKind.MODEL_RESPONSE:
            told = turn.output_tokens or sent
            if scope is None or scope.is_behind(turn.prefix_hash):
                thinking = _count_thinking(turn, sent - told)
            sent = told + thinking
        else:
            inside = following.dynamic if following is not None and order is LayerOrder.APPEND_ONLY else None
            images = sum(isinstance(block, ImageBlock) for block in blocks)
            sent += estimate.estimate(model, len(inside or b"")) + images * _IMAGE_TOKENS
        yield BufferTurn(
            seq=turn.seq,
            kind=turn.kind,
            state=turn.state,
            call_ids=tuple(block.id for block in blocks if isinstance(block, ToolCallBlock)),
            result_ids=tuple(block.tool_call_id for block in blocks if isinstance(block, ToolResultBlock)),
            sent_tokens=sent,
            segment_tokens=told,
            thinking_tokens=thinking,
        )


def _count_thinking(turn: BufferedTurn, rest: int) -> int:
    """What an answer has beside its words, of which the bytes say `rest`. No more than was thought: most of the bytes
    are a signature, which is no text.
    """
    thought = rest if turn.reasoning_tokens is None else min(rest, turn.reasoning_tokens)
    return max(0, thought)


def _dynamic_tokens(source: PayloadSource, order: LayerOrder, estimate: TokenEstimate) -> int:
    """Of the layer as a message of its own. In the append-only order it is counted with the input that holds it."""
    if order is LayerOrder.APPEND_ONLY:
        return 0
    entries = decode_manifest(source.previous_manifest)
    length = sum(entry.length for entry in entries if entry.layer is Layer.DYNAMIC)
    return estimate.estimate(source.assistant.definition.model, length)


def _cache_lifetime(source: PayloadSource) -> float:
    asked = None if source.previous_call is None else source.previous_call.caching.get("cache_seconds")
    return float(asked) if asked else _CACHE_SECONDS


def _typical_gap(turns: Sequence[BufferedTurn]) -> float | None:
    """How long users think: between an answer and the next task."""
    gaps = [
        (task.created_at - answer.created_at).total_seconds()
        for answer, task in pairwise(turns)
        if answer.kind is TurnKind.MODEL_RESPONSE
        and task.kind is TurnKind.USER_TASK
        and answer.created_at is not None
        and task.created_at is not None
    ]
    return median(gaps) if gaps else None
