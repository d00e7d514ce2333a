"""From a conversation as the store has it to what the planner decides on. The same for a turn that has just ended, for
a job, and for somebody who asks: so they never disagree about the same conversation.

Tokens are estimates: what goes to the provider by its bytes, what an answer will be in the transcript by what the
provider counted as its output, and its thinking by what it counted as such. They only have to be good enough to say
when.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Final

from server.compaction.exchange import BufferTurn, split_exchanges
from server.compaction.planner import CompactionDecision, CompactionState, plan_compaction, plan_requested_compaction
from server.conversation.block import ImageBlock, ToolCallBlock, ToolResultBlock
from server.conversation.compaction_policy import CompactionPolicy, read_policy
from server.conversation.manifest import decode_manifest, encode_tools
from server.conversation.payload import Layer, LayerOrder
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import TurnKind
from server.payload.settings import read_order
from server.payload.withholding import SignatureScope, build_signature_scope
from server.providers.model_profile import find_profile
from server.providers.pricing import find_price
from server.providers.token_estimate import TokenEstimate

_IMAGE_TOKENS: Final = 1_000
"""About, for an image of middle size on either provider."""
_CACHE_SECONDS: Final = 300.0
"""Of Claude's short lifetime. Gemini promises nothing; minutes, as far as anybody has seen."""


def decide_compaction(
    source: PayloadSource, state: CompactionState, *, now: datetime, requested: bool = False
) -> CompactionDecision:
    """What the planner says about the conversation.

    Raises `ValidationFailed` where the assistant's settings cannot be read.
    """
    definition = source.assistant.definition
    price = find_price(definition.model, now, count_request(state))
    plan = plan_requested_compaction if requested else plan_compaction
    return plan(state, find_profile(definition.provider, definition.model), price, policy_of(source), now)


def count_request(state: CompactionState) -> int:
    """The tokens of a request without a new task."""
    buffered = sum(exchange.sent_tokens for exchange in state.exchanges)
    return state.static_tokens + state.dynamic_tokens + buffered


def policy_of(source: PayloadSource) -> CompactionPolicy:
    """What the assistant's settings say about compaction."""
    return read_policy(source.assistant.definition.settings.get("compaction") or {})


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
