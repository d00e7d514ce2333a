"""Replays as numbers. The database counts: a replay of a million answers is no more to carry than one of ten."""

from collections import defaultdict
from typing import Any, Final

from server.identifiers import REPLAY, decode_id
from server.postgres.codec import decode_text
from server.postgres.engine import Database, Statement
from server.postgres.replay_runs import load_replay
from server.replay_report import AssertionCount, Measure, Measured, ReplayReport, Side
from server.replay_result import DivergenceKind, Outcome
from server.replay_statistics import BIN_COUNT, QUANTILES, Distribution, find_interval

_INPUT: Final = (
    "((s.{0}->'usage'->>'fresh_input_tokens')::float8 + (s.{0}->'usage'->>'cache_read_tokens')::float8"
    " + (s.{0}->'usage'->>'cache_write_tokens')::float8)"
)
_VALUES: Final = {
    Measure.INPUT_TOKENS: _INPUT,
    Measure.OUTPUT_TOKENS: (
        "((s.{0}->'usage'->>'output_tokens')::float8 + (s.{0}->'usage'->>'reasoning_tokens')::float8)"
    ),
    Measure.COST_USD: "(s.{0}->>'cost_usd')::float8",
    Measure.CACHE_SHARE: f"((s.{{0}}->'usage'->>'cache_read_tokens')::float8 / nullif({_INPUT}, 0))",
    Measure.LATENCY_MS: "(s.{0}->>'latency_ms')::float8",
}


def _write_values() -> str:
    """What only a candidate has, then pairs: a value counts only where the other side has it too."""
    lines = ["('similarity', s.similarity::float8, NULL::float8)", "('judge_score', (s.judge->>'score')::float8, NULL)"]
    lines += [
        f"('{measure}', {value.format('candidate')}, {value.format('recorded')})" for measure, value in _VALUES.items()
    ]
    return ",\n        ".join(lines)


_MEASURED: Final = f"""
WITH pairs AS (
    SELECT s.repetition, m.measure, m.candidate, m.recorded
    FROM replay_results s CROSS JOIN LATERAL (VALUES
        {_write_values()}
    ) AS m (measure, candidate, recorded)
    WHERE s.replay_id = :replay AND m.candidate IS NOT NULL AND s.outcome <> 'failed'
        AND (m.recorded IS NOT NULL OR m.measure IN ('similarity', 'judge_score'))
), measured AS (
    SELECT repetition, measure, 'candidate' AS side, candidate AS value FROM pairs
    UNION ALL SELECT repetition, measure, 'recorded', recorded FROM pairs WHERE recorded IS NOT NULL
)
"""  # noqa: S608  reason: constants of our own only
_SPREADS: Final = Statement(f"""
{_MEASURED}
SELECT measure, side, count(*) AS count, avg(value) AS mean, min(value) AS least, max(value) AS most,
    percentile_cont(ARRAY[{", ".join(map(str, QUANTILES))}]) WITHIN GROUP (ORDER BY value) AS quantiles
FROM measured GROUP BY measure, side
""")  # noqa: S608  reason: constants of our own only
_MEANS: Final = Statement(f"""
{_MEASURED}
SELECT measure, side, repetition, avg(value) AS mean FROM measured GROUP BY measure, side, repetition
ORDER BY repetition
""")  # noqa: S608  reason: constants of our own only
_BINS: Final = Statement(f"""
{_MEASURED}, spans AS (
    SELECT measure, min(value) AS low, max(value) AS high FROM measured GROUP BY measure
)
SELECT m.measure, m.side, CASE WHEN s.low = s.high THEN 1
    ELSE least(width_bucket(m.value, s.low, s.high, {BIN_COUNT}), {BIN_COUNT}) END AS bin, count(*) AS count
FROM measured m JOIN spans s USING (measure) GROUP BY 1, 2, 3
""")  # noqa: S608  reason: constants of our own only
_OUTCOMES: Final = Statement("""
SELECT outcome, count(*) AS count FROM replay_results WHERE replay_id = :replay GROUP BY outcome
""")
_KINDS: Final = Statement("""
SELECT kind, count(*) AS count FROM replay_results, unnest(kinds) AS kind WHERE replay_id = :replay GROUP BY kind
""")
_ASSERTIONS: Final = Statement("""
SELECT a->>'name' AS name, count(*) FILTER (WHERE (a->>'passed')::boolean) AS passed,
    count(*) FILTER (WHERE NOT (a->>'passed')::boolean) AS failed
FROM replay_results s CROSS JOIN LATERAL jsonb_array_elements(s.assertions) AS a
WHERE s.replay_id = :replay GROUP BY 1 ORDER BY 3 DESC, 1
""")


class PostgresReplayReports:
    """Implements `server.replay_report.ReplayReports`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def report_replay(self, tenant_id: str | None, replay_id: str) -> ReplayReport:
        await load_replay(self._database, tenant_id, replay_id)
        key: dict[str, Any] = {"replay": decode_id(REPLAY, replay_id)}
        outcomes = {decode_text(row["outcome"]): row["count"] for row in await self._database.run(_OUTCOMES, **key)}
        kinds = {decode_text(row["kind"]): row["count"] for row in await self._database.run(_KINDS, **key)}
        assertions = [
            AssertionCount(name=decode_text(row["name"]), passed=row["passed"], failed=row["failed"])
            for row in await self._database.run(_ASSERTIONS, **key)
        ]
        return ReplayReport(
            result_count=sum(outcomes.values()),
            outcomes={outcome: outcomes.get(outcome.value, 0) for outcome in Outcome},
            kinds={kind: kinds.get(kind.value, 0) for kind in DivergenceKind},
            assertions=assertions,
            measures=await self._measure(key),
        )

    async def _measure(self, key: dict[str, Any]) -> list[Measured]:
        means: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for row in await self._database.run(_MEANS, **key):
            means[row["measure"], row["side"]].append(row["mean"])
        bins: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * BIN_COUNT)
        for row in await self._database.run(_BINS, **key):
            bins[row["measure"], row["side"]][row["bin"] - 1] = row["count"]
        spreads = {}
        for row in await self._database.run(_SPREADS, **key):
            place = (row["measure"], row["side"])
            spreads[place] = Distribution(
                count=row["count"],
                mean=row["mean"],
                least=row["least"],
                most=row["most"],
                quantiles=tuple(row["quantiles"]),
                bins=tuple(bins[place]),
                interval=find_interval(means[place]),
            )
        return [
            _put_together(measure, spreads.get((measure.value, Side.RECORDED.value)), found)
            for measure in Measure
            if (found := spreads.get((measure.value, Side.CANDIDATE.value))) is not None
        ]


def _put_together(measure: Measure, recorded: Distribution | None, candidate: Distribution) -> Measured:
    sides = [candidate] if recorded is None else [candidate, recorded]
    return Measured(
        measure=measure,
        low=min(side.least for side in sides),
        high=max(side.most for side in sides),
        recorded=recorded,
        candidate=candidate,
    )
