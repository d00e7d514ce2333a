"""The estimate of a replay: recorded usage by the candidate's prices."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Final

from server.conversation.usage import Usage, add_usages
from server.providers.pricing import PRICES, Price, find_price
from server.replay.rerun.replay import Judge, ReplayDraft, ReplayEstimate, ReplayMode

_MILLION: Final = Decimal(1_000_000)
_CHARACTERS_PER_TOKEN: Final = 4
_RATING_TOKENS: Final = 100
"""The approximate length of a judge's answer."""

TIERS: Final = tuple(sorted({price.from_prompt_tokens for price in PRICES if price.from_prompt_tokens}))
"""The prompt sizes at which the price of some model changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedUsage:
    """The usage of all answers of one model whose prompts are in the same price tier."""

    model: str
    tier: int
    """How many of `TIERS` their prompts reach."""
    call_count: int
    unmeasured_count: int
    """Calls without recorded usage."""
    usage: Usage


def estimate_replay(
    draft: ReplayDraft, conversation_count: int, recorded: Iterable[RecordedUsage], at: datetime
) -> ReplayEstimate:
    """Estimate that each recorded answer is requested once per repetition with its recorded usage."""
    groups = [*recorded]
    if draft.candidate.model is not None:
        groups = [_with_model(group, draft.candidate.model) for group in groups]
    judged = [] if draft.judge is None else [_judge_usage(draft.judge, group) for group in groups]
    groups += judged
    repetitions = draft.limits.repetitions
    total = add_usages([group.usage for group in groups])
    priced = [(group, price) for group in groups if (price := _price_of(group, at)) is not None]
    return ReplayEstimate(
        conversation_count=conversation_count,
        item_count=conversation_count * repetitions,
        call_count=repetitions * sum(group.call_count for group in groups),
        input_tokens=repetitions * total.input_tokens,
        output_tokens=repetitions * (total.output_tokens + total.reasoning_tokens),
        cost_usd=_sum(repetitions, [_cost(price, group.usage) for group, price in priced]),
        uncached_cost_usd=_sum(repetitions, [_cost(price, _uncached(group.usage)) for group, price in priced]),
        unpriced_count=repetitions * (_count(groups) - _count([group for group, _ in priced])),
        unmeasured_count=repetitions * sum(group.unmeasured_count for group in groups),
        is_rough=draft.mode is ReplayMode.FREE_RUNNING,
    )


def _with_model(group: RecordedUsage, model: str) -> RecordedUsage:
    return RecordedUsage(
        model=model,
        tier=group.tier,
        call_count=group.call_count,
        unmeasured_count=group.unmeasured_count,
        usage=group.usage,
    )


def _judge_usage(judge: Judge, group: RecordedUsage) -> RecordedUsage:
    """Estimate that the judge reads its prompt and two answers of the recorded length."""
    prompt_tokens = len(judge.prompt) // _CHARACTERS_PER_TOKEN
    return RecordedUsage(
        model=judge.model,
        tier=0,
        call_count=group.call_count,
        unmeasured_count=0,
        usage=Usage(
            fresh_input_tokens=group.call_count * prompt_tokens + 2 * group.usage.output_tokens,
            output_tokens=group.call_count * _RATING_TOKENS,
        ),
    )


def _price_of(group: RecordedUsage, at: datetime) -> Price | None:
    return find_price(group.model, at, TIERS[group.tier - 1] if group.tier else 0)


def _cost(price: Price, usage: Usage) -> Decimal:
    """Return the cost. An unknown price of cache reads is replaced by that of fresh input, which is not lower."""
    read = price.fresh_input if price.cache_read is None else price.cache_read
    parts = (
        price.fresh_input * usage.fresh_input_tokens,
        read * usage.cache_read_tokens,
        price.cache_write * usage.cache_write_tokens,
        price.output * (usage.output_tokens + usage.reasoning_tokens),
    )
    return sum(parts, Decimal(0)) / _MILLION


def _uncached(usage: Usage) -> Usage:
    return Usage(
        fresh_input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _count(groups: list[RecordedUsage]) -> int:
    return sum(group.call_count for group in groups)


def _sum(repetitions: int, costs: list[Decimal]) -> Decimal | None:
    return repetitions * sum(costs, Decimal(0)) if costs else None
