"""Replays: stored conversations once more, through a candidate. The words; `server.replay.rerun.port` is the port.

A replay fixes its conversations when it is made. Each of them gives one *item* per repetition: the source is read, a
*replay conversation* is written. A replay conversation is a whole conversation with turns, calls, raw bytes and
epochs, in tables of the same shape that no list of live conversations reads. For each answer of the candidate there is
a *result*, see
`server.replay.rerun.result`.

    waiting ──claimed──> running ──┬─> done        every answer is there
       ^                    │      ├─> failed      `error_code` says why
       └──── released ──────┘      ├─> cancelled   with its replay
                                   └─> skipped     the budget was spent before it was done

A running item whose lease is over can be claimed like a waiting one, and goes on behind its last result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final
from uuid import UUID

from server.conversation.assistant import Instructions, Tool
from server.conversation.block import JsonValue
from server.conversation.payload import LayerOrder
from server.inspection.conversation_list import InspectionFilter

CONVERSATION_LIMIT: Final = 100_000
"""More conversations than this are never in one replay."""
ITEM_LIMIT: Final = 200_000
"""Nor more items, all repetitions together."""
REPETITION_LIMIT: Final = 100
PARALLELISM_LIMIT: Final = 64


class ReplayMode(StrEnum):
    """Whose answers the candidate sees as its past."""

    TEACHER_FORCED = "teacher_forced"
    """The recorded ones: each answer is compared on its own."""
    FREE_RUNNING = "free_running"
    """Its own, with recorded tool results served by call signature."""


class OnMissingResult(StrEnum):
    """What a free-running candidate gets for a tool call that nobody has made before."""

    STOP = "stop"
    """Nothing: the item ends there, diverged."""
    NEAREST = "nearest"
    """The recorded result of the nearest call of the same name; where there is none, the item ends."""
    SYNTHETIC_ERROR = "synthetic_error"
    """An error result that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which conversations. By their ids, or all that the filters let through; of these, all or a random sample.

    The same selection of the same conversations gives the same sample in the same order.
    """

    conversation_ids: tuple[str, ...] | None = None
    """These, in this order; None: what the filters let through. A stored replay has none here: its items name them."""
    filters: InspectionFilter = field(default_factory=InspectionFilter)
    sample_count: int | None = None
    """None: all of them."""
    sample_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is tried. What is None, or empty for `templates`, is as it was recorded."""

    provider: str | None = None
    model: str | None = None
    assistant_id: str | None = None
    """Another assistant of the tenant's in place of each conversation's own."""
    assistant_version: int | None = None
    """None: with an `assistant_id` its newest when the replay is made, else the one that each turn was answered by."""
    settings: Mapping[str, JsonValue] | None = None
    """Members that are laid over the assistant's; a member that is null leaves its choice to the model."""
    instructions: Instructions | None = None
    variables: Mapping[str, JsonValue] | None = None
    tools: tuple[Tool, ...] | None = None
    layer_order: LayerOrder | None = None
    compaction: Mapping[str, JsonValue] | None = None
    """As the member `compaction` of an assistant's settings, see `server.conversation.compaction_policy`."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Sources of layers' templates by the name of their file, such as `gemini_static_prompt.j2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLimits:
    """How much of everything, over all processes together. What is None has no limit."""

    repetitions: int = 1
    parallelism: int = 4
    """So many items run at the same time."""
    calls_per_minute: int | None = None
    """Evenly: no two calls leave closer together than the minute's share."""
    budget_usd: Decimal | None = None
    """What is spent and what may be on its way never come to more; then the replay stops."""
    budget_tokens: int | None = None
    """The same in tokens of all buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """What has to hold for each answer of the candidate: an expression or a JSON schema, exactly one of them."""

    name: str
    expression: str | None = None
    schema: Mapping[str, JsonValue] | None = None
    tool_name: str | None = None
    """With a schema: it is for the arguments of the calls of this tool. None: for the answer's text as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A model that says how good an answer is. Its calls are kept in the replay conversation, and its cost counts."""

    provider: str
    model: str
    prompt: str
    settings: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDraft:
    """A replay as it is asked for."""

    name: str
    selection: Selection
    candidate: Candidate = field(default_factory=Candidate)
    mode: ReplayMode = ReplayMode.TEACHER_FORCED
    on_missing_result: OnMissingResult = OnMissingResult.STOP
    limits: ReplayLimits = field(default_factory=ReplayLimits)
    assertions: tuple[Assertion, ...] = ()
    judge: Judge | None = None


