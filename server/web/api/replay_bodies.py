"""What is sent to make a replay."""

from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field

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

_Words = Annotated[str, TextLimit(500)]
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
    """Filters as an operator's list of conversations has them. What is left out does not matter."""

    assistant_id: _Words | None = None
    model: _Words | None = None
    provider: _Words | None = None
    state: _State | None = None
    stop_reason: _StopReason | None = None
    error_code: _Words | None = None
    tool_name: _Words | None = None
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
    text: _Words | None = None
    phrase: _Words | None = None

    def to_filter(self) -> InspectionFilter:
        """Raises `ValidationFailed` for a time without its offset."""
        values = self.model_dump()
        for name in ("cost_from", "cost_to"):
            values[name] = None if values[name] is None else Decimal(str(values[name]))
        for name in ("active_after", "active_before"):
            values[name] = in_utc(f"selection.filters.{name}", values[name], source="body")
        return InspectionFilter(**values)


class SelectionBody(Body):
    """Which conversations: by their ids, or all that the filters let through; of these, all or a random sample."""

    conversation_ids: list[str] | None = Field(
        default=None, min_length=1, max_length=CONVERSATION_LIMIT, examples=[[CONVERSATION_ID]]
    )
    filters: FiltersBody = Field(default_factory=FiltersBody)
    sample_count: int | None = Field(default=None, ge=1, le=CONVERSATION_LIMIT, description="Null: all of them.")
    sample_seed: int = Field(default=0, ge=-MAX_BIGINT, le=MAX_BIGINT)


class CandidateBody(Body):
    """What is tried. What is left out is as it was recorded."""

    provider: _Words | None = None
    model: _Name | None = None
    assistant_id: _Words | None = Field(default=None, description="Another assistant in place of each one's own.")
    assistant_version: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    settings: JsonObject | None = Field(
        default=None, description="Laid over the assistant's; null leaves a member to the model."
    )
    instructions: InstructionsBody | None = None
    variables: JsonObject | None = None
    tools: list[ToolBody] | None = Field(default=None, max_length=128)
    layer_order: _Order | None = None
    compaction: JsonObject | None = Field(default=None, description="As in an assistant's settings.")
    templates: dict[str, _Text] = Field(
        default_factory=dict, max_length=20, description="Sources of layers' templates by the name of their file."
    )

    def to_candidate(self) -> Candidate:
        """The words of it."""
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
    """How much of everything, over all processes together. What is null has no limit."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE["limits"]]})

    repetitions: int = Field(default=1, ge=1, le=REPETITION_LIMIT)
    parallelism: int = Field(default=4, ge=1, le=PARALLELISM_LIMIT, description="Conversations at a time.")
    calls_per_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    budget_usd: _Usd | None = None
    budget_tokens: int | None = Field(default=None, ge=1, le=2**62)

    def to_limits(self) -> ReplayLimits:
        """The words of it."""
        usd = self.budget_usd
        return ReplayLimits(
            repetitions=self.repetitions,
            parallelism=self.parallelism,
            calls_per_minute=self.calls_per_minute,
            budget_usd=None if usd is None else Decimal(str(usd)),
            budget_tokens=self.budget_tokens,
        )

    def lay_over(self, limits: ReplayLimits) -> ReplayLimits:
        """These limits with what is said here. What is left out stays, and so do the repetitions."""
        said = self.to_limits()
        return replace(limits, **{name: getattr(said, name) for name in self.model_fields_set - {"repetitions"}})


class AssertionBody(Body):
    """What has to hold for each answer: an expression or a JSON schema, exactly one of them."""

    name: _Name
    expression: Annotated[str, TextLimit(2000)] | None = Field(default=None, examples=["'Oslo' in text"])
    # `schema` is a name of pydantic's own; the member is called so.
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    tool_name: _Words | None = Field(default=None, description="The schema is for the arguments of this tool's calls.")

    def to_assertion(self) -> Assertion:
        """The words of it."""
        return Assertion(name=self.name, expression=self.expression, schema=self.json_schema, tool_name=self.tool_name)


class JudgeBody(Body):
    """A model that says how good an answer is. Its calls are stored, and their cost counts."""

    provider: _Words
    model: _Name
    prompt: _Text
    settings: JsonObject = Field(default_factory=dict)


class ReplayBody(Body):
    """A replay."""

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
        default=OnMissingResult.STOP, description="For a call of a tool that nobody has made before."
    )
    limits: LimitsBody = Field(default_factory=LimitsBody)
    assertions: list[AssertionBody] = Field(default_factory=list, max_length=100)
    judge: JudgeBody | None = None
    dry_run: bool = Field(default=False, description="Only tell what it would come to.")

    def to_draft(self) -> ReplayDraft:
        """Raises `ValidationFailed`."""
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
    """With what limits to go on."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"limits": {"budget_usd": 10.0}}]})

    limits: LimitsBody | None = Field(
        default=None,
        description="Laid over the replay's: what is left out stays, null takes a limit away. Repetitions stay.",
    )
