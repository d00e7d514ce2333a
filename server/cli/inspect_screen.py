"""Conversations, timelines and calls of `strata inspect` in the terminal."""

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
from server.inspection.call_explanation import CacheVerdict, OutcomeKind
from server.inspection.calls import InspectedCall, RequestProof
from server.inspection.conversation_list import InspectedConversation, InspectionPage
from server.inspection.manifest_difference import BlockChange, DifferenceRow
from server.inspection.signatures import SignatureState
from server.inspection.timeline import CallOutline, Timeline, TimelineTurn

_EXCERPT_WIDTH: Final = 40
"""Leaves enough width for the numbers."""
_MAX_TEXT_CHARACTERS: Final = 2000
_MAX_LINE_CHARACTERS: Final = 300
_LAYER_STYLES: Final = {"static": "blue", "dynamic": "magenta", "buffered": "cyan", "trigger": "green"}
_OUTCOME_STYLES: Final = {
    OutcomeKind.ANSWERED: "green",
    OutcomeKind.STOPPED: "yellow",
    OutcomeKind.FAILED: "bold red",
    OutcomeKind.RUNNING: "yellow",
    OutcomeKind.LOST: "bold red",
    OutcomeKind.UNKNOWN: "bold red",
}
_PROOF_STYLES: Final = {
    RequestProof.EQUAL: "green",
    RequestProof.DIFFERENT: "bold red",
    RequestProof.IMPOSSIBLE: "yellow",
}
_CACHE_STYLES: Final = {CacheVerdict.MISS: "bold red", CacheVerdict.LESS: "yellow"}
_CHANGES: Final = {
    BlockChange.SAME: ("=", "dim"),
    BlockChange.CHANGED: ("~", "yellow"),
    BlockChange.ADDED: ("+", "green"),
    BlockChange.REMOVED: ("-", "red"),
}
_SIGNATURE_STYLES: Final = {SignatureState.MISSING: "bold red", SignatureState.WITHHELD: "yellow"}
_MAX_ROWS: Final = 60
_NAME_WIDTH: Final = 10


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
            _format_usd(facts.cost_usd) + (" +?" if facts.unpriced_count else ""),
            _format_time(facts.last_activity_at),
            _safe(", ".join(_list_problems(found))),
            _safe(facts.excerpt),
        )
    console.print(table)
    about = "" if page.is_count_exact else "about "
    console.print(f"{len(page.items)} shown, {about}{page.estimated_count:,} in total.")
    if page.searched_until is not None:
        console.print(f"Searched back to {_format_time(page.searched_until)} UTC; there may be more.")
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


def _list_problems(found: InspectedConversation) -> Iterator[str]:
    yield from found.facts.error_codes
    flags = ("has_repairs", "has_missing_signature", "has_prefix_break", "was_recovered")
    yield from (flag.removeprefix("has_").replace("_", " ") for flag in flags if getattr(found.facts, flag))


def _show_turn(console: Console, item: TimelineTurn) -> None:
    head = f"turn {item.turn.seq}, {item.role}, {_format_time(item.turn.created_at)}"
    if (answer := item.answer) is not None:
        error = "" if answer.error_code is None else f" [{answer.error_code}]"
        head += f", {answer.model}, {answer.state}{error}"
        head += f", {_describe_tokens(answer.usage)}, {_format_usd(answer.cost_usd)} USD"
    console.print(Text(one_line(head), style="bold"))
    if item.ending:
        console.print(Text(one_line(item.ending), style="yellow"))
    for text in _describe_blocks(item.turn.blocks):
        console.print(text)
    for outline in item.calls:
        console.print(Text(f"  call {_describe_outline(outline)}", style="dim"))


def show_call(console: Console, found: InspectedCall) -> None:
    """Print a call."""
    for line in (*_head(found), *_outcome(found), *_proof(found), *_cache(found), *_times(found)):
        console.print(line)
    console.print(_layers(found))
    if found.cost_lines:
        console.print(_costs(found))
    for line in (*_difference(found), *_signatures(found), *_notes(found), *_answer(found)):
        console.print(line)


def _head(found: InspectedCall) -> Iterator[Text]:
    start = found.call.start
    of_all = f" of {len(found.attempts)}" if len(found.attempts) > 1 else ""
    turn = f"Turn {found.call.turn_seq}" if found.call.turn_seq > 0 else f"Background call {found.call.turn_seq}"
    head = f"{turn}, attempt {start.attempt}{of_all}: {start.provider}, {start.model}, "
    yield Text(one_line(head + _format_time(start.started_at)), style="bold")
    for outline in found.attempts:
        if outline.attempt != start.attempt:
            yield _line("attempt", _describe_outline(outline), "dim")


