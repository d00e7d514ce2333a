"""Reports of replays: the database computes what a reader of all results would, for the right tenant only."""

import html
import random
import re
import statistics
from collections.abc import Callable
from decimal import Decimal

import pytest

from server.conversation.api_key import Scope
from server.conversation.audit import OPERATOR
from server.conversation.block import TextBlock
from server.conversation.call import Call
from server.conversation.errors import ReplayNotFound
from server.conversation.usage import Usage
from server.postgres.replay.replays import PostgresReplays
from server.postgres.store import PostgresStore
from server.replay.rerun.full_results import iterate_full_results
from server.replay.rerun.replay import ItemState
from server.replay.rerun.report import Distribution, Interval, Measure
from server.replay.rerun.result import AnswerFacts, AssertionResult, DivergenceKind, JudgeResult, Outcome, TurnResult
from tests.bench.inspection_rows import WatchedDatabase
from tests.conftest import StrataServer
from tests.support.builders import call_end, call_start, create_conversation
from tests.support.page_driver import open_operator
from tests.support.replay_builders import ReplayHarness, draft, result


def facts(luck: random.Random) -> AnswerFacts:
    return AnswerFacts(
        usage=Usage(fresh_input_tokens=luck.randrange(1, 99), cache_read_tokens=luck.randrange(50), output_tokens=3),
        cost_usd=Decimal(luck.randrange(1, 9)) / 1000 if luck.random() < 0.8 else None,
        latency_ms=luck.randrange(9, 999),
    )


def some_result(luck: random.Random, position: int) -> TurnResult:
    outcome = luck.choice(list(Outcome))
    return result(
        position,
        outcome=outcome,
        kinds=(DivergenceKind.TEXT,) if outcome is Outcome.DIFFERENT else (),
        similarity=luck.random() if outcome in {Outcome.SAME, Outcome.DIFFERENT} else None,
        recorded=facts(luck),
        candidate=facts(luck),
        assertions=(AssertionResult(name="it's é", passed=luck.random() < 0.5),),
        judge=JudgeResult(score=luck.random()) if luck.random() < 0.5 else None,
    )


FACTS: dict[Measure, Callable[[AnswerFacts], float | None]] = {
    Measure.INPUT_TOKENS: lambda facts: facts.usage.fresh_input_tokens + facts.usage.cache_read_tokens,
    Measure.OUTPUT_TOKENS: lambda facts: facts.usage.output_tokens + facts.usage.reasoning_tokens,
    Measure.COST_USD: lambda facts: None if facts.cost_usd is None else float(facts.cost_usd),
    Measure.CACHE_SHARE: lambda facts: (
        facts.usage.cache_read_tokens / (facts.usage.fresh_input_tokens + facts.usage.cache_read_tokens)
    ),
    Measure.LATENCY_MS: lambda facts: facts.latency_ms,
}
STUDENT = 4.302653
"""The 97.5 % quantile with two degrees of freedom, from a printed table."""


def values_of(measure: Measure, turn_result: TurnResult) -> tuple[float | None, float | None]:
    """The values of the candidate and of the recording, computed without the code under test."""
    if measure is Measure.SIMILARITY:
        return turn_result.similarity, None
    if measure is Measure.JUDGE_SCORE:
        return None if turn_result.judge is None else turn_result.judge.score, None
    assert turn_result.candidate is not None
    assert turn_result.recorded is not None
    return FACTS[measure](turn_result.candidate), FACTS[measure](turn_result.recorded)


def check_distribution(found: Distribution, values: list[float], low: float, high: float) -> None:
    assert (found.count, found.least, found.most) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values))
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    assert found.quantiles == pytest.approx([cuts[position] for position in (0, 4, 9, 14, 18)])
    bins = [0] * 16
    for value in values:
        bins[min(int((value - low) / (high - low) * 16), 15) if high > low else 0] += 1
    assert list(found.bins) == bins


def check_interval(found: Interval | None, means: list[float], *, is_share: bool) -> None:
    assert found is not None
    half = STUDENT * statistics.stdev(means) / len(means) ** 0.5
    middle = statistics.fmean(means)
    high = min(middle + half, 1) if is_share else middle + half
    assert (found.low, found.high) == pytest.approx((max(middle - half, 0), high), rel=1e-4, abs=1e-6)


