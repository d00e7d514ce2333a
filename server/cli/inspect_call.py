"""What `strata inspect call` shows: what happened, the proof, the cache, the cost; then what it was made of."""

import json
from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from server.cli.chat_text import one_line
from server.cli.inspect_text import cut, describe_blocks, describe_outline, describe_tokens, show_time
from server.inspection.call_explanation import (
    CacheVerdict,
    OutcomeKind,
    explain_cache,
    explain_error,
    explain_outcome,
    explain_repair,
    explain_template,
    explain_warning,
)
from server.inspection.call_view import CallInspection, RequestProof
from server.inspection.manifest_difference import BlockChange, DifferenceRow, summarize_difference
from server.inspection.signature_report import PartSignature, SignatureState

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
_FATES: Final = {
    BlockChange.SAME: ("=", "dim"),
    BlockChange.CHANGED: ("~", "yellow"),
    BlockChange.ADDED: ("+", "green"),
    BlockChange.REMOVED: ("-", "red"),
}
_SIGNATURE_STYLES: Final = {SignatureState.MISSING: "bold red", SignatureState.WITHHELD: "yellow"}
_ROWS: Final = 60
_NAME_WIDTH: Final = 10


def show_call(console: Console, found: CallInspection) -> None:
    """A call under the lens."""
    for line in (*_head(found), *_outcome(found), *_proof(found), *_cache(found), *_times(found)):
        console.print(line)
    console.print(_layers(found))
    if found.bill:
        console.print(_bill(found))
    for line in (*_difference(found), *_signatures(found), *_notes(found), *_answer(found)):
        console.print(line)


def _head(found: CallInspection) -> Iterator[Text]:
    start = found.call.start
    of_all = f" of {len(found.attempts)}" if len(found.attempts) > 1 else ""
    turn = f"Turn {found.call.turn_seq}" if found.call.turn_seq > 0 else f"Call of no turn ({found.call.turn_seq})"
    yield Text(
        one_line(
            f"{turn}, attempt {start.attempt}{of_all}: {start.provider}, {start.model}, {show_time(start.started_at)}"
        ),
        style="bold",
    )
    for outline in found.attempts:
        if outline.attempt != start.attempt:
            yield _line("attempt", describe_outline(outline), "dim")


def _outcome(found: CallInspection) -> Iterator[Text]:
    stop_reason = None if found.folded is None else found.folded.answer.stop_reason
    outcome, end = explain_outcome(found.call, found.turn, stop_reason), found.call.end
    code = f" [{end.error_code or stop_reason}]" if end is not None and (end.error_code or stop_reason) else ""
    status = f" HTTP {end.status}." if end is not None and end.status is not None else ""
    yield _line(
        "outcome", f"{outcome.kind}{code}. {outcome.words} {outcome.advice}{status}", _OUTCOME_STYLES[outcome.kind]
    )
    if found.differs_from_turn:
        yield _line("answer", "the bytes, read again now, say something else than the stored turn", "bold red")


def _proof(found: CallInspection) -> Iterator[Text]:
    request, style = found.request, _PROOF_STYLES[found.request.proof]
    match request.proof:
        case RequestProof.EQUAL:
            yield _line("request", f"equal, {len(request.body or b''):,} bytes, sha256 {request.stored_hash}", style)
        case RequestProof.DIFFERENT:
            place = "around the blocks" if request.first_difference is None else f"block {request.first_difference}"
            yield _line("request", f"different, first at {place}", style)
            yield _line("", f"sent       sha256 {request.stored_hash}", style)
            yield _line("", f"made again sha256 {request.rebuilt_hash}", style)
        case RequestProof.IMPOSSIBLE:
            code = request.error_code or ""
            yield _line("request", f"impossible to make again [{code}] {explain_error(code).message}", style)


def _cache(found: CallInspection) -> Iterator[Text]:
    explained, end, expected = explain_cache(found.call), found.call.end, found.call.start.cache_expected_tokens
    numbers = "" if end is None else f", expected {_count(expected)}, read {end.usage.cache_read_tokens:,}"
    reason = "" if end is None or end.cache_miss_reason is None else f" [{end.cache_miss_reason}]"
    style = _CACHE_STYLES.get(explained.verdict, "")
    yield _line("cache", f"{explained.verdict}{numbers}{reason}. {explained.words}", style)


