"""What the compactor knows and what it decides: state, plan, decision. The rules are in `server.compaction.plan`."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final

from server.compaction.carrying_cost import Cut, CutCosts, find_rates
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
    """It pays, and has been waited for long enough."""
    COLD_CACHE = "cold_cache"
    """The next call writes everything anyway, so that compacting costs nothing."""
    WINDOW = "window"
    REQUESTED = "requested"


class SkipReason(StrEnum):
    """Why nothing is moved."""

    SWITCHED_OFF = "switched_off"
    NOTHING_TO_MOVE = "nothing_to_move"
    """All exchanges of the buffer are among those that stay."""
    BLOCKED_BY_OPEN_CALL = "blocked_by_open_call"
    EXCHANGE_UNFINISHED = "exchange_unfinished"
    """An answer is still to come."""
    BELOW_THRESHOLD = "below_threshold"
    SAVES_NOTHING = "saves_nothing"
    """Later calls would not be cheaper."""
    NOT_YET_WORTH_IT = "not_yet_worth_it"
    WAITS_FOR_COLD_CACHE = "waits_for_cold_cache"
    """Calls are so far apart that the cache is usually cold, and then it costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """Which turns to move, why, and what is expected of it."""

    first_seq: int
    last_seq: int
    exchange_count: int
    moved_tokens: int
    """As they were sent."""
    segment_tokens: int
    reason: CompactionReason
    price_tokens: float
    """What the next exchange costs more, and the fixed cost; negative where it costs less."""
    saved_tokens_per_call: float
    """In tokens at the price of uncached input."""
    saved_usd_per_call: Decimal | None
    """None where the price is not known."""
    thinking_kept: bool
    """False on a prefix-bound model: the turns that stay are sent without their thinking from now on."""
    rates_assumed: bool
    """The price of the model is not known; the usual ratios of its family were used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionDecision:
    """A plan, or why there is none."""

    plan: CompactionPlan | None = None
    skip_reason: SkipReason | None = None
    """None where there is a plan."""
    window_short: bool = False
    """The request is near the model's window. Without a plan this is for an operator to see."""
    needs_summary: bool = False
    """Moving exchanges is not enough for the window: segments have to be summarised."""
    recheck_at: datetime | None = None
    """Where nothing is moved now, but would be when the cache has gone cold."""


_MILLION: Final = 1_000_000


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


def policy_of(source: PayloadSource) -> CompactionPolicy:
    """What the assistant's settings say about compaction."""
    return read_policy(source.assistant.definition.settings.get("compaction") or {})


def plan_compaction(
    state: CompactionState, profile: ModelProfile, price: Price | None, policy: CompactionPolicy, now: datetime
) -> CompactionDecision:
    """What to move now. Takes time in proportion to the exchanges of the buffer.

    A plan that was carried out leaves nothing to plan until the conversation goes on.
    """
    if policy.kind is PolicyKind.OFF:
        return CompactionDecision(skip_reason=SkipReason.SWITCHED_OFF)
    planning = _Planning(state, profile, price, policy, now)
    if planning.is_window_short:
        return planning.plan_for_window()
    if (hold := planning.find_obstacle()) is not None:
        return CompactionDecision(skip_reason=hold)
    cut = planning.cut(policy.keep_exchanges)
    if not cut.moved:
        return CompactionDecision(skip_reason=SkipReason.NOTHING_TO_MOVE)
    return planning.plan_by_threshold(cut) if policy.kind is PolicyKind.THRESHOLD else planning.plan_by_cost(cut)


def plan_requested_compaction(
    state: CompactionState, profile: ModelProfile, price: Price | None, policy: CompactionPolicy, now: datetime
) -> CompactionDecision:
    """What is moved when somebody asks for it, whatever it costs: all that need not stay."""
    planning = _Planning(state, profile, price, policy, now)
    if (hold := planning.find_obstacle()) is not None:
        return CompactionDecision(skip_reason=hold)
    cut = planning.cut(policy.keep_exchanges)
    if not cut.moved:
        return CompactionDecision(skip_reason=SkipReason.NOTHING_TO_MOVE)
    return CompactionDecision(plan=planning.build(cut, CompactionReason.REQUESTED))