def _outcome(found: InspectedCall) -> Iterator[Text]:
    outcome, end = found.outcome, found.call.end
    code = f" [{outcome.code}]" if end is not None and outcome.code else ""
    status = f" HTTP {end.status}." if end is not None and end.status is not None else ""
    text = f"{outcome.kind}{code}. {outcome.explanation} {outcome.advice}{status}"
    yield _line("outcome", text, _OUTCOME_STYLES[outcome.kind])
    if found.differs_from_turn:
        yield _line("answer", "the bytes give another answer than the stored turn", "bold red")


def _proof(found: InspectedCall) -> Iterator[Text]:
    request, style = found.request, _PROOF_STYLES[found.request.proof]
    match request.proof:
        case RequestProof.EQUAL:
            yield _line("request", f"equal, {len(request.body or b''):,} bytes, sha256 {request.stored_hash}", style)
        case RequestProof.DIFFERENT:
            first = "outside the blocks" if request.first_difference is None else f"block {request.first_difference}"
            yield _line("request", f"different, first at {first}", style)
            yield _line("", f"sent    sha256 {request.stored_hash}", style)
            yield _line("", f"rebuilt sha256 {request.rebuilt_hash}", style)
        case RequestProof.IMPOSSIBLE:
            yield _line("request", f"cannot be rebuilt [{request.error_code or ''}] {request.error}", style)


def _cache(found: InspectedCall) -> Iterator[Text]:
    cache, end = found.cache, found.call.end
    numbers = ""
    if end is not None:
        expected = "unknown" if cache.expected_tokens is None else f"{cache.expected_tokens:,}"
        numbers = f", expected {expected}, read {end.usage.cache_read_tokens:,}"
    reason = "" if cache.miss_reason is None else f" [{cache.miss_reason}]"
    text = f"{cache.verdict}{numbers}{reason}. {cache.explanation}"
    yield _line("cache", text, _CACHE_STYLES.get(cache.verdict, ""))


def _times(found: InspectedCall) -> Iterator[Text]:
    end, started_at = found.call.end, found.call.start.started_at
    if end is None:
        return
    first = (
        ""
        if end.first_byte_at is None
        else f"first byte after {(end.first_byte_at - started_at).total_seconds():.3f} s, "
    )
    yield _line("time", f"{first}ended after {(end.ended_at - started_at).total_seconds():.3f} s")
    usd = "unknown" if end.cost_usd is None else f"{end.cost_usd:,.6f}"
    yield _line("cost", f"{usd} USD for {_describe_tokens(end.usage)}")


def _layers(found: InspectedCall) -> Table:
    unit = "tokens" if found.are_tokens_reported else "tokens (estimate)"
    table = Table("layer", *(Column(name, justify="right") for name in ("blocks", "bytes", unit)))
    for share in found.layers:
        numbers = (share.block_count, share.size_bytes, share.token_count)
        table.add_row(share.layer, *(f"{number:,}" for number in numbers), style=_LAYER_STYLES[share.layer])
    return table


def _costs(found: InspectedCall) -> Table:
    table = Table("bucket", *(Column(name, justify="right") for name in ("tokens", "USD per million", "USD")))
    for line in found.cost_lines:
        price = "unknown" if line.usd_per_million is None else f"{line.usd_per_million:,.3f}"
        usd = "unknown" if line.usd is None else f"{line.usd:,.6f}"
        if line.token_count:
            table.add_row(line.name, f"{line.token_count:,}", price, usd)
    return table


def _difference(found: InspectedCall) -> Iterator[Text]:
    previous = found.previous
    if previous is None:
        return
    yield Text(f"Compared with turn {previous.turn_seq}, attempt {previous.start.attempt}:", style="bold")
    for row in found.difference[:_MAX_ROWS]:
        if row.is_first_break:
            text = "  first difference: everything after it cannot be read from the cache"
            yield Text(text, style="bold yellow")
        yield _describe_row(row)
    yield from _more(len(found.difference))