def _times(found: CallInspection) -> Iterator[Text]:
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
    yield _line("cost", f"{usd} USD for {describe_tokens(end.usage)}")


def _layers(found: CallInspection) -> Table:
    unit = "tokens" if found.are_tokens_reported else "tokens (estimate)"
    table = Table("layer", *(Column(name, justify="right") for name in ("blocks", "bytes", unit)))
    for share in found.layers:
        numbers = (share.block_count, share.size_bytes, share.token_count)
        table.add_row(share.layer, *(f"{number:,}" for number in numbers), style=_LAYER_STYLES[share.layer])
    return table


def _bill(found: CallInspection) -> Table:
    table = Table("bucket", *(Column(name, justify="right") for name in ("tokens", "USD per million", "USD")))
    for line in found.bill:
        price = "unknown" if line.usd_per_million is None else f"{line.usd_per_million:,.3f}"
        usd = "unknown" if line.usd is None else f"{line.usd:,.6f}"
        if line.token_count:
            table.add_row(line.name, f"{line.token_count:,}", price, usd)
    return table


def _difference(found: CallInspection) -> Iterator[Text]:
    previous = found.previous
    if previous is None:
        return
    rows = summarize_difference(found.difference)
    yield Text(f"Compared with turn {previous.turn_seq}, attempt {previous.start.attempt}:", style="bold")
    for row in rows[:_ROWS]:
        if row.is_first_break:
            yield Text("  first difference: what stands behind it cannot come from the cache", style="bold yellow")
        yield _describe_row(row)
    if len(rows) > _ROWS:
        yield Text(f"  {len(rows) - _ROWS:,} rows more", style="dim")


def _describe_row(row: DifferenceRow) -> Text:
    mark, style = _FATES[row.change]
    entry = row.current or row.previous
    if row.change is BlockChange.SAME or entry is None:
        return Text(f"{mark} {row.count:,} block{'' if row.count == 1 else 's'} the same", style=style)
    seq = "" if entry.seq is None else f" turn {entry.seq}"
    was = f"{row.previous.length:,} -> " if row.change is BlockChange.CHANGED and row.previous is not None else ""
    told = f"{entry.layer} {entry.kind} {entry.role}{seq}, {was}{entry.length:,} bytes, {entry.hash[:12]}"
    return Text(f"{mark} {one_line(told)}", style=style)


def _signatures(found: CallInspection) -> Iterator[Text]:
    parts = [*(("received", part) for part in found.received_signatures)]
    parts += [*(("sent back", part) for part in found.sent_signatures)]
    if parts:
        yield Text("Signatures:", style="bold")
    for direction, part in parts[:_ROWS]:
        yield _describe_signature(direction, part)
    if len(parts) > _ROWS:
        yield Text(f"  {len(parts) - _ROWS:,} more", style="dim")


def _describe_signature(direction: str, part: PartSignature) -> Text:
    mark = "" if part.length is None else f", {part.length} bytes, {part.fingerprint}"
    reason = "" if part.reason is None else f" ({part.reason})"
    told = one_line(f"turn {part.seq} {part.block_type}, {direction}: {part.state}{reason}{mark}")
    return Text(f"  {told}", style=_SIGNATURE_STYLES.get(part.state, ""))


def _notes(found: CallInspection) -> Iterator[Text]:
    start = found.call.start
    notes = [
        *(("repair", note, explain_repair(note)) for note in start.repairs),
        *(("template failure", note, explain_template(note)) for note in start.template_failures),
        *(("warning", note, explain_warning(note)) for note in start.warnings),
    ]
    for name, note, words in notes[:_ROWS]:
        details = {key: value for key, value in note.items() if key != "kind"}
        told = f"{name} {note.get('kind')}: {words} {json.dumps(details, ensure_ascii=False)}"
        yield Text(cut(told), style="yellow")
    if len(notes) > _ROWS:
        yield Text(f"{len(notes) - _ROWS:,} notes more", style="dim")


def _answer(found: CallInspection) -> Iterator[Text]:
    if found.folded is None:
        return
    yield Text("Answer:", style="bold")
    if found.folded.error_code is not None:
        yield Text(one_line(f"reading ended early [{found.folded.error_code}]"), style="bold red")
    yield from describe_blocks(found.folded.answer.blocks)


def _line(name: str, words: str, style: str = "") -> Text:
    return Text(f"{name:<{_NAME_WIDTH}}{one_line(words)}", style=style)


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"