class _Planning:
    """One decision under way."""

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
        self._scale = CutCosts(state, self._rates, policy, now)
        self._buffer_tokens = sum(exchange.sent_tokens for exchange in state.exchanges)
        self._room = policy.window_share * profile.window_tokens
        self.is_window_short = state.static_tokens + state.dynamic_tokens + self._buffer_tokens > self._room

    def cut(self, keep: int) -> Cut:
        """All but the newest `keep` exchanges, not counting one that is under way."""
        exchanges = self._state.exchanges
        under_way = bool(exchanges) and not exchanges[-1].is_whole
        return self._cut_at(max(0, len(exchanges) - keep - under_way))

    def find_obstacle(self) -> SkipReason | None:
        """What forbids any cut, as long as there is room."""
        exchanges = self._state.exchanges
        if not exchanges:
            return SkipReason.NOTHING_TO_MOVE
        if exchanges[-1].is_open:
            return SkipReason.BLOCKED_BY_OPEN_CALL
        return None if exchanges[-1].is_whole else SkipReason.EXCHANGE_UNFINISHED

    def plan_for_window(self) -> CompactionDecision:
        """As little as makes room. A prefix-bound model needs the thinking of an exchange that is under way."""
        obstacle = self.find_obstacle()
        cut = self.cut(self._policy.keep_exchanges)
        if not self._makes_room(cut):
            cut = self.cut(1)
        needs_summary = not self._makes_room(cut)
        if not cut.moved or (obstacle is not None and self._profile.prefix_bound):
            hold = obstacle or SkipReason.NOTHING_TO_MOVE
            return CompactionDecision(skip_reason=hold, window_short=True, needs_summary=needs_summary)
        plan = self.build(cut, CompactionReason.WINDOW)
        return CompactionDecision(plan=plan, window_short=True, needs_summary=needs_summary)

    def plan_by_threshold(self, cut: Cut) -> CompactionDecision:
        """Beyond the limit of turns, all that can go; beyond that of tokens, until the buffer is down to the target."""
        policy = self._policy
        exchanges = self._state.exchanges
        turn_count = exchanges[-1].last_seq - exchanges[0].first_seq + 1
        if policy.max_turns is not None and turn_count > policy.max_turns:
            return CompactionDecision(plan=self.build(cut, CompactionReason.THRESHOLD_TURNS))
        if policy.max_tokens is None or self._buffer_tokens <= policy.max_tokens:
            return CompactionDecision(skip_reason=SkipReason.BELOW_THRESHOLD)
        target = min(policy.target_tokens, policy.max_tokens)
        left, place = self._buffer_tokens, 0
        while place < len(cut.moved) and left > target:
            left -= exchanges[place].sent_tokens
            place += 1
        return CompactionDecision(plan=self.build(self._cut_at(place), CompactionReason.THRESHOLD_TOKENS))

    def plan_by_cost(self, cut: Cut) -> CompactionDecision:
        """Now, or perhaps when the cache is cold."""
        scale = self._scale
        cost = scale.estimate(cut)
        if cost.saving <= 0:
            return CompactionDecision(skip_reason=SkipReason.SAVES_NOTHING)
        if cost.price <= 0:
            reason = CompactionReason.COLD_CACHE if scale.is_cold else CompactionReason.CARRYING_COST
            return CompactionDecision(plan=self.build(cut, reason))
        free_at = None if scale.estimate(cut, is_cold=True).price > 0 else scale.cold_at
        if free_at is not None and scale.is_usually_cold:
            return CompactionDecision(skip_reason=SkipReason.WAITS_FOR_COLD_CACHE, recheck_at=free_at)
        if scale.is_due(cut, cost):
            return CompactionDecision(plan=self.build(cut, CompactionReason.CARRYING_COST))
        return CompactionDecision(skip_reason=SkipReason.NOT_YET_WORTH_IT, recheck_at=free_at)

    def build(self, cut: Cut, reason: CompactionReason) -> CompactionPlan:
        cost = self._scale.estimate(cut)
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

    def _cut_at(self, place: int) -> Cut:
        exchanges = self._state.exchanges
        return Cut(moved=exchanges[:place], kept=exchanges[place:], loses_thinking=self._profile.prefix_bound)

    def _makes_room(self, cut: Cut) -> bool:
        static = self._state.static_tokens + cut.segment_tokens
        return static + self._state.dynamic_tokens + cut.kept_tokens <= self._room
