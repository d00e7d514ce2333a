"""Assistants as JSON, for operators."""

from datetime import datetime
from typing import Any, Final, Self

from pydantic import Field

from server.inspection.assistant_editor import RenderedPrompt, Severity
from server.inspection.assistants import (
    COUNT_CAP,
    AssistantDifference,
    CacheEffect,
    ChangeKind,
    FieldChange,
    InspectedAssistant,
)
from server.inspection.differences import LineChange
from server.web.api.assistants import AssistantView
from server.web.api.inspection_views import TENANT_ID
from server.web.api.views import ASSISTANT_ID, EXAMPLE_TIME, PageView, View

_MODEL: Final = "gemini-3.1-pro-preview"
_COUNTED: Final = f"Counted up to {COUNT_CAP}."


class AssistantOutlineView(View):
    """An assistant as of its newest version."""

    id: str = Field(examples=[ASSISTANT_ID])
    tenant_id: str = Field(examples=[TENANT_ID])
    tenant_name: str = Field(examples=["acme"])
    name: str = Field(examples=["helper"])
    provider: str = Field(examples=["gemini"])
    model: str = Field(examples=[_MODEL])
    version: int = Field(examples=[3])
    versions: int = Field(validation_alias="version_count", description=f"Number of versions. {_COUNTED}", examples=[3])
    conversations: int = Field(validation_alias="conversation_count", description=_COUNTED, examples=[12])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])
    changed_at: datetime = Field(examples=[EXAMPLE_TIME])


class AssistantOutlinePage(PageView[AssistantOutlineView]):
    """Assistants, newest first."""


class InspectedAssistantView(View):
    """A version, and which versions conversations use."""

    tenant_id: str = Field(examples=[TENANT_ID])
    tenant_name: str = Field(examples=["acme"])
    newest_version: int = Field(examples=[3])
    conversations_by_version: dict[str, int] = Field(
        description=f"Conversations by version, among the newest {COUNT_CAP}.",
        examples=[{"2": 4, "3": 8}],
    )
    assistant: AssistantView

    @classmethod
    def of(cls, found: InspectedAssistant) -> Self:
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
    tools: int = Field(validation_alias="tool_count", description="Number of tools.", examples=[1])


class VersionPage(PageView[VersionView]):
    """Versions, newest first."""


class LineView(View):
    """A line of one of the texts, or of both if it is the same."""

    change: LineChange
    old_line: int | None = Field(
        validation_alias="old_number", description="Line number in the older text.", examples=[2]
    )
    new_line: int | None = Field(
        validation_alias="new_number", description="Line number in the newer text.", examples=[2]
    )
    text: str = Field(examples=["Be kind."])
    left_out: int = Field(
        validation_alias="left_out_count",
        description="For `left_out`: the number of equal lines that are not listed.",
        examples=[0],
    )


class FieldChangeView(View):
    """A field that differs."""

    path: str = Field(examples=["instructions.constraints"])
    change: ChangeKind
    old: str | None = Field(
        description="As JSON; null if it was missing or is compared in `lines`.", examples=['"low"']
    )
    new: str | None = Field(examples=['"high"'])
    lines: list[LineView] | None = Field(description="For texts and long values.")
    is_coarse: bool = Field(description="The change was too large to align line by line.", examples=[False])
    is_cut: bool = Field(description="The list of lines was truncated.", examples=[False])

    @classmethod
    def of(cls, change: FieldChange) -> Self:
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
    """The difference from another version."""

    against: int = Field(description="The older version that it is compared with.", examples=[2])
    changes: list[FieldChangeView]
    left_out: int = Field(description="Changes that were omitted at the end.", examples=[0])
    cache_effect: CacheEffect = Field(
        description="How switching a conversation to this version affects the provider's cache."
    )

    @classmethod
    def comparing(cls, against: int, difference: AssistantDifference) -> Self:
        return cls(
            against=against,
            changes=[FieldChangeView.of(change) for change in difference.changes],
            left_out=difference.left_out_count,
            cache_effect=difference.cache_effect,
        )


class ComparedVersionView(InspectedAssistantView):
    """A version, and its difference from another."""

    difference: DifferenceView | None = Field(description="Null without `against`.")


class ProblemView(View):
    """A problem in a template."""

    template: str = Field(description="`roles`, `procedure`, `constraints`, or a file.", examples=["constraints"])
    severity: Severity = Field(description="Instructions with an `error` cannot be saved.")
    kind: str = Field(examples=["parse"])
    message: str = Field(examples=["`system` changes with every turn, and this text is written once."])
    line: int | None = Field(examples=[2])
    source: str = Field(description="The line.", examples=["Today is {{ system.day_of_week }}."])


class CheckView(View):
    """The result of a check without rendering."""

    is_valid: bool = Field(description="Whether the instructions can be saved.", examples=[False])
    problems: list[ProblemView]
    args: list[str] = Field(description="Args that a conversation can set.", examples=[["city"]])


class PromptView(View):
    """The static layer at the start of a conversation, before any history."""

    version: int = Field(examples=[3])
    text: str = Field(examples=["# Assistant\n\nName: helper\n"])
    bytes: int = Field(examples=[28])
    tokens: int = Field(description="An estimate.", examples=[8])
    sha256: str = Field(examples=["5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"])
    args: dict[str, Any] = Field(description="The args that it was rendered with.", examples=[{"city": "Oslo"}])
    problems: list[ProblemView] = Field(description="Templates that failed, so that their source was used.")
    missing: list[str] = Field(description="Names that had no value.", examples=[[]])

    @classmethod
    def showing(cls, version: int, prompt: RenderedPrompt) -> Self:
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
