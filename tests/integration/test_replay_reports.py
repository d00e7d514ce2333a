"""Reports of replays: the database counts what a reader of all results would, and only for whom they are."""

import random
import statistics
from decimal import Decimal

import pytest

from server.api_key import Scope
from server.audit import OPERATOR
from server.block import TextBlock
from server.errors import ReplayNotFound
from server.postgres.replay_reports import PostgresReplayReports
from server.replay import ItemState
from server.replay_report import Measure
from server.replay_result import AnswerFacts, AssertionResult, DivergenceKind, JudgeResult, Outcome, TurnResult
from server.usage import Usage
from tests.builders import create_conversation
from tests.conftest import StrataServer
from tests.page_talk import open_operator
from tests.replay_rig import ReplayRig, draft, result


def facts(luck: random.Random) -> AnswerFacts:
    return AnswerFacts(
        usage=Usage(fresh_input_tokens=luck.randrange(1, 99), cache_read_tokens=luck.randrange(50), output_tokens=3),
        cost_usd=Decimal(luck.randrange(1, 9)) / 1000 if luck.random() < 0.8 else None,
        latency_ms=luck.randrange(9, 999),
    )


def some_result(luck: random.Random, place: int) -> TurnResult:
    outcome = luck.choice(list(Outcome))
    return result(
        place,
        outcome=outcome,
        kinds=(DivergenceKind.TEXT,) if outcome is Outcome.DIFFERENT else (),
        similarity=luck.random() if outcome in {Outcome.SAME, Outcome.DIFFERENT} else None,
        recorded=facts(luck),
        candidate=facts(luck),
        assertions=(AssertionResult(name="it's é", passed=luck.random() < 0.5),),
        judge=JudgeResult(score=luck.random()) if luck.random() < 0.5 else None,
    )


async def test_numbers_are_those_of_all_results(rig: ReplayRig) -> None:
    luck = random.Random(7)  # noqa: S311  reason: the same numbers each time
    replay = await rig.begin(3, repetitions=3)
    written: list[tuple[int, TurnResult]] = []
    for _ in range(replay.item_count):
        claimed = await rig.claim(replay)
        for place in range(1, 6):
            told = some_result(luck, place)
            await rig.replays.record_result(claimed.lease, told, [TextBlock(text="x")])
            written.append((claimed.item.repetition, told))
        await rig.replays.end_item(claimed.lease, ItemState.DONE)
    results = [told for _, told in written]

    reports = PostgresReplayReports(rig.database)
    report = await reports.report_replay(rig.tenant.id, replay.id)
    assert report.outcomes == {outcome: sum(told.outcome is outcome for told in results) for outcome in Outcome}
    assert report.kinds[DivergenceKind.TEXT] == report.outcomes[Outcome.DIFFERENT]
    [count] = report.assertions
    assert (count.name, count.failed) == ("it's é", sum(not told.assertions[0].passed for told in results))
    measured = {found.measure: found for found in report.measures}
    assert set(measured) == set(Measure)

    there = [(number, told) for number, told in written if told.outcome is not Outcome.FAILED]
    costs = [
        (number, float(told.candidate.cost_usd))
        for number, told in there
        if told.candidate
        and told.recorded
        and told.candidate.cost_usd is not None
        and told.recorded.cost_usd is not None
    ]
    cost = measured[Measure.COST_USD]
    assert cost.recorded is not None
    assert cost.candidate.count == cost.recorded.count == len(costs) == sum(cost.candidate.bins)
    assert cost.candidate.mean == pytest.approx(statistics.fmean(value for _, value in costs))
    assert cost.candidate.median == pytest.approx(statistics.median(value for _, value in costs))
    means = [statistics.fmean(value for number, value in costs if number == wanted) for wanted in (1, 2, 3)]
    assert cost.candidate.interval is not None
    assert cost.candidate.interval.low < statistics.fmean(means) < cost.candidate.interval.high
    shares = [told.candidate.cache_share for _, told in there if told.candidate]
    assert measured[Measure.CACHE_SHARE].candidate.mean == pytest.approx(
        statistics.fmean(share for share in shares if share is not None)
    )
    assert measured[Measure.SIMILARITY].recorded is None


async def test_a_replay_without_results_has_a_report_and_no_stranger_gets_one(rig: ReplayRig) -> None:
    replay = await rig.begin()
    reports = PostgresReplayReports(rig.database)
    empty = await reports.report_replay(rig.tenant.id, replay.id)
    assert (empty.result_count, empty.same_share, empty.measures) == (0, None, [])
    with pytest.raises(ReplayNotFound):
        await reports.report_replay("tenant_01jd0z8s3bf6h9kq2m4n6p8r0t", replay.id)


async def test_pages_show_a_replay_to_its_tenant_and_to_super_admins(strata_server: StrataServer) -> None:
    theirs = await strata_server.key_ring.create_tenant("other")
    program, tenant_id = strata_server.program, strata_server.tenant.id
    conversation = await create_conversation(program.store, tenant_id)
    replay = await program.replays.replays.create_replay(tenant_id, draft(), [conversation.id], actor=OPERATOR)
    pages = [f"/admin/replays/{replay.id}{part}" for part in ("", "/progress", "/items/1", "/export", "/delete")]
    for scope, status in ((Scope.ADMIN, 404), (Scope.SUPERADMIN, 200)):
        _, key = await strata_server.key_ring.create_key(
            tenant_id=theirs.id, name="x", scopes=frozenset({scope}), expires_at=None
        )
        async with open_operator(strata_server.url) as operator:
            await operator.log_in(key)
            assert [(await operator.get(page)).status_code for page in pages] == [status] * len(pages), scope
            token = await operator.csrf_token()
            if status == 404:
                posted = await operator.send(f"/admin/replays/{replay.id}/cancel", {"csrf_token": token})
                assert posted.status_code == 404
            assert (await operator.get(f"/admin/replays/{replay.id}/frobnicate")).status_code == 404
