"""Request bodies of replays."""

from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, ValidationError

from server.conversation.assistant import Instructions, Tool
from server.conversation.payload import LayerOrder
from server.conversation.turn import StopReason
from server.inspection.conversation_list import InspectedState, InspectionFilter
from server.replay.rerun.replay import (
    CONVERSATION_LIMIT,
    PARALLELISM_LIMIT,
    REPETITION_LIMIT,
    Assertion,
    Candidate,
    Judge,
    OnMissingResult,
    ReplayDraft,
    ReplayLimits,
    ReplayMode,
    Selection,
)
from server.web.api.assistants import InstructionsBody, ToolBody
from server.web.api.views import CONVERSATION_ID
from server.web.body import MAX_BIGINT, MAX_INTEGER, Body, JsonObject, Moment, TextLimit, one_of
from server.web.validation import in_utc

_Filter = Annotated[str, TextLimit(500)]
_Name = Annotated[str, TextLimit(200, blank=False)]
_Usd = Annotated[float, Field(gt=0, le=1e9)]
_Sum = Annotated[float, Field(ge=0, le=1e9)]
_Tokens = Annotated[int, Field(ge=0, le=2**62)]
_Text = Annotated[str, TextLimit(200_000)]
_Mode = Annotated[ReplayMode, one_of(ReplayMode)]
_Policy = Annotated[OnMissingResult, one_of(OnMissingResult)]
_Order = Annotated[LayerOrder, one_of(LayerOrder)]
_State = Annotated[InspectedState, one_of(InspectedState)]
_StopReason = Annotated[StopReason, one_of(StopReason)]

EXAMPLE: Final[dict[str, Any]] = {
    "name": "Flash in place of Pro",
    "selection": {"filters": {"model": "gemini-3.1-pro-preview"}, "sample_count": 200, "sample_seed": 7},
    "candidate": {"model": "gemini-3-flash-preview", "settings": {"thinking": "low"}},
    "mode": "teacher_forced",
    "limits": {"repetitions": 3, "parallelism": 4, "calls_per_minute": 60, "budget_usd": 5.0},
    "assertions": [{"name": "answers briefly", "expression": "output_tokens < 400"}],
}


class FiltersBody(Body):
    """The filters of the list of conversations. A filter that is left out selects all."""

    assistant_id: _Filter | None = None
    model: _Filter | None = None
    provider: _Filter | None = None
    state: _State | None = None
    stop_reason: _StopReason | None = None
    error_code: _Filter | None = None
    tool_name: _Filter | None = None
    has_repairs: bool = False
    has_missing_signature: bool = False
    has_withheld_signature: bool = False
    has_prefix_break: bool = False
    was_recovered: bool = False
    cost_from: _Sum | None = None
    cost_to: _Sum | None = None
    tokens_from: _Tokens | None = None
    tokens_to: _Tokens | None = None
    active_after: Moment | None = None
    active_before: Moment | None = None
    text: _Filter | None = None
    phrase: _Filter | None = None

    def to_filter(self) -> InspectionFilter:
        """Build the filter. Raises `ValidationFailed` for a time without an offset."""
        values = self.model_dump()
        for name in ("cost_from", "cost_to"):
            values[name] = None if values[name] is None else Decimal(str(values[name]))
        for name in ("active_after", "active_before"):
            values[name] = in_utc(f"selection.filters.{name}", values[name], source="body")
        return InspectionFilter(**values)


class SelectionBody(Body):
    """The conversations: by id or by filters, all of them or a random sample."""

    conversation_ids: list[str] | None = Field(
        default=None, min_length=1, max_length=CONVERSATION_LIMIT, examples=[[CONVERSATION_ID]]
    )
    filters: FiltersBody = Field(default_factory=FiltersBody)
    sample_count: int | None = Field(default=None, ge=1, le=CONVERSATION_LIMIT, description="Null selects all.")
    sample_seed: int = Field(default=0, ge=-MAX_BIGINT, le=MAX_BIGINT)


class CandidateBody(Body):
    """The configuration under test. Members that are left out keep the recorded values."""

    provider: _Filter | None = None
    model: _Name | None = None
    assistant_id: _Filter | None = Field(default=None, description="Replaces the assistant of each conversation.")
    assistant_version: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    settings: JsonObject | None = Field(
        default=None, description="Merged into the assistant's settings. A null member removes the setting."
    )
    instructions: InstructionsBody | None = None
    variables: JsonObject | None = None
    tools: list[ToolBody] | None = Field(default=None, max_length=128)
    layer_order: _Order | None = None
    compaction: JsonObject | None = Field(default=None, description="As in an assistant's settings.")
    templates: dict[str, _Text] = Field(
        default_factory=dict, max_length=20, description="Template sources of layers by file name."
    )

    def to_candidate(self) -> Candidate:
        """Build the candidate."""
        instructions = self.instructions
        tools = self.tools
        return Candidate(
            provider=self.provider,
            model=self.model,
            assistant_id=self.assistant_id,
            assistant_version=self.assistant_version,
            settings=self.settings,
            instructions=None if instructions is None else Instructions(**instructions.model_dump()),
            variables=self.variables,
            tools=None if tools is None else tuple(Tool(**tool.model_dump()) for tool in tools),
            layer_order=self.layer_order,
            compaction=self.compaction,
            templates=self.templates,
        )


