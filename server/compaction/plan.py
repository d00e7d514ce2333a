"""When to compact a conversation, and how much: a pure decision.

Compacting moves the oldest exchanges of the buffer into a segment at the end of the static layer. The text of a segment
is sent with every later call like the turns it replaces, but without their thinking, signatures and times. So a
compaction makes later calls cheaper. The next call becomes more expensive, because the
provider has to write a new cache. The planner decides whether that pays off.

A cut is always between two exchanges. The newest exchange stays in the buffer, and so do the newest `keep_exchanges`
complete ones, because they carry signatures. While an exchange is incomplete nothing is moved, except when the request
approaches the model's context window and the model allows it.

There are two policies. `threshold` moves exchanges when the buffer exceeds a number of turns or tokens. `cost` moves
them when it saves money, see `server.compaction.carrying_cost`. When the request exceeds `window_share` of the model's
window, both policies make room, whether it pays off or not; if moving exchanges is not enough, the decision asks for a
summary.

The decision is a function of the stored conversation, the model's profile and price, the policy and the time. It is
made after every turn, without a round trip, and again when the provider's cache has expired (`recheck_at`). After a
plan has been carried out there is nothing to plan until the conversation continues.
"""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final

from server.compaction.carrying_cost import Cut, CutEstimator, find_rates
from server.compaction.state import CompactionState, count_request
from server.conversation.compaction_policy import CompactionPolicy, PolicyKind, read_policy
from server.conversation.store import PayloadSource
from server.providers.model_profile import ModelProfile, find_profile
from server.providers.pricing import Price, find_price


class CompactionReason(StrEnum):
    """Why exchanges are moved."""

    THRESHOLD_TURNS = "threshold_turns"
    THRESHOLD_TOKENS = "threshold_tokens"
    CARRYING_COST = "carrying_cost"
    """It saves money, and keeping the exchanges in the buffer has cost enough."""
    COLD_CACHE = "cold_cache"
    """The cache has expired, so the next call writes everything in any case and compacting costs nothing."""
    WINDOW = "window"
    REQUESTED = "requested"


class SkipReason(StrEnum):
    """Why no exchanges are moved."""

    SWITCHED_OFF = "switched_off"
    NOTHING_TO_MOVE = "nothing_to_move"
    """All exchanges of the buffer have to stay."""
    BLOCKED_BY_OPEN_CALL = "blocked_by_open_call"
    EXCHANGE_UNFINISHED = "exchange_unfinished"
    """The newest exchange has no answer yet."""
    BELOW_THRESHOLD = "below_threshold"
    SAVES_NOTHING = "saves_nothing"
    """Later calls would not be cheaper."""
    NOT_YET_WORTH_IT = "not_yet_worth_it"
    WAITS_FOR_COLD_CACHE = "waits_for_cold_cache"
    """The cache usually expires between calls, and compacting costs nothing then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """Which turns to move, why, and the expected effect."""

    first_seq: int
    last_seq: int
    exchange_count: int
    moved_tokens: int
    """As they were sent."""
    segment_tokens: int
    reason: CompactionReason
    price_tokens: float
    """The additional cost of the next exchange, plus the fixed cost. Negative if the next exchange becomes cheaper."""
    saved_tokens_per_call: float
    """In tokens at the price of uncached input."""
    saved_usd_per_call: Decimal | None
    """None if the price is unknown."""
    thinking_kept: bool
    """False on a prefix-bound model: the turns that stay are sent without their thinking from then on."""
    rates_assumed: bool
    """The model has no known price, and the usual ratios of its family were used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionDecision:
    """A plan, or the reason why there is none."""

    plan: CompactionPlan | None = None
    skip_reason: SkipReason | None = None
    """None if there is a plan."""
    window_short: bool = False
    """The request approaches the model's window. Without a plan, this needs an operator's attention."""
    needs_summary: bool = False
    """Moving exchanges does not make enough room: the oldest segments have to be summarised."""
    recheck_at: datetime | None = None
    """When the cache expires, if a compaction would be worth it then but not now."""


