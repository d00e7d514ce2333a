"""Results of a replay as files: JSON, CSV, and tests for promptfoo.

Texts of users and models are escaped for the programs that read the file. A CSV cell that a spreadsheet would evaluate
as a formula starts with an apostrophe. promptfoo renders texts as templates and loads texts that start with `file://`,
so these are written as template expressions that evaluate to the same text.
"""

import csv
import io
import json
import re
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Any, Final

from server.replay.rerun.comparison import AnswerContent
from server.replay.rerun.full_results import FullResult, iterate_full_results
from server.replay.rerun.json_codec import replay_to_json, report_to_json, result_to_json
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import Assertion, Replay
from server.replay.rerun.result import AnswerFacts

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")
_MAX_CELL_CHARS: Final = 32_000
"""The approximate limit of spreadsheets."""
_TEMPLATE: Final = re.compile(r"\{[{%#]")
_FILE: Final = "file://"
_FACTS: Final = (
    "stop_reason",
    "error_code",
    "input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cost_usd",
    "cache_share",
    "latency_ms",
    "first_byte_ms",
)


class ExportFormat(StrEnum):
    """The format of an export."""

    JSON = "json"
    CSV = "csv"
    PROMPTFOO = "promptfoo"


MEDIA_TYPES: Final = {
    ExportFormat.JSON: "application/json",
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.PROMPTFOO: "application/yaml",
}
FILE_ENDINGS: Final = {ExportFormat.JSON: "json", ExportFormat.CSV: "csv", ExportFormat.PROMPTFOO: "promptfoo.yaml"}


CSV_HEADER: Final = (
    "item",
    "conversation_id",
    "repetition",
    "position",
    "turn",
    "outcome",
    "kinds",
    "similarity",
    "severity",
    "note",
    *(f"recorded_{name}" for name in _FACTS),
    *(f"candidate_{name}" for name in _FACTS),
    "failed_assertions",
    "judge_score",
    "judge_reason",
    "recorded_tool_calls",
    "candidate_tool_calls",
    "recorded_text",
    "candidate_text",
)


async def export_replay(replays: Replays, replay: Replay, form: ExportFormat) -> AsyncIterator[bytes]:
    """Yield the parts of a file with all results that exist now."""
    match form:
        case ExportFormat.JSON:
            parts = _write_json(replays, replay)
        case ExportFormat.CSV:
            parts = _write_csv(replays, replay)
        case ExportFormat.PROMPTFOO:
            parts = _write_promptfoo(replays, replay)
    async for part in parts:
        yield part.encode()


async def _write_json(replays: Replays, replay: Replay) -> AsyncIterator[str]:
    """Yield one object, with one result per line."""
    report = await replays.report_replay(replay.tenant_id, replay.id)
    head = f'"replay": {json.dumps(replay_to_json(replay))},\n"report": {json.dumps(report_to_json(report))}'
    yield f'{{{head},\n"results": ['
    separator = ""
    async for full in iterate_full_results(replays, replay):
        yield f"{separator}\n{json.dumps(_full_result_to_json(full))}"
        separator = ","
    yield "\n]}\n"


async def _write_csv(replays: Replays, replay: Replay) -> AsyncIterator[str]:
    yield _write_row(CSV_HEADER)
    async for full in iterate_full_results(replays, replay):
        yield write_csv_row(full)


async def _write_promptfoo(replays: Replays, replay: Replay) -> AsyncIterator[str]:
    """Yield one test per recorded answer, regardless of the number of repetitions."""
    yield "# Tests for promptfoo, for `tests: file://...`. Their variables are `task` and `recorded`.\n"
    count = 0
    async for full in iterate_full_results(replays, replay):
        if full.stored.repetition == 1 and full.stored.result.source_seq is not None:
            count += 1
            yield write_promptfoo_test(full, replay.draft.assertions)
    if not count:
        yield "[]\n"


