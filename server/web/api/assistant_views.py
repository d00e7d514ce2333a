"""What operators see of assistants, as JSON."""

from datetime import datetime
from typing import Any, Final, Self

from pydantic import Field

from server.inspection.assistant_difference import AssistantDifference, CacheEffect, ChangeKind, FieldChange
from server.inspection.assistant_editor import CheckedInstructions, RenderedPrompt
from server.inspection.assistants import COUNT_CAP, AssistantOutline, InspectedAssistant, VersionOutline
from server.inspection.template_checks import Severity, TemplateProblem
from server.inspection.text_difference import DifferenceLine, LineChange
from server.web.api.assistants import AssistantView
from server.web.api.block_views import View
from server.web.api.inspection_views import TENANT_ID
from server.web.api.views import ASSISTANT_ID, EXAMPLE_TIME

_MODEL: Final = "gemini-3.1-pro-preview"
_COUNTED: Final = f"Counted up to {COUNT_CAP}."


class AssistantOutlineView(View):
    """An assistant as its newest version has it."""

    id: str = Field(examples=[ASSISTANT_ID])
    tenant_id: str = Field(examples=[TENANT_ID])
    tenant_name: str = Field(examples=["acme"])
    name: str = Field(examples=["helper"])
    provider: str = Field(examples=["gemini"])
    model: str = Field(examples=[_MODEL])
    version: int = Field(examples=[3])
    versions: int = Field(description=f"How many there are. {_COUNTED}", examples=[3])
    conversations: int = Field(description=_COUNTED, examples=[12])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])
    changed_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, outline: AssistantOutline) -> Self:
        """The view of an outline."""
        return cls(
            id=outline.id,
            tenant_id=outline.tenant_id,
            tenant_name=outline.tenant_name,
            name=outline.name,
            provider=outline.provider,
            model=outline.model,
            version=outline.version,
            versions=outline.version_count,
            conversations=outline.conversation_count,
            created_at=outline.created_at,
            changed_at=outline.changed_at,
        )


class AssistantOutlinePage(View):
    """Assistants, newest first."""

    data: list[AssistantOutlineView]
    next_cursor: str | None = Field(description="Null: there are no more.", examples=[None])


class InspectedAssistantView(View):
    """A version with what stands around it."""

    tenant_id: str = Field(examples=[TENANT_ID])
    tenant_name: str = Field(examples=["acme"])
    newest_version: int = Field(examples=[3])
    conversations_by_version: dict[str, int] = Field(
        description=f"How many of the newest {COUNT_CAP} conversations are on which version.",
        examples=[{"2": 4, "3": 8}],
    )
    assistant: AssistantView

    @classmethod
    def of(cls, found: InspectedAssistant) -> Self:
        """The view of a version."""
        return cls(
            tenant_id=found.tenant_id,
            tenant_name=found.tenant_name,
            newest_version=found.newest_version,
            conversations_by_version={str(version): count for version, count in found.conversation_counts.items()},
            assistant=AssistantView.of(found.assistant),
        )


class VersionView(View):
    """A version in a list."""

    version: int = Field(examples=[3])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])
    name: str = Field(examples=["helper"])
    provider: str = Field(examples=["gemini"])
    model: str = Field(examples=[_MODEL])
    tools: int = Field(description="How many.", examples=[1])

    @classmethod
    def of(cls, outline: VersionOutline) -> Self:
        """The view of a version."""
        return cls(
            version=outline.version,
            created_at=outline.created_at,
            name=outline.name,
            provider=outline.provider,
            model=outline.model,
            tools=outline.tool_count,
        )


class VersionPage(View):
    """Versions, newest first."""

    data: list[VersionView]
    next_cursor: str | None = Field(description="Null: there are no more.", examples=[None])


class LineView(View):
    """A line of either text; of both where it is the same."""

    change: LineChange
    old_line: int | None = Field(description="Its number in the older text.", examples=[2])
    new_line: int | None = Field(description="Its number in the newer one.", examples=[2])
    text: str = Field(examples=["Be kind."])
    left_out: int = Field(description="How many equal lines a `left_out` stands for.", examples=[0])

    @classmethod
    def of(cls, row: DifferenceLine) -> Self:
        """The view of a row."""
        return cls(
            change=row.change,
            old_line=row.old_number,
            new_line=row.new_number,
            text=row.text,
            left_out=row.left_out_count,
        )