def _describe_row(row: DifferenceRow) -> Text:
    mark, style = _CHANGES[row.change]
    entry = row.entry
    if row.change is BlockChange.SAME or entry is None:
        return Text(f"{mark} {row.count:,} equal block{'' if row.count == 1 else 's'}", style=style)
    seq = "" if entry.seq is None else f" turn {entry.seq}"
    was = f"{row.previous.length:,} -> " if row.change is BlockChange.CHANGED and row.previous is not None else ""
    text = f"{entry.layer} {entry.kind} {entry.role}{seq}, {was}{entry.length:,} bytes, {entry.hash[:12]}"
    return Text(f"{mark} {one_line(text)}", style=style)


def _signatures(found: InspectedCall) -> Iterator[Text]:
    listed = found.signatures
    if listed:
        yield Text("Signatures:", style="bold")
    for each in listed[:_MAX_ROWS]:
        signature = each.signature
        direction = "received" if each.is_received else "sent"
        mark = "" if signature.length is None else f", {signature.length} bytes, {signature.fingerprint}"
        reason = f" ({each.reason})" if each.reason else ""
        text = f"turn {signature.seq} {signature.block_type}, {direction}: {signature.state}{reason}{mark}"
        yield Text(f"  {one_line(text)}", style=_SIGNATURE_STYLES.get(signature.state, ""))
    yield from _more(len(listed))


def _notes(found: InspectedCall) -> Iterator[Text]:
    for note in found.notes[:_MAX_ROWS]:
        details = json.dumps(dict(note.details), ensure_ascii=False)
        yield Text(_shorten(f"{note.group} {note.kind}: {note.explanation} {details}"), style="yellow")
    yield from _more(len(found.notes))


def _answer(found: InspectedCall) -> Iterator[Text]:
    if found.folded is None:
        return
    yield Text("Answer:", style="bold")
    if found.folded.error_code is not None:
        text = f"the response could not be read to its end [{found.folded.error_code}]"
        yield Text(one_line(text), style="bold red")
    yield from _describe_blocks(found.folded.answer.blocks)


def _more(count: int) -> Iterator[Text]:
    if count > _MAX_ROWS:
        yield Text(f"  {count - _MAX_ROWS:,} more", style="dim")


def _line(name: str, text: str, style: str = "") -> Text:
    return Text(f"{name:<{_NAME_WIDTH}}{one_line(text)}", style=style)


def _describe_blocks(blocks: Sequence[Block]) -> Iterator[Text]:
    """Render the blocks of a turn."""
    for block in blocks:
        match block:
            case TextBlock():
                yield Text(escape_controls(block.text[:_MAX_TEXT_CHARACTERS]))
            case ThinkingBlock():
                yield Text(f"(thinking) {_shorten(block.text)}", style="dim italic")
            case ToolCallBlock():
                yield Text(f"→ {describe_call(block.name, block.arguments)}")
            case ToolResultBlock():
                yield Text(f"← {_shorten(json.dumps(block.output, ensure_ascii=False))}")
            case ImageBlock():
                yield Text(f"({one_line(block.media_type)}, {block.size_bytes:,} bytes)")
            case UnknownBlock():
                yield Text("(a block of a type that this release does not support)")


def _describe_outline(outline: CallOutline) -> str:
    """Describe a call on one line."""
    took = "running" if outline.ended_at is None else f"{(outline.ended_at - outline.started_at).total_seconds():.2f} s"
    error = "" if outline.error_code is None else f", {outline.error_code}"
    warnings = f", {', '.join(outline.warning_kinds)}" if outline.warning_kinds else ""
    return one_line(
        f"{outline.turn_seq}/{outline.attempt}: {outline.model}, status {outline.status}, {took}{error}{warnings}"
    )


def _describe_tokens(usage: Usage) -> str:
    """Describe the tokens of a call."""
    read = f"{usage.input_tokens:,} in ({usage.cache_read_tokens:,} cached)"
    return f"{read}, {usage.output_tokens:,} out, {usage.reasoning_tokens:,} reasoning"


def _format_usd(cost: Decimal | None) -> str:
    """Render an amount; `unknown` for None."""
    return "unknown" if cost is None else f"{cost:,.4f}"


def _format_time(time: datetime) -> str:
    """Render a time in UTC."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _shorten(text: str) -> str:
    """Return the start of a text, on one line."""
    line = one_line(text[: 4 * _MAX_LINE_CHARACTERS])
    return line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[:_MAX_LINE_CHARACTERS]}…"


def _safe(text: str) -> str:
    """Escape markup and characters that control a terminal."""
    return escape(one_line(text))
