"""Results with what was said, read for people and for files."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from server.block import TextBlock
from server.errors import ConversationNotFound
from server.page import PAGE_LIMIT, Page
from server.replay import Replay
from server.replay_comparison import Said
from server.replay_export import (
    ExportFormat,
    FullResult,
    result_to_json,
    write_csv_header,
    write_csv_row,
    write_promptfoo_test,
)
from server.replay_json import to_json
from server.replay_report import ReplayReport, ReplayReports
from server.replay_result import ResultFilter, StoredResult
from server.replay_service import ReplayService
from server.replay_source import list_turns
from server.replays import Replays
from server.store import Store
from server.turn import ModelResponseTurn, Turn, UserTaskTurn

_EVERYTHING: Final = ResultFilter()


class ReplayReader:
    """Puts the candidate's answers beside the recorded ones."""

    def __init__(self, replays: Replays, store: Store) -> None:
        self._replays = replays
        self._store = store

    async def list_full(
        self, replay: Replay, *, wanted: ResultFilter = _EVERYTHING, cursor: str | None = None, limit: int = 20
    ) -> Page[FullResult]:
        """A page of results. Those whose source is erased meanwhile are left out. Raises `CursorInvalid`."""
        page = await self._replays.list_results(replay.tenant_id, replay.id, wanted=wanted, cursor=cursor, limit=limit)
        return Page(items=await self._fill(replay, page.items), next_cursor=page.next_cursor)

    async def walk(self, replay: Replay) -> AsyncIterator[FullResult]:
        """All of them, item by item."""
        cursor: str | None = None
        while True:
            page = await self.list_full(replay, cursor=cursor, limit=PAGE_LIMIT)
            for full in page.items:
                yield full
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _fill(self, replay: Replay, results: Sequence[StoredResult]) -> list[FullResult]:
        sources: dict[str, Sequence[Turn] | None] = {}
        filled = []
        for stored in results:
            source = stored.conversation_id
            if source not in sources:
                sources[source] = await self._find_turns(replay.tenant_id, source)
            turns = sources[source]
            if turns is not None:
                filled.append(await self._put_together(replay, stored, turns))
        return filled

    async def _find_turns(self, tenant_id: str, conversation_id: str) -> Sequence[Turn] | None:
        try:
            return await list_turns(self._store, tenant_id, conversation_id)
        except ConversationNotFound:
            return None

    async def _put_together(self, replay: Replay, stored: StoredResult, turns: Sequence[Turn]) -> FullResult:
        result = stored.result
        blocks = await self._replays.load_answer(replay.tenant_id, replay.id, stored.number, result.place)
        answer = next((turn for turn in turns if turn.seq == result.source_seq), None)
        return FullResult(
            stored=stored,
            task=_find_task(turns, result.source_seq),
            recorded=_said_by(answer) if isinstance(answer, ModelResponseTurn) else None,
            candidate=Said(
                blocks=blocks, stop_reason=None if result.candidate is None else result.candidate.stop_reason
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDesk:
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


def _find_task(turns: Sequence[Turn], seq: int | None) -> str:
    """What the user had asked before this answer; the last task where the candidate went on alone."""
    tasks = [turn for turn in turns if isinstance(turn, UserTaskTurn) and (seq is None or turn.seq < seq)]
    return "".join(block.text for block in tasks[-1].blocks if isinstance(block, TextBlock)) if tasks else ""


def _said_by(turn: ModelResponseTurn) -> Said:
    return Said(blocks=turn.blocks, stop_reason=turn.stop_reason)


async def _write_json(replay: Replay, report: ReplayReport, results: AsyncIterator[FullResult]) -> AsyncIterator[str]:
    """One object, a result a line."""
    yield f'{{"replay": {json.dumps(to_json(replay))},\n"report": {json.dumps(to_json(report))},\n"results": ['
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
