"""The estimate follows the counts that providers report."""

from hypothesis import given
from hypothesis import strategies as st

from server.providers.token_estimate import TokenEstimate


def test_an_unknown_model_is_estimated_rather_too_high() -> None:
    assert TokenEstimate().estimate("m", 4000) >= 1000
    assert TokenEstimate().estimate("m", 0) == 0
    assert TokenEstimate().estimate("m", 1) == 1


@given(st.floats(0.1, 1.0))
def test_a_steady_ratio_is_learned_for_its_model_only(ratio: float) -> None:
    estimate = TokenEstimate()
    for size in range(1000, 40_000, 1000):
        estimate.learn("m", size, round(size * ratio))
    assert abs(estimate.estimate("m", 10_000) - 10_000 * ratio) < 100
    assert estimate.estimate("other", 10_000) == TokenEstimate().estimate("other", 10_000)


def test_one_outlier_does_not_distort_it() -> None:
    estimate = TokenEstimate()
    for _ in range(20):
        estimate.learn("m", 10_000, 2500)
    estimate.learn("m", 10_000, 9000)
    assert estimate.estimate("m", 10_000) < 4000


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.integers(-5, 10**7))))
def test_no_reported_count_breaks_it(reports: list[tuple[int, int]]) -> None:
    estimate = TokenEstimate()
    for size, tokens in reports:
        estimate.learn("m", size, tokens)
    assert 1 <= estimate.estimate("m", 1000) <= 1500