async def test_the_numbers_are_those_of_all_results(harness: ReplayHarness) -> None:
    luck = random.Random(7)  # noqa: S311  reason: the same numbers each time
    replay = await harness.begin(3, repetitions=3)
    written: list[tuple[int, TurnResult]] = []
    for _ in range(replay.item_count):
        claimed = await harness.claim(replay)
        for position in range(1, 6):
            turn_result = some_result(luck, position)
            await harness.replays.record_result(claimed.lease, turn_result, [TextBlock(text="x")])
            written.append((claimed.item.repetition, turn_result))
        await harness.replays.end_item(claimed.lease, ItemState.DONE)
    results = [turn_result for _, turn_result in written]

    report = await harness.replays.report_replay(harness.tenant.id, replay.id)
    assert report.outcomes == {
        outcome: sum(turn_result.outcome is outcome for turn_result in results) for outcome in Outcome
    }
    assert report.kinds[DivergenceKind.TEXT] == report.outcomes[Outcome.DIFFERENT]
    [count] = report.assertions
    assert (count.name, count.failed) == (
        "it's é",
        sum(not turn_result.assertions[0].passed for turn_result in results),
    )
    assert [found.measure for found in report.measures] == list(Measure)
    for found in report.measures:
        there = [
            (number, *values_of(found.measure, turn_result))
            for number, turn_result in written
            if turn_result.outcome is not Outcome.FAILED
        ]
        alone = found.measure not in FACTS
        pairs = [
            (number, candidate, recorded)
            for number, candidate, recorded in there
            if candidate is not None and (alone or recorded is not None)
        ]
        recorded = [value for _, _, value in pairs if value is not None]
        candidate = [value for _, value, _ in pairs]
        low, high = min(candidate + recorded), max(candidate + recorded)
        assert (found.low, found.high) == (low, high)
        check_distribution(found.candidate, candidate, low, high)
        by_repetition = [[value for number, value, _ in pairs if number == wanted] for wanted in (1, 2, 3)]
        is_share = found.measure in {Measure.SIMILARITY, Measure.JUDGE_SCORE, Measure.CACHE_SHARE}
        means = [statistics.fmean(values) for values in by_repetition]
        check_interval(found.candidate.interval, means, is_share=is_share)
        if alone:
            assert found.recorded is None
        else:
            assert found.recorded is not None
            assert found.recorded.interval is None
            check_distribution(found.recorded, recorded, low, high)
    compared = {
        wanted: [
            turn_result.outcome is Outcome.SAME
            for number, turn_result in written
            if number == wanted and turn_result.outcome in {Outcome.SAME, Outcome.DIFFERENT}
        ]
        for wanted in (1, 2, 3)
    }
    assert report.same_share == pytest.approx(statistics.fmean(flag for flags in compared.values() for flag in flags))
    check_interval(report.same_interval, [statistics.fmean(flags) for flags in compared.values()], is_share=True)


async def test_an_incomplete_repetition_is_left_out_of_the_confidence_interval(harness: ReplayHarness) -> None:
    replay = await harness.begin(2, repetitions=2)
    for latency in (10, 20, 11, 23):
        claimed = await harness.claim(replay)
        turn_result = result(1, candidate=AnswerFacts(latency_ms=latency), recorded=AnswerFacts(latency_ms=15))
        await harness.replays.record_result(claimed.lease, turn_result, [TextBlock(text="x")])
        # Three of four: the mean of the second repetition would be that of another conversation only.
        report = await harness.replays.report_replay(harness.tenant.id, replay.id)
        [measured] = [found for found in report.measures if found.measure is Measure.LATENCY_MS]
        assert (measured.candidate.interval, report.same_interval) == (None, None)
        await harness.replays.end_item(claimed.lease, ItemState.DONE)
    report = await harness.replays.report_replay(harness.tenant.id, replay.id)
    [measured] = [found for found in report.measures if found.measure is Measure.LATENCY_MS]
    assert measured.candidate.interval is not None
    assert measured.candidate.mean == 16
    assert report.same_interval == Interval(low=1.0, high=1.0)


async def test_a_replay_without_results_has_a_report_and_another_tenant_gets_none(harness: ReplayHarness) -> None:
    replay = await harness.begin()
    empty = await harness.replays.report_replay(harness.tenant.id, replay.id)
    assert (empty.result_count, empty.same_share, empty.measures) == (0, None, [])
    with pytest.raises(ReplayNotFound):
        await harness.replays.report_replay("tenant_01jd0z8s3bf6h9kq2m4n6p8r0t", replay.id)