class ReplayState(StrEnum):
    """What a replay does. The last three are ends; one that the budget stopped goes on with a larger budget."""

    RUNNING = "running"
    PAUSED = "paused"
    """Calls that are on their way are finished; no other leaves."""
    DONE = "done"
    """Every item has ended, however."""
    CANCELLED = "cancelled"
    STOPPED_BY_BUDGET = "stopped_by_budget"


class ItemState(StrEnum):
    """What became of an item. See the module."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


ENDED_ITEM_STATES: Final = (ItemState.DONE, ItemState.FAILED, ItemState.CANCELLED, ItemState.SKIPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replay as it stands."""

    id: str
    tenant_id: str
    draft: ReplayDraft
    state: ReplayState
    item_count: int
    """When it was made."""
    item_counts: Mapping[ItemState, int]
    """Now. Every state is there. Together less than `item_count` where sources were erased since."""
    spent_usd: Decimal
    """Of calls that have ended, and the estimates of those that were lost."""
    spent_tokens: int
    reserved_usd: Decimal
    """The estimates of calls that are on their way."""
    reserved_tokens: int
    unpriced_count: int
    """Calls whose price is not known: the spending is at least what is said above."""
    created_at: datetime
    created_by: str | None
    """The id of the key; None: somebody at the command line."""
    ended_at: datetime | None

    @property
    def ended_count(self) -> int:
        """The number of items that have ended. Skipped ones do not count: a larger budget continues them."""
        return sum(self.item_counts[state] for state in ENDED_ITEM_STATES if state is not ItemState.SKIPPED)

    @property
    def is_active(self) -> bool:
        """Whether it changes without an operator: it runs, or items of it still do."""
        return self.state is ReplayState.RUNNING or self.item_counts[ItemState.RUNNING] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayItem:
    """One source conversation in one repetition."""

    replay_id: str
    number: int
    """1, 2, 3 in the order of the selection, repetition by repetition."""
    conversation_id: str
    """The source."""
    repetition: int
    """1, 2, 3."""
    state: ItemState
    replay_conversation_id: str | None
    """A conversation among the replay conversations; None before there is one."""
    error_code: str | None
    diverged_at_seq: int | None
    """The first recorded answer that the candidate's differs from; None where none does, so far."""
    spent_usd: Decimal
    spent_tokens: int
    lost_count: int
    """Calls whose answers nobody could read, since the process that made them died; each counts by its estimate."""
    owner: str | None
    """The process that runs it."""
    lease_expires_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLease:
    """The right to run an item. Whoever knows the token holds it, until somebody takes it over."""

    replay_id: str
    number: int
    token: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedItem:
    """An item to be run, with all that has to be known about it."""

    lease: ItemLease
    item: ReplayItem
    tenant_id: str
    draft: ReplayDraft
    """Of its replay, with the limits of now."""
    made_at: datetime
    """When the replay was made. What was said later is not its business."""
    result_count: int
    """How many answers are there: places 1 to this one."""
    was_lost: bool
    """Its last owner died over a call. What that call was for has to be asked once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEstimate:
    """What a call may come to."""

    usd: Decimal | None
    """None where the price is not known."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpending:
    """What calls have come to."""

    usd: Decimal | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The call may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Not yet: ask again after so long."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """No call may leave for this replay any more, or not before somebody continues it."""

    state: ReplayState


CallPermission = Granted | Wait | Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWork:
    """A running replay that has items which nobody runs."""

    replay_id: str
    slot_count: int
    """How many more could run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEstimate:
    """What a replay would come to, from what its sources have recorded."""

    conversation_count: int
    item_count: int
    call_count: int
    """Judges' calls included; compactions' are not foreseen."""
    input_tokens: int
    output_tokens: int
    cost_usd: Decimal | None
    """By the candidate's prices, as if its cache did what the recorded one did; None where none is known."""
    uncached_cost_usd: Decimal | None
    """The same as if nothing came from a cache."""
    unpriced_count: int
    """Calls that the costs leave out, since their model has no price."""
    unmeasured_count: int
    """Calls of which no usage was recorded."""
    is_rough: bool
    """A free-running candidate takes as many turns as it likes: these are the recorded ones."""
