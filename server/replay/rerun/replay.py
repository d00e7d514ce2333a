"""Replays: stored conversations, sent to a candidate again. `port` stores and loads these values.

The conversations of a replay are fixed when it is created. Each of them has one *item* per repetition. An item reads
its source conversation and writes a *replay conversation*: a complete conversation with turns, calls, raw bytes and
epochs, in tables of the same shape that no list of live conversations reads. Each answer of the candidate has a
*result*: see `result`.

    waiting ──claimed──> running ──┬─> done        every answer is there
       ^                    │      ├─> failed      `error_code` says why
       └──── released ──────┘      ├─> cancelled   with its replay
                                   └─> skipped     the budget was spent first

A running item whose lease has expired can be claimed like a waiting one, and continues after its last result.
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
"""Conversations of one replay."""
ITEM_LIMIT: Final = 200_000
"""Items of one replay, with all repetitions."""
REPETITION_LIMIT: Final = 100
PARALLELISM_LIMIT: Final = 64


class ReplayMode(StrEnum):
    """Which answers are the history of the candidate's next request."""

    TEACHER_FORCED = "teacher_forced"
    """The recorded ones. Each answer is compared on its own."""
    FREE_RUNNING = "free_running"
    """The candidate's own. Recorded tool results are served by call signature."""


class OnMissingResult(StrEnum):
    """The result of a free-running candidate's tool call that was not recorded."""

    STOP = "stop"
    """None: the item ends."""
    NEAREST = "nearest"
    """The recorded result of the most similar call of the same tool. If there is none, the item ends."""
    SYNTHETIC_ERROR = "synthetic_error"
    """An error result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which conversations are replayed: by id or by filters, all of them or a random sample.

    The same selection of the same conversations gives the same sample in the same order.
    """

    conversation_ids: tuple[str, ...] | None = None
    """In this order; None selects by the filters. Empty in a stored replay, whose items name them."""
    filters: InspectionFilter = field(default_factory=InspectionFilter)
    sample_count: int | None = None
    """None takes all."""
    sample_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The configuration under test. None, or empty `templates`, keeps the recorded value."""

    provider: str | None = None
    model: str | None = None
    assistant_id: str | None = None
    """Replaces the assistant of each conversation."""
    assistant_version: int | None = None
    """None means, with an `assistant_id`, its newest version when the replay is created, else the recorded version."""
    settings: Mapping[str, JsonValue] | None = None
    """Merged into the assistant's settings. A null member removes the setting, so the model's default applies."""
    instructions: Instructions | None = None
    variables: Mapping[str, JsonValue] | None = None
    tools: tuple[Tool, ...] | None = None
    layer_order: LayerOrder | None = None
    compaction: Mapping[str, JsonValue] | None = None
    """As the member `compaction` of an assistant's settings."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Template sources by file name, such as `gemini_static_prompt.j2`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLimits:
    """Limits that hold over all processes together. None means no limit."""

    repetitions: int = 1
    parallelism: int = 4
    """Items that run at the same time."""
    calls_per_minute: int | None = None
    """Calls are spaced evenly: the interval between two calls is at least 60 seconds divided by this."""
    budget_usd: Decimal | None = None
    """A call is sent only if the spending and all estimates of open calls stay within it. Then the replay stops."""
    budget_tokens: int | None = None
    """The same in tokens of all buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """A condition for each answer of the candidate: either an expression or a JSON schema."""

    name: str
    expression: str | None = None
    schema: Mapping[str, JsonValue] | None = None
    tool_name: str | None = None
    """The schema applies to the arguments of this tool's calls; None: to the answer's text, parsed as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A model that rates each answer. Its calls are stored in the replay conversation and count toward the budget."""

    provider: str
    model: str
    prompt: str
    settings: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDraft:
    """The definition of a replay, as a caller submits it."""

    name: str
    selection: Selection
    candidate: Candidate = field(default_factory=Candidate)
    mode: ReplayMode = ReplayMode.TEACHER_FORCED
    on_missing_result: OnMissingResult = OnMissingResult.STOP
    limits: ReplayLimits = field(default_factory=ReplayLimits)
    assertions: tuple[Assertion, ...] = ()
    judge: Judge | None = None


class ReplayState(StrEnum):
    """The state of a replay. The last three are final, but a larger budget continues one that its budget stopped."""

    RUNNING = "running"
    PAUSED = "paused"
    """Open calls are finished; no other is sent."""
    DONE = "done"
    """Every item has ended, in any state."""
    CANCELLED = "cancelled"
    STOPPED_BY_BUDGET = "stopped_by_budget"


class ItemState(StrEnum):
    """The state of an item: see the module."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


