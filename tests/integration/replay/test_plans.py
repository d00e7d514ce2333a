# ruff: noqa: SLF001  # reason: it looks at the statements themselves
"""Running and showing a replay reads no more rows than necessary, for any number of items and results."""

import re

import pytest

from server.postgres.conversation.erasure import LIVE_ROWS, REPLAY_ROWS
from server.postgres.engine import Database, Statement
from server.postgres.replay import erasure as replay_erasing
from server.postgres.replay import items as replay_items
from server.postgres.replay import results as replay_results
from server.postgres.replay import runs as replay_runs
from server.postgres.replay import spending as replay_spending
from server.postgres.replay import statements as replay_statements
from server.replay.rerun.result import ResultOrder
from tests.integration.postgres.test_plans import explain

ORDERED = {
    "the next that waits": replay_items._FIND_WAITING,
    "the next whose owner died": replay_items._FIND_EXPIRED,
    "items": replay_items._LIST,
    "items in a state": replay_items._LIST_IN_STATE,
    "results": replay_results._statement_for(ResultOrder.POSITION, ()),
    "results of an item": replay_results._statement_for(ResultOrder.POSITION, ("number",)),
    "worst results": replay_results._statement_for(ResultOrder.WORST, ()),
    "worst results of a kind": replay_results._statement_for(ResultOrder.WORST, ("outcome", "kind", "failed")),
    "replays of one": replay_runs._LIST_ONE,
    "replays of all": replay_runs._LIST_ALL,
    "a batch to erase": replay_erasing._LIST_BATCH,
}
BY_KEY = {
    "claim": replay_items._CLAIM,
    "count running": replay_items._COUNT_RUNNING,
    "renew": replay_items._RENEW,
    "lock": replay_statements._LOCK_ITEM,
    "whether anything is open": replay_statements._HAS_OPEN,
    "abandoned": replay_items._LIST_ABANDONED,
    "open work": replay_items._LIST_OPEN,
    "reserve": replay_spending._RESERVE,
    "settle": replay_spending._SETTLE,
    "record": replay_results._RECORD,
    "answers": replay_results._LOAD_ANSWERS,
    "calls of the judge": replay_results._JUDGE_CALLS,
    "outcomes of items": replay_results._COUNT,
    "load": replay_runs._LOAD,
    "find": replay_runs._FIND,
    **{f"erase {name}": statement for name, statement in (*LIVE_ROWS._deletions, *REPLAY_ROWS._deletions)},
}


@pytest.mark.parametrize("name", ORDERED)
async def test_a_page_is_read_in_the_order_of_an_index_and_its_limit_ends_the_scan(
    database: Database, name: str
) -> None:
    plan = await explain(database, ORDERED[name], without=("seqscan", "bitmapscan", "sort", "incremental_sort"))
    assert "Limit" in plan
    assert not re.search(r"Seq Scan|Sort", plan), plan


@pytest.mark.parametrize("name", BY_KEY)
async def test_a_step_of_a_replay_finds_its_rows_by_key(database: Database, name: str) -> None:
    statement: Statement = BY_KEY[name]
    plan = await explain(database, statement)
    assert "Seq Scan" not in plan, plan
    assert "Index" in plan