async def test_an_export_queries_by_the_page_and_not_by_the_answer(harness: ReplayHarness) -> None:
    watched = WatchedDatabase(harness.database.options)
    replays = PostgresReplays(watched, harness.replay_store)
    needed = []
    for item_count, answer_count in ((1, 3), (10, 6), (11, 10)):
        replay = await harness.begin(item_count)
        for _ in range(item_count):
            claimed = await harness.claim(replay)
            for position in range(1, answer_count + 1):
                await harness.replays.record_result(claimed.lease, result(position), [TextBlock(text=f"{position}")])
            await harness.replays.end_item(claimed.lease, ItemState.DONE)
        watched.queries = 0
        read = [full async for full in iterate_full_results(replays, replay)]
        needed.append(watched.queries)
        assert [full.candidate.text for full in read] == [f"{n}" for n in range(1, answer_count + 1)] * item_count
        assert {full.task for full in read} == {"Hello"}
        assert {full.stored.result.position for full in read if full.recorded is not None} == {1}
    await watched.close()
    # A page of three answers, one of sixty from ten conversations, and two pages.
    assert needed == [needed[0], needed[0], 2 * needed[0]]


async def test_a_verdict_leads_to_the_call_that_gave_it(harness: ReplayHarness) -> None:
    replay = await harness.begin()
    replay_conversation = await harness.replay_conversation((await harness.claim(replay)).lease)
    # The first position at the second attempt, the second at none, the third before and after a compaction.
    made = ((-1, 1, 1, "x"), (-1, 2, 1, None), (-1, 3, 2, "x"), (-1, 4, 2, "x"), (-1, 5, 3, None), (-2, 1, 3, None))
    for turn_seq, attempt, position, error in made:
        note = {"kind": "judge", "position": position, "question": "?"}
        start = call_start(attempt=attempt, epoch=-turn_seq, warnings=({"kind": "other", "position": "x"}, note))
        call = Call(turn_seq=turn_seq, start=start, end=call_end(error_code=error))
        await PostgresStore(harness.replay_store).record_call(harness.tenant.id, replay_conversation.id, call)
    find = harness.replays.find_judge_calls
    assert await find(harness.tenant.id, replay.id, 1, [1, 2, 3, 4]) == {1: (-1, 2), 2: (-1, 4), 3: (-2, 1)}
    assert await find(harness.tenant.id, replay.id, 1, [2]) == {2: (-1, 4)}
    assert await find("tenant_01jd0z8s3bf6h9kq2m4n6p8r0t", replay.id, 1, [1]) == {}


async def test_pages_show_a_replay_to_its_tenant_and_to_super_admins(strata_server: StrataServer) -> None:
    theirs = await strata_server.key_ring.create_tenant("other")
    program, tenant_id = strata_server.program, strata_server.tenant.id
    conversation = await create_conversation(program.store, tenant_id)
    many = draft(limits={"repetitions": 52})
    replay = await program.replays.replays.create_replay(tenant_id, many, [conversation.id], actor=OPERATOR)
    pages = [
        f"/admin/replays/{replay.id}{part}"
        for part in ("", "/progress", "/items", "/items?state=waiting", "/items/1", "/export", "/delete")
    ]
    for scope, status in ((Scope.ADMIN, 404), (Scope.SUPERADMIN, 200)):
        _, key = await strata_server.key_ring.create_key(
            tenant_id=theirs.id, name="x", scopes=frozenset({scope}), expires_at=None
        )
        async with open_operator(strata_server.url) as operator:
            await operator.log_in(key)
            assert [(await operator.get(page)).status_code for page in pages[:-1]] == [status] * (len(pages) - 1), scope
            # A superadmin can read but not delete objects of another tenant.
            assert (await operator.get(pages[-1])).status_code == (404 if status == 404 else 403)
            token = await operator.csrf_token()
            if status == 404:
                posted = await operator.send(f"/admin/replays/{replay.id}/cancel", {"csrf_token": token})
                assert posted.status_code == 404
            unknown = await operator.get(f"/admin/replays/{replay.id}/frobnicate")
            assert unknown.status_code == (404 if status == 404 else 403)
            if status == 200:
                link = re.search(r'rel="next" href="([^"]+)"', (await operator.get(pages[3])).text)
                assert link is not None
                behind = (await operator.get(html.unescape(link[1]))).text
                assert re.findall(r">Item (\d+)<", behind) == ["51", "52"]
                assert "state=waiting" in link[1]
                assert (await operator.get(f"{pages[2]}?cursor=nonsense")).status_code == 400
