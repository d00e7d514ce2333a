"""What `strata inspect` shows of lists and conversations. All that people or models wrote passes `harmless` before it
reaches the terminal.
"""

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from server.cli.chat_text import one_line
from server.cli.inspect_text import (
    describe_blocks,
    describe_outline,
    describe_tokens,
    safe,
    show_time,
    show_usd,
)
from server.conversation.turn import ModelResponseTurn, UserTaskTurn, describe_ending
from server.inspection.port import InspectedConversation, InspectionPage, Timeline, TimelineTurn

_BEGINS_WIDTH: Final = 40
"""What stands last must not take the room of the numbers."""


def show_list(console: Console, page: InspectionPage) -> None:
    """A page of conversations."""
    table = Table(
        # An id that is cut is of no use for opening it.
        Column("conversation", no_wrap=True),
        "tenant",
        "assistant",
        "state",
        Column("turns", justify="right", no_wrap=True),
        Column("tokens", justify="right", no_wrap=True),
        Column("USD", justify="right", no_wrap=True),
        Column("last activity", no_wrap=True),
        "trouble",
        Column("begins", overflow="ellipsis", no_wrap=True, max_width=_BEGINS_WIDTH),
    )
    for found in page.items:
        facts = found.facts
        tokens = facts.usage.input_tokens + facts.usage.output_tokens + facts.usage.reasoning_tokens
        table.add_row(
            found.id,
            safe(found.tenant_name),
            safe(found.assistant_name),
            found.state.value if found.is_counted else f"{found.state.value}, not counted yet",
            f"{facts.turn_count:,}",
            f"{tokens:,}",
            show_usd(facts.cost_usd) + (" +?" if facts.unpriced_count else ""),
            show_time(facts.last_activity_at),
            safe(", ".join(_troubles(found))),
            safe(facts.excerpt),
        )
    console.print(table)
    about = "" if page.is_count_exact else "about "
    console.print(f"{len(page.items)} shown, {about}{page.estimated_count:,} in all.")
    if page.searched_until is not None:
        console.print(f"Looked back to {show_time(page.searched_until)} UTC; there may be more.")
    if page.next_cursor is not None:
        console.print(f"Go on with --cursor {page.next_cursor}", soft_wrap=True)


def show_timeline(console: Console, timeline: Timeline) -> None:
    """A part of a conversation."""
    conversation = timeline.conversation
    console.print(
        f"[bold]{conversation.id}[/] of {safe(timeline.tenant_name)}, assistant {safe(timeline.assistant_name)} "
        f"version {conversation.assistant_version}, {conversation.state}, epoch {conversation.epoch}, buffer from turn "
        f"{conversation.buffer_start_seq}"
    )
    cuts = {outline.buffer_start_seq: outline for outline in reversed(timeline.epochs)}
    for item in timeline.turns:
        if item.turn.seq in cuts:
            outline = cuts[item.turn.seq]
            console.rule(
                f"{outline.reason}: what stands above became history in epoch {outline.number}", style="yellow"
            )
        _show_turn(console, item)
    if timeline.running is not None:
        console.print(f"[yellow]turn {timeline.running.seq} runs[/] at {safe(timeline.running.owner)}")
    if timeline.earlier_seq is not None:
        console.print(f"There are turns before these: --around {timeline.earlier_seq}")
    if timeline.later_seq is not None:
        console.print(f"There are turns after these: --after {timeline.later_seq - 1}")


def _show_turn(console: Console, item: TimelineTurn) -> None:
    turn = item.turn
    kind = "user" if isinstance(turn, UserTaskTurn) else "model" if isinstance(turn, ModelResponseTurn) else "tools"
    head = f"turn {turn.seq}, {kind}, {show_time(turn.created_at)}"
    if isinstance(turn, ModelResponseTurn):
        error = "" if turn.error_code is None else f" [{turn.error_code}]"
        head += f", {turn.model}, {turn.state}{error}, {describe_tokens(turn.usage)}, {show_usd(turn.cost_usd)} USD"
    console.print(Text(one_line(head), style="bold"))
    if isinstance(turn, ModelResponseTurn) and (why := describe_ending(turn.ending)):
        console.print(Text(one_line(why), style="yellow"))
    for text in describe_blocks(turn.blocks):
        console.print(text)
    for outline in item.calls:
        console.print(Text(f"  call {describe_outline(outline)}", style="dim"))


def _troubles(found: InspectedConversation) -> Iterator[str]:
    facts = found.facts
    yield from facts.error_codes
    flags = ("has_repairs", "has_missing_signature", "has_prefix_break", "was_recovered")
    yield from (flag.removeprefix("has_").replace("_", " ") for flag in flags if getattr(facts, flag))