_MILLION: Final = 1_000_000


def decide_compaction(
    source: PayloadSource, state: CompactionState, *, now: datetime, requested: bool = False
) -> CompactionDecision:
    """Decide about a conversation with the settings, profile and price of its assistant.

    `requested` moves all exchanges that need not stay, at any cost. Raises `ValidationFailed` if the assistant's
    settings are invalid.
    """
    definition = source.assistant.definition
    price = find_price(definition.model, now, count_request(state))
    plan = plan_requested_compaction if requested else plan_compaction
    return plan(state, find_profile(definition.provider, definition.model), price, policy_of(source), now)


def policy_of(source: PayloadSource) -> CompactionPolicy:
    """Read the compaction policy from the assistant's settings. Raises `ValidationFailed`."""
    return read_policy(source.assistant.definition.settings.get("compaction") or {})


def plan_compaction(
    state: CompactionState, profile: ModelProfile, price: Price | None, policy: CompactionPolicy, now: datetime
) -> CompactionDecision:
    """Decide what to move now. Takes time in proportion to the number of exchanges in the buffer."""
    if policy.kind is PolicyKind.OFF:
        return CompactionDecision(skip_reason=SkipReason.SWITCHED_OFF)
    planner = _Planner(state, profile, price, policy, now)
    if planner.is_window_short:
        return planner.plan_for_window()
    if (hold := planner.find_obstacle()) is not None:
        return CompactionDecision(skip_reason=hold)
    cut = planner.cut(policy.keep_exchanges)
    if not cut.moved:
        return CompactionDecision(skip_reason=SkipReason.NOTHING_TO_MOVE)
    return planner.plan_by_threshold(cut) if policy.kind is PolicyKind.THRESHOLD else planner.plan_by_cost(cut)


def plan_requested_compaction(
    state: CompactionState, profile: ModelProfile, price: Price | None, policy: CompactionPolicy, now: datetime
) -> CompactionDecision:
    """Plan a compaction that an operator or client requested: move all exchanges that need not stay, at any cost."""
    planner = _Planner(state, profile, price, policy, now)
    if (hold := planner.find_obstacle()) is not None:
        return CompactionDecision(skip_reason=hold)
    cut = planner.cut(policy.keep_exchanges)
    if not cut.moved:
        return CompactionDecision(skip_reason=SkipReason.NOTHING_TO_MOVE)
    return CompactionDecision(plan=planner.build(cut, CompactionReason.REQUESTED))