ENDED_ITEM_STATES: Final = (ItemState.DONE, ItemState.FAILED, ItemState.CANCELLED, ItemState.SKIPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replay with its progress and spending."""

    id: str
    tenant_id: str
    draft: ReplayDraft
    state: ReplayState
    item_count: int
    """When it was created."""
    item_counts: Mapping[ItemState, int]
    """Current, with every state as a key. The sum is below `item_count` if sources were erased since."""
    spent_usd: Decimal
    """Of calls that have ended, and the estimates of lost calls."""
    spent_tokens: int
    reserved_usd: Decimal
    """The estimates of open calls."""
    reserved_tokens: int
    unpriced_count: int
    """Calls without a known price, which the spending does not include."""
    created_at: datetime
    created_by: str | None
    """The id of an API key; None for the command line."""
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
    """1, 2, 3, in the order of the selection, repetition after repetition."""
    conversation_id: str
    """The source conversation."""
    repetition: int
    """1, 2, 3."""
    state: ItemState
    replay_conversation_id: str | None
    """None until the item has started."""
    error_code: str | None
    diverged_at_seq: int | None
    """The first recorded answer that the candidate's differs from; None if there is none yet."""
    spent_usd: Decimal
    spent_tokens: int
    lost_count: int
    """Calls whose process died before the answer was stored. Each counts by its estimate."""
    owner: str | None
    """The process that runs it."""
    lease_expires_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLease:
    """The right to run an item, until another process claims it with a new token."""

    replay_id: str
    number: int
    token: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedItem:
    """A claimed item, with everything that is needed to run it."""

    lease: ItemLease
    item: ReplayItem
    tenant_id: str
    draft: ReplayDraft
    """Of its replay, with the current limits."""
    replay_created_at: datetime
    """When the replay was created. Later turns of the source are ignored."""
    result_count: int
    """The number of results: positions 1 to this one are done."""
    was_lost: bool
    """The last owner died during a call, which has to be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEstimate:
    """The estimated maximum of a call."""

    usd: Decimal | None
    """None if the price is not known."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpending:
    """The cost of ended calls."""

    usd: Decimal | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The call may be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The call may not be sent yet: retry after this time."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """No further call of the replay may be sent, unless it is continued."""

    state: ReplayState


CallPermission = Granted | Wait | Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWork:
    """A running replay with items that can be claimed."""

    replay_id: str
    slot_count: int
    """How many more items may run at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayEstimate:
    """The estimated size and cost of a replay, from the recorded usage of its sources."""

    conversation_count: int
    item_count: int
    call_count: int
    """Including the judge's calls. Compactions are not estimated."""
    input_tokens: int
    output_tokens: int
    cost_usd: Decimal | None
    """By the candidate's prices, with the recorded cache reads; None if no price is known."""
    uncached_cost_usd: Decimal | None
    """The same without cache reads."""
    unpriced_count: int
    """Calls without a known price, which the costs do not include."""
    unmeasured_count: int
    """Calls without recorded usage."""
    is_rough: bool
    """The replay is free-running: the candidate may take more or fewer turns than were recorded."""