class FieldChangeView(View):
    """A field that is not the same in both versions."""

    path: str = Field(examples=["instructions.constraints"])
    change: ChangeKind
    old: str | None = Field(description="As JSON; null where it was not there, or `lines` tell it.", examples=['"low"'])
    new: str | None = Field(examples=['"high"'])
    lines: list[LineView] | None = Field(description="Of texts, and of what is long.")
    is_coarse: bool = Field(description="Too much to be aligned line by line.", examples=[False])
    is_cut: bool = Field(description="There are more lines than are told.", examples=[False])

    @classmethod
    def of(cls, change: FieldChange) -> Self:
        """The view of a change."""
        lines = change.lines
        return cls(
            path=change.path,
            change=change.change,
            old=change.old,
            new=change.new,
            lines=None if lines is None else [LineView.of(row) for row in lines.rows],
            is_coarse=lines is not None and lines.is_coarse,
            is_cut=lines is not None and lines.is_cut,
        )


class DifferenceView(View):
    """What became of a version."""

    against: int = Field(description="The version that it is compared with, the older one.", examples=[2])
    changes: list[FieldChangeView]
    left_out: int = Field(description="Changes at the end that are not told.", examples=[0])
    cache_effect: CacheEffect = Field(
        description="What it does to the provider's cache when a conversation goes to this version."
    )

    @classmethod
    def of(cls, against: int, difference: AssistantDifference) -> Self:
        """The view of a difference."""
        return cls(
            against=against,
            changes=[FieldChangeView.of(change) for change in difference.changes],
            left_out=difference.left_out_count,
            cache_effect=difference.cache_effect,
        )


class ComparedVersionView(InspectedAssistantView):
    """A version, and its difference to another."""

    difference: DifferenceView | None = Field(description="Null unless `against` is said.")


class ProblemView(View):
    """Something that an author should look at."""

    template: str = Field(description="`roles`, `procedure`, `constraints`, or a file.", examples=["constraints"])
    severity: Severity = Field(description="An `error` cannot be saved.")
    kind: str = Field(examples=["parse"])
    message: str = Field(examples=["`system` changes with every turn, and this text is written once."])
    line: int | None = Field(examples=[2])
    source: str = Field(description="That line.", examples=["Today is {{ system.day_of_week }}."])

    @classmethod
    def of(cls, problem: TemplateProblem) -> Self:
        """The view of a problem."""
        return cls(
            template=problem.template,
            severity=problem.severity,
            kind=problem.kind,
            message=problem.message,
            line=problem.line,
            source=problem.source,
        )


class CheckView(View):
    """What can be said of instructions without rendering them."""

    is_valid: bool = Field(description="Whether they could be saved.", examples=[False])
    problems: list[ProblemView]
    args: list[str] = Field(description="What a conversation can bring.", examples=[["city"]])

    @classmethod
    def of(cls, checked: CheckedInstructions) -> Self:
        """The view of a check."""
        return cls(
            is_valid=checked.is_valid,
            problems=[ProblemView.of(problem) for problem in checked.problems],
            args=list(checked.args),
        )


class PromptView(View):
    """The static layer as a conversation would begin with it; history would follow."""

    version: int = Field(examples=[3])
    text: str = Field(examples=["# Assistant\n\nName: helper\n"])
    bytes: int = Field(examples=[28])
    tokens: int = Field(description="About.", examples=[8])
    sha256: str = Field(examples=["5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"])
    args: dict[str, Any] = Field(description="Those that it was rendered with.", examples=[{"city": "Oslo"}])
    problems: list[ProblemView] = Field(description="Templates that fell back to their source.")
    missing: list[str] = Field(description="Names that stood for nothing.", examples=[[]])

    @classmethod
    def of(cls, version: int, prompt: RenderedPrompt) -> Self:
        """The view of a rendered prompt."""
        return cls(
            version=version,
            text=prompt.text,
            bytes=prompt.size_bytes,
            tokens=prompt.token_count,
            sha256=prompt.sha256,
            args=dict(prompt.args),
            problems=[ProblemView.of(problem) for problem in prompt.problems],
            missing=list(prompt.missing),
        )