class _Planner:
    """One decision."""

    def __init__(
        self,
        state: CompactionState,
        profile: ModelProfile,
        price: Price | None,
        policy: CompactionPolicy,
        now: datetime,
    ) -> None:
        self._state = state
        self._profile = profile
        self._price = price
        self._policy = policy
        self._rates = find_rates(price, profile, state.cache_lifetime_seconds)
        self._estimator = CutEstimator(state, self._rates, policy, now)
        self._buffer_tokens = sum(exchange.sent_tokens for exchange in state.exchanges)
        self._max_request_tokens = policy.window_share * profile.window_tokens
        self.is_window_short = (
            state.static_tokens + state.dynamic_tokens + self._buffer_tokens > self._max_request_tokens
        )

    def cut(self, keep: int) -> Cut:
        """Cut before the newest `keep` exchanges, not counting an incomplete one."""
        exchanges = self._state.exchanges
        under_way = bool(exchanges) and not exchanges[-1].is_whole
        return self._cut_at(max(0, len(exchanges) - keep - under_way))

    def find_obstacle(self) -> SkipReason | None:
        """Return what forbids any cut while there is room in the window."""
        exchanges = self._state.exchanges
        if not exchanges:
            return SkipReason.NOTHING_TO_MOVE
        if exchanges[-1].is_open:
            return SkipReason.BLOCKED_BY_OPEN_CALL
        return None if exchanges[-1].is_whole else SkipReason.EXCHANGE_UNFINISHED

    def plan_for_window(self) -> CompactionDecision:
        """Move as little as makes room. A prefix-bound model needs the thinking of an incomplete exchange, so nothing
        is moved then.
        """
        obstacle = self.find_obstacle()
        cut = self.cut(self._policy.keep_exchanges)
        if not self._fits_window(cut):
            cut = self.cut(1)
        needs_summary = not self._fits_window(cut)
        if not cut.moved or (obstacle is not None and self._profile.prefix_bound):
            hold = obstacle or SkipReason.NOTHING_TO_MOVE
            return CompactionDecision(skip_reason=hold, window_short=True, needs_summary=needs_summary)
        plan = self.build(cut, CompactionReason.WINDOW)
        return CompactionDecision(plan=plan, window_short=True, needs_summary=needs_summary)

    def plan_by_threshold(self, cut: Cut) -> CompactionDecision:
        """Above the limit of turns, move all that can be moved. Above the limit of tokens, move until the buffer is at
        the target.
        """
        policy = self._policy
        exchanges = self._state.exchanges
        turn_count = exchanges[-1].last_seq - exchanges[0].first_seq + 1
        if policy.max_turns is not None and turn_count > policy.max_turns:
            return CompactionDecision(plan=self.build(cut, CompactionReason.THRESHOLD_TURNS))
        if policy.max_tokens is None or self._buffer_tokens <= policy.max_tokens:
            return CompactionDecision(skip_reason=SkipReason.BELOW_THRESHOLD)
        target = min(policy.target_tokens, policy.max_tokens)
        left, count = self._buffer_tokens, 0
        while count < len(cut.moved) and left > target:
            left -= exchanges[count].sent_tokens
            count += 1
        return CompactionDecision(plan=self.build(self._cut_at(count), CompactionReason.THRESHOLD_TOKENS))

    def plan_by_cost(self, cut: Cut) -> CompactionDecision:
        """Decide by cost, now or when the cache has expired."""
        estimator = self._estimator
        cost = estimator.estimate(cut)
        if cost.saving <= 0:
            return CompactionDecision(skip_reason=SkipReason.SAVES_NOTHING)
        if estimator.delays_caching(cut):
            return CompactionDecision(skip_reason=SkipReason.NOT_YET_WORTH_IT)
        if cost.price <= 0:
            reason = CompactionReason.COLD_CACHE if estimator.is_cold else CompactionReason.CARRYING_COST
            return CompactionDecision(plan=self.build(cut, reason))
        free_at = None if estimator.estimate(cut, is_cold=True).price > 0 else estimator.cold_at
        if free_at is not None and estimator.is_usually_cold:
            return CompactionDecision(skip_reason=SkipReason.WAITS_FOR_COLD_CACHE, recheck_at=free_at)
        if estimator.is_due(cut, cost):
            return CompactionDecision(plan=self.build(cut, CompactionReason.CARRYING_COST))
        return CompactionDecision(skip_reason=SkipReason.NOT_YET_WORTH_IT, recheck_at=free_at)

    def build(self, cut: Cut, reason: CompactionReason) -> CompactionPlan:
        cost = self._estimator.estimate(cut)
        price = self._price
        return CompactionPlan(
            first_seq=cut.moved[0].first_seq,
            last_seq=cut.moved[-1].last_seq,
            exchange_count=len(cut.moved),
            moved_tokens=cut.moved_tokens,
            segment_tokens=cut.segment_tokens,
            reason=reason,
            price_tokens=cost.price,
            saved_tokens_per_call=cost.saving,
            saved_usd_per_call=None if price is None else price.fresh_input * Decimal(cost.saving) / _MILLION,
            thinking_kept=not self._profile.prefix_bound,
            rates_assumed=self._rates.assumed,
        )

    def _cut_at(self, count: int) -> Cut:
        exchanges = self._state.exchanges
        return Cut(moved=exchanges[:count], kept=exchanges[count:], loses_thinking=self._profile.prefix_bound)

    def _fits_window(self, cut: Cut) -> bool:
        static = self._state.static_tokens + cut.segment_tokens
        return static + self._state.dynamic_tokens + cut.kept_tokens <= self._max_request_tokens
