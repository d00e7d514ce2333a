"""Lists and timelines of `strata inspect` in the terminal.

Texts of users and models pass `escape_controls` or `one_line`, so that they cannot control the terminal.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from server.cli.terminal import describe_call, escape_controls, one_line
from server.conversation.block import (
    Block,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)
from server.conversation.usage import Usage
from server.inspection.conversation_list import InspectedConversation, InspectionPage
from server.inspection.timeline import CallOutline, Timeline, TimelineTurn

_EXCERPT_WIDTH: Final = 40
"""Leaves enough width for the numbers."""
_MAX_TEXT_CHARACTERS: Final = 2000
_MAX_LINE_CHARACTERS: Final = 300


def show_list(console: Console, page: InspectionPage) -> None:
    """Print a page of conversations."""
    table = Table(
        # A truncated id could not be used to open the conversation.
        Column("conversation", no_wrap=True),
        "tenant",
        "assistant",
        "state",
        Column("turns", justify="right", no_wrap=True),
        Column("tokens", justify="right", no_wrap=True),
        Column("USD", justify="right", no_wrap=True),
        Column("last activity", no_wrap=True),
        "problems",
        Column("starts with", overflow="ellipsis", no_wrap=True, max_width=_EXCERPT_WIDTH),
    )
    for found in page.items:
        facts = found.facts
        tokens = facts.usage.input_tokens + facts.usage.output_tokens + facts.usage.reasoning_tokens
        table.add_row(
            found.id,
            _safe(found.tenant_name),
            _safe(found.assistant_name),
            found.state.value if found.is_counted else f"{found.state.value}, not counted yet",
            f"{facts.turn_count:,}",
            f"{tokens:,}",
            show_usd(facts.cost_usd) + (" +?" if facts.unpriced_count else ""),
            show_time(facts.last_activity_at),
            _safe(", ".join(_list_problems(found))),
            _safe(facts.excerpt),
        )
    console.print(table)
    about = "" if page.is_count_exact else "about "
    console.print(f"{len(page.items)} shown, {about}{page.estimated_count:,} in total.")
    if page.searched_until is not None:
        console.print(f"Searched back to {show_time(page.searched_until)} UTC; there may be more.")
    if page.next_cursor is not None:
        console.print(f"Continue with --cursor {page.next_cursor}", soft_wrap=True)


def show_timeline(console: Console, timeline: Timeline) -> None:
    """Print a part of a conversation."""
    conversation = timeline.conversation
    console.print(
        f"[bold]{conversation.id}[/] of {_safe(timeline.tenant_name)}, assistant {_safe(timeline.assistant_name)} "
        f"version {conversation.assistant_version}, {conversation.state}, epoch {conversation.epoch}, buffer from turn "
        f"{conversation.buffer_start_seq}"
    )
    for item in timeline.turns:
        for compaction in item.compactions:
            outline = compaction.outline
            undone = f", undone in epoch {compaction.undone_by.number}" if compaction.undone_by else ""
            console.rule(
                f"{outline.reason}: the turns above became history in epoch {outline.number}{undone}", style="yellow"
            )
        _show_turn(console, item)
    if timeline.running is not None:
        console.print(f"[yellow]turn {timeline.running.seq} is running[/] in {_safe(timeline.running.owner)}")
    if timeline.earlier_seq is not None:
        console.print(f"Earlier turns: --around {timeline.earlier_seq}")
    if timeline.later_seq is not None:
        console.print(f"Later turns: --after {timeline.later_seq - 1}")


def describe_blocks(blocks: Sequence[Block]) -> Iterator[Text]:
    """Render the blocks of a turn."""
    for block in blocks:
        match block:
            case TextBlock():
                yield Text(escape_controls(block.text[:_MAX_TEXT_CHARACTERS]))
            case ThinkingBlock():
                yield Text(f"(thinking) {shorten(block.text)}", style="dim italic")
            case ToolCallBlock():
                yield Text(f"→ {describe_call(block.name, block.arguments)}")
            case ToolResultBlock():
                yield Text(f"← {shorten(json.dumps(block.output, ensure_ascii=False))}")
            case ImageBlock():
                yield Text(f"({one_line(block.media_type)}, {block.size_bytes:,} bytes)")
            case UnknownBlock():
                yield Text("(a block of a type that this release does not support)")


def describe_outline(outline: CallOutline) -> str:
    """Describe a call on one line."""
    took = "running" if outline.ended_at is None else f"{(outline.ended_at - outline.started_at).total_seconds():.2f} s"
    error = "" if outline.error_code is None else f", {outline.error_code}"
    warnings = f", {', '.join(outline.warning_kinds)}" if outline.warning_kinds else ""
    return one_line(
        f"{outline.turn_seq}/{outline.attempt}: {outline.model}, status {outline.status}, {took}{error}{warnings}"
    )


def describe_tokens(usage: Usage) -> str:
    """Describe the tokens of a call."""
    read = f"{usage.input_tokens:,} in ({usage.cache_read_tokens:,} cached)"
    return f"{read}, {usage.output_tokens:,} out, {usage.reasoning_tokens:,} reasoning"


def show_usd(cost: Decimal | None) -> str:
    """Render an amount; `unknown` for None."""
    return "unknown" if cost is None else f"{cost:,.4f}"


def show_time(moment: datetime) -> str:
    """Render a time in UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def shorten(text: str) -> str:
    """Return the start of a text, on one line."""
    line = one_line(text[: 4 * _MAX_LINE_CHARACTERS])
    return line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[:_MAX_LINE_CHARACTERS]}…"


def _show_turn(console: Console, item: TimelineTurn) -> None:
    head = f"turn {item.turn.seq}, {item.role}, {show_time(item.turn.created_at)}"
    if (answer := item.answer) is not None:
        error = "" if answer.error_code is None else f" [{answer.error_code}]"
        head += f", {answer.model}, {answer.state}{error}"
        head += f", {describe_tokens(answer.usage)}, {show_usd(answer.cost_usd)} USD"
    console.print(Text(one_line(head), style="bold"))
    if item.ending:
        console.print(Text(one_line(item.ending), style="yellow"))
    for text in describe_blocks(item.turn.blocks):
        console.print(text)
    for outline in item.calls:
        console.print(Text(f"  call {describe_outline(outline)}", style="dim"))


def _list_problems(found: InspectedConversation) -> Iterator[str]:
    yield from found.facts.error_codes
    flags = ("has_repairs", "has_missing_signature", "has_prefix_break", "was_recovered")
    yield from (flag.removeprefix("has_").replace("_", " ") for flag in flags if getattr(found.facts, flag))


def _safe(text: str) -> str:
    """Escape markup and characters that control a terminal."""
    return escape(one_line(text))
