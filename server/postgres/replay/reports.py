"""The reports of replays, computed by the database: no result is loaded."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from server.conversation.identifiers import REPLAY, decode_id
from server.postgres.codec import decode_text
from server.postgres.engine import Statement
from server.postgres.replay.runs import ReplayRuns
from server.postgres.rows import Row
from server.replay.rerun.report import (
    BIN_COUNT,
    QUANTILES,
    AssertionCount,
    Distribution,
    Measure,
    Measured,
    ReplayReport,
    Side,
    find_interval,
)
from server.replay.rerun.result import DivergenceKind, Outcome

_USAGE: Final = "(s.{0}->'usage'->>'{1}')::float8"
_INPUT: Final = ("fresh_input_tokens", "cache_read_tokens", "cache_write_tokens")
_OUTPUT: Final = ("output_tokens", "reasoning_tokens")
_PAIRED: Final = (
    Measure.INPUT_TOKENS,
    Measure.OUTPUT_TOKENS,
    Measure.COST_USD,
    Measure.CACHE_SHARE,
    Measure.LATENCY_MS,
)
"""Measures of both the recorded and the candidate's answers."""
_SERIES: Final = (
    *((measure, Side.CANDIDATE) for measure in Measure),
    *((measure, Side.RECORDED) for measure in _PAIRED),
)


def _write_known(side: Side) -> str:
    """Write the columns of one side, each read from its JSON once."""
    sums = {
        Measure.INPUT_TOKENS: " + ".join(_USAGE.format(side, name) for name in _INPUT),
        Measure.OUTPUT_TOKENS: " + ".join(_USAGE.format(side, name) for name in _OUTPUT),
        Measure.COST_USD: f"(s.{side}->>'cost_usd')::float8",
        Measure.CACHE_SHARE: _USAGE.format(side, "cache_read_tokens"),
        Measure.LATENCY_MS: f"(s.{side}->>'latency_ms')::float8",
    }
    return ", ".join(f"{value} AS {_name(measure, side)}" for measure, value in sums.items())


def _name(measure: Measure, side: Side) -> str:
    return f"{measure}_{side}"


def _write_paired(measure: Measure, side: Side) -> str:
    """Write a column that is null unless the other side has a value too."""
    other = Side.CANDIDATE if side is Side.RECORDED else Side.RECORDED
    mine = _name(measure, side)
    if measure is Measure.CACHE_SHARE:
        # Without input there is no share.
        total, others = _name(Measure.INPUT_TOKENS, side), _name(Measure.INPUT_TOKENS, other)
        return f"CASE WHEN {others} > 0 THEN {mine} / nullif({total}, 0) END AS {mine}"
    return f"CASE WHEN {_name(measure, other)} IS NOT NULL THEN {mine} END AS {mine}"


_NUMBERS: Final = f"""
WITH known AS MATERIALIZED (
    SELECT s.repetition, s.similarity::float8 AS {_name(Measure.SIMILARITY, Side.CANDIDATE)},
        (s.judge->>'score')::float8 AS {_name(Measure.JUDGE_SCORE, Side.CANDIDATE)},
        {", ".join(map(_write_known, Side))}
    FROM replay_results s WHERE s.replay_id = :replay AND s.outcome <> 'failed'
), numbers AS (
    SELECT repetition, {_name(Measure.SIMILARITY, Side.CANDIDATE)}, {_name(Measure.JUDGE_SCORE, Side.CANDIDATE)},
        {", ".join(_write_paired(measure, side) for measure in _PAIRED for side in Side)}
    FROM known
)
"""  # noqa: S608  reason: constants of our own only


def _write_spread(measure: Measure, side: Side) -> str:
    column = _name(measure, side)
    quantiles = ", ".join(map(str, QUANTILES))
    return (
        f"count({column}) AS {column}_count, avg({column}) AS {column}_mean, min({column}) AS {column}_least,"
        f" max({column}) AS {column}_most,"
        f" percentile_cont(ARRAY[{quantiles}]) WITHIN GROUP (ORDER BY {column}) AS {column}_quantiles"
    )