def write_csv_row(full: FullResult) -> str:
    """Encode one result as a CSV record."""
    stored, result = full.stored, full.stored.result
    return _write_row(
        (
            stored.number,
            stored.conversation_id,
            stored.repetition,
            result.position,
            result.source_seq,
            result.outcome.value,
            " ".join(result.kinds),
            result.similarity,
            result.severity,
            result.note,
            *_facts_of(result.recorded),
            *_facts_of(result.candidate),
            "; ".join(assertion.name for assertion in result.assertions if not assertion.passed),
            None if result.judge is None else result.judge.score,
            None if result.judge is None else result.judge.reason,
            _write_calls(full.recorded),
            _write_calls(full.candidate),
            None if full.recorded is None else full.recorded.text,
            full.candidate.text,
        )
    )


def escape_formula(cell: str) -> str:
    """Escape a text that a spreadsheet would evaluate as a formula."""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def write_promptfoo_test(full: FullResult, assertions: Sequence[Assertion]) -> str:
    """Encode a test case on one line, as JSON, which is valid YAML.

    It compares the answer with the recorded text, if there is one, and with the schemas of the replay. Expressions are
    not exported, because promptfoo's Python assertions have other names.
    """
    expected: list[dict[str, Any]] = []
    if full.recorded is not None and full.recorded.text.strip():
        expected.append({"type": "rouge-n", "value": _escape_template(full.recorded.text), "threshold": 0.75})
    expected += [
        {"type": "is-json", "value": assertion.schema, "metric": _escape_template(assertion.name)}
        for assertion in assertions
        if assertion.schema is not None and assertion.tool_name is None
    ]
    stored = full.stored
    test = {
        "description": f"{stored.conversation_id} turn {stored.result.source_seq}",
        "vars": {
            "task": _escape_template(full.task),
            "recorded": _escape_template("" if full.recorded is None else full.recorded.text),
        },
        "assert": expected,
        "metadata": {
            "conversation_id": stored.conversation_id,
            "turn": stored.result.source_seq,
            "outcome": stored.result.outcome.value,
        },
    }
    return f"- {json.dumps(test)}\n"


def _escape_template(text: str) -> str:
    """Escape a text so that promptfoo's templates render it unchanged."""
    escaped = _TEMPLATE.sub(lambda match: "{{ '" + match.group() + "' }}", text)
    return "{{ '" + _FILE + "' }}" + escaped.removeprefix(_FILE) if escaped.startswith(_FILE) else escaped


def _facts_of(facts: AnswerFacts | None) -> tuple[object, ...]:
    if facts is None:
        return (None,) * len(_FACTS)
    usage = facts.usage
    return (
        None if facts.stop_reason is None else facts.stop_reason.value,
        facts.error_code,
        usage.input_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.output_tokens,
        usage.reasoning_tokens,
        None if facts.cost_usd is None else f"{facts.cost_usd:f}",
        None if facts.cache_share is None else round(facts.cache_share, 4),
        facts.latency_ms,
        facts.first_byte_ms,
    )


def _write_row(values: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow([_cell(value) for value in values])
    return line.getvalue()


def _cell(value: object) -> object:
    """Truncate and escape a cell, and replace lone surrogates, which UTF-8 cannot encode."""
    if not isinstance(value, str):
        return "" if value is None else value
    return escape_formula(value[:_MAX_CELL_CHARS].encode(errors="replace").decode())


def _write_calls(content: AnswerContent | None) -> str:
    return "" if content is None or not content.calls else json.dumps(_calls_to_json(content))


def _full_result_to_json(full: FullResult) -> dict[str, Any]:
    """Encode a result with the task and both answers."""
    return {
        **result_to_json(full.stored),
        "task": full.task,
        "recorded_answer": None if full.recorded is None else _content_to_json(full.recorded),
        "candidate_answer": _content_to_json(full.candidate),
    }


def _content_to_json(content: AnswerContent) -> dict[str, Any]:
    return {"text": content.text, "tool_calls": _calls_to_json(content)}


def _calls_to_json(content: AnswerContent) -> list[dict[str, Any]]:
    """Encode the tool calls of an answer."""
    return [{"name": call.name, "arguments": dict(call.arguments)} for call in content.calls]
