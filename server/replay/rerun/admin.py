"""Results with what was said, read for people and for files."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from server.conversation.block import Block, TextBlock
from server.conversation.page import PAGE_LIMIT, Page
from server.replay.rerun.comparison import Said
from server.replay.rerun.export import (
    ExportFormat,
    FullResult,
    result_to_json,
    write_csv_header,
    write_csv_row,
    write_promptfoo_test,
)
from server.replay.rerun.json import to_json
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import Replay
from server.replay.rerun.report import ReplayReport, ReplayReports
from server.replay.rerun.result import AnswerFacts, Exchanged, ResultFilter, StoredResult
from server.replay.rerun.service import ReplayService

_EVERYTHING: Final = ResultFilter()


class ReplayReader:
    """Puts the candidate's answers beside the recorded ones: a few queries a page, however many answers it has."""

    def __init__(self, replays: Replays) -> None:
        self._replays = replays

    async def list_full(
        self, replay: Replay, *, wanted: ResultFilter = _EVERYTHING, cursor: str | None = None, limit: int = 20
    ) -> Page[FullResult]:
        """A page of results. Those whose source is erased meanwhile are left out. Raises `CursorInvalid`."""
        page = await self._replays.list_results(replay.tenant_id, replay.id, wanted=wanted, cursor=cursor, limit=limit)
        places = [(stored.number, stored.result.place) for stored in page.items]
        said = await self._replays.load_answers(replay.tenant_id, replay.id, places)
        pairs = zip(page.items, places, strict=True)
        filled = [_put_together(stored, said[place]) for stored, place in pairs if place in said]
        return Page(items=filled, next_cursor=page.next_cursor)

    async def walk(self, replay: Replay) -> AsyncIterator[FullResult]:
        """All of them, item by item, never more than a page in memory."""
        cursor: str | None = None
        while True:
            page = await self.list_full(replay, cursor=cursor, limit=PAGE_LIMIT)
            for full in page.items:
                yield full
            cursor = page.next_cursor
            if cursor is None:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAdmin:
    """All that operators use of replays."""

    replays: Replays
    service: ReplayService
    reports: ReplayReports
    reader: ReplayReader

    async def export(self, replay: Replay, form: ExportFormat) -> AsyncIterator[bytes]:
        """A file, piece by piece, of the results that are there."""
        match form:
            case ExportFormat.JSON:
                report = await self.reports.report_replay(replay.tenant_id, replay.id)
                pieces = _write_json(replay, report, self.reader.walk(replay))
            case ExportFormat.CSV:
                pieces = _write_csv(self.reader.walk(replay))
            case ExportFormat.PROMPTFOO:
                pieces = _write_promptfoo(replay, self.reader.walk(replay))
        async for piece in pieces:
            yield piece.encode()


def _put_together(stored: StoredResult, exchanged: Exchanged) -> FullResult:
    return FullResult(
        stored=stored,
        task="".join(block.text for block in exchanged.task if isinstance(block, TextBlock)),
        recorded=None if exchanged.recorded is None else _said(exchanged.recorded, stored.result.recorded),
        candidate=_said(exchanged.candidate, stored.result.candidate),
    )


def _said(blocks: tuple[Block, ...], facts: AnswerFacts | None) -> Said:
    return Said(blocks=blocks, stop_reason=None if facts is None else facts.stop_reason)


async def _write_json(replay: Replay, report: ReplayReport, results: AsyncIterator[FullResult]) -> AsyncIterator[str]:
    """One object, a result a line."""
    told = {"same_share": report.same_share, **dict(to_json(report))}
    yield f'{{"replay": {json.dumps(to_json(replay))},\n"report": {json.dumps(told)},\n"results": ['
    is_first = True
    async for full in results:
        yield f"{'' if is_first else ','}\n{json.dumps(result_to_json(full))}"
        is_first = False
    yield "\n]}\n"


async def _write_csv(results: AsyncIterator[FullResult]) -> AsyncIterator[str]:
    yield write_csv_header()
    async for full in results:
        yield write_csv_row(full)


async def _write_promptfoo(replay: Replay, results: AsyncIterator[FullResult]) -> AsyncIterator[str]:
    """Of each recorded answer one test, however often it was repeated."""
    yield "# Tests for promptfoo, for `tests: file://...`. Their variables are `task` and `recorded`.\n"
    count = 0
    async for full in results:
        if full.stored.repetition == 1 and full.stored.result.source_seq is not None:
            count += 1
            yield write_promptfoo_test(full, replay.draft.assertions)
    if not count:
        yield "[]\n"
