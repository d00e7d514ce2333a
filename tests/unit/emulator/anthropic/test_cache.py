"""The cache simulation itself, for cases that a request over HTTP could not show."""

from hypothesis import given
from hypothesis import strategies as st

from server.emulator.anthropic.cache import LOOKBACK_BLOCKS, Link, PromptCache


def chain(*links: tuple[str, int, str | None]) -> list[Link]:
    return [Link(key=key, tokens=tokens, ttl=ttl) for key, tokens, ttl in links]


def test_a_breakpoint_finds_an_entry_whose_own_breakpoint_was_removed() -> None:
    cache = PromptCache()
    cache.commit(cache.plan(chain(("a", 600, "5m")), minimum_tokens=512, now=0))
    usage = cache.plan(chain(("a", 600, None), ("b", 100, "5m")), minimum_tokens=512, now=1).usage
    assert (usage.read_tokens, usage.written_tokens, usage.input_tokens) == (600, 100, 0)


def test_without_a_breakpoint_nothing_is_found() -> None:
    cache = PromptCache()
    cache.commit(cache.plan(chain(("a", 600, "5m")), minimum_tokens=512, now=0))
    assert cache.plan(chain(("a", 600, None)), minimum_tokens=512, now=1).usage.read_tokens == 0


def test_a_plan_that_is_not_committed_leaves_nothing() -> None:
    cache = PromptCache()
    cache.plan(chain(("a", 600, "5m")), minimum_tokens=512, now=0)
    assert cache.plan(chain(("a", 600, "5m")), minimum_tokens=512, now=1).usage.read_tokens == 0


def test_the_time_to_live_counts_from_the_start_of_the_request() -> None:
    cache = PromptCache()
    plan = cache.plan(chain(("a", 600, "5m")), minimum_tokens=512, now=0)
    cache.commit(plan)  # However much later that is.
    assert cache.plan(chain(("a", 600, "5m")), minimum_tokens=512, now=299).usage.read_tokens == 600
    assert cache.plan(chain(("a", 600, "5m")), minimum_tokens=512, now=300).usage.read_tokens == 0


def test_a_hit_also_refreshes_the_entries_before_it() -> None:
    cache = PromptCache()
    whole = chain(("a", 600, "5m"), ("b", 100, "5m"))
    cache.commit(cache.plan(whole, minimum_tokens=512, now=0))
    cache.commit(cache.plan(whole, minimum_tokens=512, now=200))
    assert cache.plan(whole[:1], minimum_tokens=512, now=400).usage.read_tokens == 600


_links = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from([None, None, None, "5m", "1h"])),
    min_size=1,
    max_size=LOOKBACK_BLOCKS * 2,
)


@given(links=_links, known=st.integers(0, 40))
def test_paid_written_and_read_tokens_always_add_up(links: list[tuple[int, str | None]], known: int) -> None:
    cache = PromptCache()
    whole = chain(*((str(number), tokens, ttl) for number, (tokens, ttl) in enumerate(links)))
    cache.commit(cache.plan(whole[:known], minimum_tokens=512, now=0))
    usage = cache.plan(whole, minimum_tokens=512, now=1).usage
    assert usage.total_tokens == sum(link.tokens for link in whole)
    assert min(usage.input_tokens, usage.read_tokens, usage.written_5m_tokens, usage.written_1h_tokens) >= 0
