"""The arithmetic of the capacity page."""

import pytest

from tests.bench.capacity import Cost, Load, compute_need

LOAD = Load(
    turn_seconds=20,
    interval=0.5,
    server_turn_seconds=0.01,
    server_second_seconds=0.001,
    turn=Cost(cpu_seconds=0.002, wal_bytes=5_000, table_bytes=3_000),
    checkpoint=Cost(cpu_seconds=0.0005, wal_bytes=1_000, table_bytes=0),
)


def test_needs_follow_from_the_figures() -> None:
    need = compute_need(LOAD, 1_000)
    # 1,000 streams of 20 s: 50 turns and 1,950 checkpoints per second.
    assert need.turns_per_second == 50
    assert need.server_cores == pytest.approx(50 * 0.01 + 1_000 * 0.001)
    assert need.postgres_cores == pytest.approx(50 * 0.002 + 1_950 * 0.0005)
    assert need.commits_per_second == 150 + 1_950
    assert need.wal_bytes_per_second == pytest.approx(50 * 5_000 + 1_950 * 1_000)
    assert need.stored_bytes_per_day == pytest.approx(50 * 3_000 * 86_400)


def test_needs_grow_with_the_streams() -> None:
    one, ten = compute_need(LOAD, 1_000), compute_need(LOAD, 10_000)
    assert ten.server_cores == pytest.approx(10 * one.server_cores)
    assert ten.postgres_cores == pytest.approx(10 * one.postgres_cores)
