"""Results together with the task and both answers, for pages and exports."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from server.conversation.block import Block, TextBlock
from server.conversation.page import PAGE_LIMIT, Page
from server.replay.rerun.comparison import AnswerContent
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import Replay
from server.replay.rerun.result import AnswerBlocks, AnswerFacts, ResultFilter, StoredResult

_ALL_RESULTS: Final = ResultFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class FullResult:
    """A result with the contents of both answers."""

    stored: StoredResult
    task: str
    """The text of the user task that both answer."""
    recorded: AnswerContent | None
    candidate: AnswerContent


async def list_full_results(
    replays: Replays, replay: Replay, *, wanted: ResultFilter = _ALL_RESULTS, cursor: str | None = None, limit: int = 20
) -> Page[FullResult]:
    """Load a page of results, with a fixed number of queries.

    Results whose source conversation was erased meanwhile are left out. Raises `CursorInvalid`.
    """
    page = await replays.list_results(replay.tenant_id, replay.id, wanted=wanted, cursor=cursor, limit=limit)
    positions = [(stored.number, stored.result.position) for stored in page.items]
    answers = await replays.load_answers(replay.tenant_id, replay.id, positions)
    pairs = zip(page.items, positions, strict=True)
    return Page(
        items=[_join(stored, answers[position]) for stored, position in pairs if position in answers],
        next_cursor=page.next_cursor,
    )


async def iterate_full_results(replays: Replays, replay: Replay) -> AsyncIterator[FullResult]:
    """Yield all results, item by item, with at most one page in memory."""
    cursor: str | None = None
    while True:
        page = await list_full_results(replays, replay, cursor=cursor, limit=PAGE_LIMIT)
        for full in page.items:
            yield full
        cursor = page.next_cursor
        if cursor is None:
            return


def _join(stored: StoredResult, exchanged: AnswerBlocks) -> FullResult:
    return FullResult(
        stored=stored,
        task="".join(block.text for block in exchanged.task if isinstance(block, TextBlock)),
        recorded=None if exchanged.recorded is None else _content(exchanged.recorded, stored.result.recorded),
        candidate=_content(exchanged.candidate, stored.result.candidate),
    )


def _content(blocks: tuple[Block, ...], facts: AnswerFacts | None) -> AnswerContent:
    return AnswerContent(blocks=blocks, stop_reason=None if facts is None else facts.stop_reason)