class LimitsBody(Body):
    """Limits that hold over all processes together. Null means no limit."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE["limits"]]})

    repetitions: int = Field(default=1, ge=1, le=REPETITION_LIMIT)
    parallelism: int = Field(
        default=4, ge=1, le=PARALLELISM_LIMIT, description="Conversations that run at the same time."
    )
    calls_per_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    budget_usd: _Usd | None = None
    budget_tokens: int | None = Field(default=None, ge=1, le=2**62)

    def to_limits(self) -> ReplayLimits:
        """Build the limits."""
        usd = self.budget_usd
        return ReplayLimits(
            repetitions=self.repetitions,
            parallelism=self.parallelism,
            calls_per_minute=self.calls_per_minute,
            budget_usd=None if usd is None else Decimal(str(usd)),
            budget_tokens=self.budget_tokens,
        )

    def merge_into(self, limits: ReplayLimits) -> ReplayLimits:
        """Return the limits with the members of this body. `repetitions` and omitted members do not change."""
        given = self.to_limits()
        return replace(limits, **{name: getattr(given, name) for name in self.model_fields_set - {"repetitions"}})


class AssertionBody(Body):
    """A condition for each answer: either an expression or a JSON schema."""

    name: _Name
    expression: Annotated[str, TextLimit(2000)] | None = Field(default=None, examples=["'Oslo' in text"])
    # `schema` is a reserved name of pydantic, so only the alias has it.
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    tool_name: _Filter | None = Field(
        default=None, description="The schema applies to the arguments of this tool's calls."
    )

    def to_assertion(self) -> Assertion:
        """Build the assertion."""
        return Assertion(name=self.name, expression=self.expression, schema=self.json_schema, tool_name=self.tool_name)


class JudgeBody(Body):
    """A model that rates each answer. Its calls are stored and count toward the budget."""

    provider: _Filter
    model: _Name
    prompt: _Text
    settings: JsonObject = Field(default_factory=dict)


class ReplayBody(Body):
    """The definition of a replay."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "As it was", "selection": {"conversation_ids": [CONVERSATION_ID]}}, EXAMPLE]
        }
    )

    name: _Name
    selection: SelectionBody
    candidate: CandidateBody = Field(default_factory=CandidateBody)
    mode: _Mode = ReplayMode.TEACHER_FORCED
    on_missing_result: _Policy = Field(
        default=OnMissingResult.STOP,
        description="The result of a free-running candidate's tool call that was not recorded.",
    )
    limits: LimitsBody = Field(default_factory=LimitsBody)
    assertions: list[AssertionBody] = Field(default_factory=list, max_length=100)
    judge: JudgeBody | None = None
    dry_run: bool = Field(default=False, description="Only return the estimate.")

    def to_draft(self) -> ReplayDraft:
        """Build the draft. Raises `ValidationFailed`."""
        chosen, judge = self.selection, self.judge
        ids = chosen.conversation_ids
        return ReplayDraft(
            name=self.name,
            selection=Selection(
                conversation_ids=None if ids is None else tuple(ids),
                filters=chosen.filters.to_filter(),
                sample_count=chosen.sample_count,
                sample_seed=chosen.sample_seed,
            ),
            candidate=self.candidate.to_candidate(),
            mode=self.mode,
            on_missing_result=self.on_missing_result,
            limits=self.limits.to_limits(),
            assertions=tuple(assertion.to_assertion() for assertion in self.assertions),
            judge=None if judge is None else Judge(**judge.model_dump()),
        )


class ContinueBody(Body):
    """The limits of a replay that is continued."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"limits": {"budget_usd": 10.0}}]})

    limits: LimitsBody | None = Field(
        default=None,
        description="Members that are left out do not change; null removes a limit. `repetitions` cannot change.",
    )


def first_fault(error: ValidationError) -> tuple[str, str]:
    """Return the path and the message of the first fault of a body that a form or a command has built."""
    fault = error.errors()[0]
    return ".".join(str(step) for step in fault["loc"]), fault["msg"].removeprefix("Value error, ")