# Each measure is a column, not a row: otherwise all values would be sorted by the names of their measures.
_SPREADS: Final = Statement(f"""
{_NUMBERS}
SELECT repetition, {", ".join(_write_spread(*series) for series in _SERIES)}
FROM numbers GROUP BY GROUPING SETS ((), (repetition)) ORDER BY repetition NULLS FIRST
""")  # noqa: S608  reason: constants of our own only
_BINS: Final = Statement(f"""
{_NUMBERS}, series AS (
    SELECT v.index, v.value, (:lows::float8[])[v.index] AS low, (:highs::float8[])[v.index] AS high
    FROM numbers CROSS JOIN LATERAL (VALUES
        {", ".join(f"({index}, {_name(*series)})" for index, series in enumerate(_SERIES, start=1))}
    ) AS v (index, value)
    WHERE v.value IS NOT NULL
)
SELECT index, CASE WHEN low < high THEN greatest(1, least(width_bucket(value, low, high, {BIN_COUNT}), {BIN_COUNT}))
    ELSE 1 END AS bin, count(*) AS count
FROM series GROUP BY 1, 2
""")  # noqa: S608  reason: constants of our own only
_OUTCOMES: Final = Statement("""
SELECT outcome, count(*) AS count FROM replay_results WHERE replay_id = :replay GROUP BY outcome
""")
# Incomplete repetitions contain other conversations than complete ones, so their means cannot be compared.
_INCOMPLETE: Final = Statement("""
SELECT DISTINCT repetition FROM replay_items WHERE replay_id = :replay AND state NOT IN ('done', 'failed')
""")
_SAME_SHARES: Final = Statement("""
SELECT repetition, avg((outcome = 'same')::int)::float8 AS share FROM replay_results
WHERE replay_id = :replay AND outcome IN ('same', 'different') GROUP BY repetition ORDER BY repetition
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


class ReplayReports(ReplayRuns):
    """Reports need the same memory for ten results and for a million."""

    async def report_replay(self, tenant_id: str | None, replay_id: str) -> ReplayReport:
        await self._require_replay(tenant_id, replay_id)
        key: dict[str, Any] = {"replay": decode_id(REPLAY, replay_id)}
        outcomes = {decode_text(row["outcome"]): row["count"] for row in await self._database.run(_OUTCOMES, **key)}
        kinds = {decode_text(row["kind"]): row["count"] for row in await self._database.run(_KINDS, **key)}
        assertions = [
            AssertionCount(name=decode_text(row["name"]), passed=row["passed"], failed=row["failed"])
            for row in await self._database.run(_ASSERTIONS, **key)
        ]
        incomplete = {row["repetition"] for row in await self._database.run(_INCOMPLETE, **key)}
        shares = await self._database.run(_SAME_SHARES, **key)
        return ReplayReport(
            result_count=sum(outcomes.values()),
            outcomes={outcome: outcomes.get(outcome.value, 0) for outcome in Outcome},
            kinds={kind: kinds.get(kind.value, 0) for kind in DivergenceKind},
            assertions=assertions,
            measures=await self._measure(key, incomplete),
            same_interval=find_interval(
                [row["share"] for row in shares if row["repetition"] not in incomplete], is_share=True
            ),
        )

    async def _measure(self, key: dict[str, Any], incomplete: set[int]) -> list[Measured]:
        whole, *parts = await self._database.run(_SPREADS, **key)
        repetitions = [row for row in parts if row["repetition"] not in incomplete]
        spans = {measure: _span_of(whole, measure) for measure in Measure}
        bins: defaultdict[int, list[int]] = defaultdict(lambda: [0] * BIN_COUNT)
        ends = [spans[measure] for measure, _ in _SERIES]
        lows, highs = [low for low, _ in ends], [high for _, high in ends]
        for row in await self._database.run(_BINS, lows=lows, highs=highs, **key):
            bins[row["index"]][row["bin"] - 1] = row["count"]
        spreads = {
            series: _spread_of(whole, repetitions, *series, bins[index])
            for index, series in enumerate(_SERIES, start=1)
            if whole[f"{_name(*series)}_count"]
        }
        return [
            Measured(
                measure=measure,
                low=spans[measure][0],
                high=spans[measure][1],
                recorded=spreads.get((measure, Side.RECORDED)),
                candidate=found,
            )
            for measure in Measure
            if (found := spreads.get((measure, Side.CANDIDATE))) is not None
        ]


def _span_of(whole: Row, measure: Measure) -> tuple[float, float]:
    """Return the minimum and the maximum of both sides together; 0 and 0 without values."""
    names = [_name(*series) for series in _SERIES if series[0] is measure]
    known = [name for name in names if whole[f"{name}_count"]]
    least, most = (whole[f"{name}_least"] for name in known), (whole[f"{name}_most"] for name in known)
    return min(least, default=0.0), max(most, default=0.0)


def _spread_of(
    whole: Row, repetitions: Sequence[Row], measure: Measure, side: Side, bins: Sequence[int]
) -> Distribution:
    name = _name(measure, side)
    means = [row[f"{name}_mean"] for row in repetitions if row[f"{name}_count"]]
    return Distribution(
        count=whole[f"{name}_count"],
        mean=whole[f"{name}_mean"],
        least=whole[f"{name}_least"],
        most=whole[f"{name}_most"],
        quantiles=tuple(whole[f"{name}_quantiles"]),
        bins=tuple(bins),
        interval=None if side is Side.RECORDED else find_interval(means, is_share=measure.is_share),
    )
