"""How much a call should read from the cache, and why it read less."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.caching.expectation import CacheExpectation, MissReason, Request, expect_cache_read, explain_miss
from server.conversation.call import CallTrace
from server.conversation.payload import Layer, LayerOrder, ManifestEntry
from server.conversation.usage import Usage
from server.providers.model_profile import find_profile

CLAUDE = find_profile("anthropic", "claude-opus-5-5")
GEMINI = find_profile("gemini", "gemini-3.8-flash")
STARTED = datetime(2026, 11, 16, 12, tzinfo=UTC)
ASKED = {"cache_seconds": 300, "static_cache_seconds": 3600}


def block(name: str, length: int = 1_000, *, layer: Layer = Layer.BUFFERED, marked: bool = False) -> ManifestEntry:
    kind = {Layer.STATIC: "static", Layer.DYNAMIC: "dynamic"}.get(layer, "message")
    return ManifestEntry(layer=layer, kind=kind, role="user", hash=name, length=length, seq=None, marked=marked)


STATIC = block("static", 8_000, layer=Layer.STATIC, marked=True)
FIRST, ANSWER, SECOND = (block(name, marked=True) for name in ("first", "answer", "second"))


def request(*blocks: ManifestEntry, **changes: Any) -> Request:
    values: dict[str, Any] = {
        "provider": "anthropic",
        "model": CLAUDE.model,
        "account": "a",
        "order": LayerOrder.APPEND_ONLY,
        "prefix_hash": b"p",
        "manifest": blocks,
    }
    return Request(**values | changes)


def trace(usage: Usage, caching: Mapping[str, Any] = ASKED) -> CallTrace:
    return CallTrace(
        provider="anthropic",
        model=CLAUDE.model,
        account="a",
        started_at=STARTED,
        usage=usage,
        response_id="msg_1",
        caching=caching,
    )


BEFORE = request(STATIC, FIRST)
USAGE = Usage(cache_read_tokens=2_000, cache_write_tokens=250)
NEXT = request(STATIC, FIRST, ANSWER, SECOND)


def expect(
    current: Request = NEXT, *, previous: Request = BEFORE, usage: Usage = USAGE, elapsed: float = 60
) -> CacheExpectation:
    return expect_cache_read(previous, trace(usage), current, CLAUDE, elapsed_seconds=elapsed)


def test_everything_that_the_previous_call_cached_is_expected() -> None:
    assert expect() == CacheExpectation(tokens=2_250, possible_tokens=2_250)


def test_the_first_call_expects_nothing() -> None:
    assert expect_cache_read(None, None, NEXT, CLAUDE, elapsed_seconds=0) == CacheExpectation()


def test_nothing_is_expected_after_a_call_without_an_answer() -> None:
    assert expect(usage=Usage()) == CacheExpectation(tokens=None)


@pytest.mark.parametrize(
    ("elapsed", "tokens", "reason"),
    [(300, 2_250, None), (301, 2_000, MissReason.TTL_EXPIRED), (3601, 0, MissReason.TTL_EXPIRED)],
)
def test_messages_expire_before_the_static_text(elapsed: float, tokens: int, reason: MissReason | None) -> None:
    assert expect(elapsed=elapsed) == CacheExpectation(tokens=tokens, possible_tokens=2_250, reason=reason)


def test_a_changed_block_leaves_the_blocks_before_it_cached() -> None:
    current = request(STATIC, replace(FIRST, hash="edited"), ANSWER)
    assert expect(current) == CacheExpectation(tokens=2_000, possible_tokens=2_250, reason=MissReason.PREFIX_BREAK)


def test_a_new_epoch_is_a_reason_of_its_own() -> None:
    current = request(replace(STATIC, hash="compacted"), SECOND, prefix_hash=b"q")
    assert expect(current) == CacheExpectation(possible_tokens=2_250, reason=MissReason.EPOCH_BEGAN)


def test_a_new_signed_summary_leaves_the_static_text_and_is_not_a_broken_prefix() -> None:
    current = request(STATIC, replace(FIRST, kind="signed_summary", hash="signed"), SECOND)
    assert expect(current) == CacheExpectation(tokens=2_000, possible_tokens=2_250, reason=MissReason.EPOCH_BEGAN)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "claude-fable-5-2"}, MissReason.MODEL_CHANGED),
        ({"provider": "gemini"}, MissReason.MODEL_CHANGED),
        ({"account": "b"}, MissReason.ACCOUNT_CHANGED),
    ],
)
def test_another_model_or_account_has_another_cache(changes: dict[str, Any], reason: MissReason) -> None:
    assert expect(replace(NEXT, **changes)) == CacheExpectation(possible_tokens=2_250, reason=reason)


def test_a_request_below_the_minimum_is_not_cached() -> None:
    short = Usage(fresh_input_tokens=400)
    found = expect(usage=short)
    assert (found.tokens, found.reason) == (0, MissReason.BELOW_MINIMUM)
    assert explain_miss(found, Usage(fresh_input_tokens=450), None) == "below_minimum"
    bare = request(replace(STATIC, marked=False), FIRST)
    assert expect(request(*bare.manifest, ANSWER), previous=bare, usage=short).possible_tokens == 400


def gemini(previous: Request, current: Request, usage: Usage, elapsed: float = 60) -> CacheExpectation:
    before = replace(trace(usage, {}), provider="gemini", model=GEMINI.model)
    sides = [replace(side, provider="gemini", model=GEMINI.model) for side in (previous, current)]
    return expect_cache_read(sides[0], before, sides[1], GEMINI, elapsed_seconds=elapsed)


def test_in_the_layered_order_the_static_text_is_expected() -> None:
    static = block("static", 40_000, layer=Layer.STATIC)
    now, later = (block(name, 9_000, layer=Layer.DYNAMIC) for name in ("now", "later"))
    first = block("first", 1_000)
    previous = request(static, now, first, order=LayerOrder.LAYERED)
    current = request(static, later, first, block("answer"), order=LayerOrder.LAYERED)
    usage = Usage(fresh_input_tokens=12_500)
    assert gemini(previous, current, usage) == CacheExpectation(tokens=10_000, possible_tokens=10_000)
    past = gemini(previous, current, usage, elapsed=301)
    assert past == CacheExpectation(possible_tokens=10_000, reason=MissReason.TTL_EXPIRED)
    assert gemini(previous, replace(current, manifest=(static, now, first)), usage).tokens == 12_500
    small = gemini(previous, current, Usage(fresh_input_tokens=4_500))
    assert small == CacheExpectation(possible_tokens=3_600, reason=MissReason.BELOW_MINIMUM)


def test_in_the_layered_order_the_whole_request_is_expected_while_the_dynamic_block_is_the_same() -> None:
    static = block("static", 40_000, layer=Layer.STATIC)
    now, later = (
        replace(block(name, 9_000, layer=Layer.DYNAMIC), kind="dynamic", seq=None) for name in ("now", "later")
    )
    first = block("first", 1_000)
    previous = request(static, now, first, order=LayerOrder.LAYERED)
    usage = Usage(fresh_input_tokens=12_500)

    def expect_after(*blocks: ManifestEntry) -> CacheExpectation:
        return gemini(previous, request(static, *blocks, order=LayerOrder.LAYERED), usage)

    assert expect_after(now, first, block("answer")) == CacheExpectation(tokens=12_500, possible_tokens=12_500)
    assert expect_after(later, first, block("answer")) == CacheExpectation(tokens=10_000, possible_tokens=10_000)
    broken = expect_after(now, block("edited"), block("answer"))
    assert (broken.possible_tokens, broken.reason) == (12_500, MissReason.PREFIX_BREAK)


def test_gemini_reads_the_tools_after_the_static_text() -> None:
    tools = replace(block("tools", 10_000, layer=Layer.STATIC), kind="tools")
    first, last, grown = (block(name, 20_000, layer=Layer.STATIC) for name in ("first", "last", "grown"))
    found = gemini(
        request(tools, first, last, order=LayerOrder.LAYERED),
        request(tools, first, grown, order=LayerOrder.LAYERED, prefix_hash=b"q"),
        Usage(fresh_input_tokens=12_500),
    )
    assert found == CacheExpectation(tokens=5_000, possible_tokens=12_500, reason=MissReason.EPOCH_BEGAN)


def test_in_the_append_only_order_the_whole_request_is_expected_of_gemini() -> None:
    usage = Usage(fresh_input_tokens=2_000, cache_read_tokens=3_000)
    assert gemini(BEFORE, NEXT, usage) == CacheExpectation(tokens=5_000, possible_tokens=5_000)


def test_what_an_explicit_cache_replaced_is_not_in_the_implicit_cache() -> None:
    before = trace(Usage(fresh_input_tokens=100, cache_read_tokens=9_000), {"cached_content": "cachedContents/1"})
    found = expect_cache_read(BEFORE, before, NEXT, CLAUDE, elapsed_seconds=1)
    assert found == CacheExpectation(possible_tokens=9_000, reason=MissReason.CACHE_GONE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefix_hash": b"q"}, MissReason.EPOCH_BEGAN),
        ({"model": "m", "prefix_hash": b"q"}, MissReason.MODEL_CHANGED),
        ({"account": "b"}, MissReason.ACCOUNT_CHANGED),
    ],
)
def test_a_prefix_that_an_explicit_cache_no_longer_replaces_counts_as_changed(
    changes: dict[str, Any], reason: MissReason
) -> None:
    before = trace(Usage(fresh_input_tokens=100, cache_read_tokens=9_000), {"cached_content": "cachedContents/1"})
    found = expect_cache_read(BEFORE, before, replace(NEXT, **changes), CLAUDE, elapsed_seconds=1)
    assert found == CacheExpectation(possible_tokens=9_000, reason=reason)


@pytest.mark.parametrize(
    ("expectation", "read", "provider_reason", "reason"),
    [
        (CacheExpectation(tokens=1_000, possible_tokens=1_000), 1_000, "tools_changed", None),
        (CacheExpectation(tokens=1_000, possible_tokens=1_000), 960, None, None),
        (CacheExpectation(tokens=1_000, possible_tokens=1_000), 900, None, "unknown"),
        (CacheExpectation(tokens=1_000, possible_tokens=1_000), 900, "tools_changed", "tools_changed"),
        (CacheExpectation(tokens=0, possible_tokens=1_000, reason=MissReason.TTL_EXPIRED), 0, None, "ttl_expired"),
        (CacheExpectation(tokens=0, possible_tokens=1_000, reason=MissReason.TTL_EXPIRED), 1_000, None, None),
        (CacheExpectation(tokens=500, possible_tokens=1_000, reason=MissReason.EPOCH_BEGAN), 0, "x", "x"),
        (CacheExpectation(tokens=500, possible_tokens=1_000, reason=MissReason.EPOCH_BEGAN), 500, "x", "epoch_began"),
        (CacheExpectation(tokens=None), 0, None, None),
        (CacheExpectation(), 0, "previous_message_not_found", None),
    ],
)
def test_a_miss_is_explained_as_far_as_possible(
    expectation: CacheExpectation, read: int, provider_reason: str | None, reason: str | None
) -> None:
    usage = Usage(fresh_input_tokens=50, cache_read_tokens=read)
    assert explain_miss(expectation, usage, provider_reason) == reason


def test_a_call_that_reported_no_usage_is_not_a_miss() -> None:
    assert explain_miss(CacheExpectation(tokens=9, possible_tokens=9), Usage(), "unavailable") is None


blocks = st.lists(
    st.builds(
        block,
        st.sampled_from("abc"),
        st.integers(1, 50_000),
        layer=st.sampled_from([Layer.STATIC, Layer.DYNAMIC, Layer.BUFFERED]),
        marked=st.booleans(),
    ),
    max_size=8,
)
counts = st.integers(0, 50_000)


@given(
    before=blocks,
    after=blocks,
    usage=st.builds(Usage, fresh_input_tokens=counts, cache_read_tokens=counts, cache_write_tokens=counts),
    order=st.sampled_from(LayerOrder),
    elapsed=st.floats(0, 5_000),
    profile=st.sampled_from([CLAUDE, GEMINI]),
)
def test_no_more_is_expected_than_was_sent_and_a_gap_has_a_reason(
    before: list[ManifestEntry],
    after: list[ManifestEntry],
    usage: Usage,
    order: LayerOrder,
    elapsed: float,
    profile: Any,
) -> None:
    found = expect_cache_read(
        request(*before, order=order), trace(usage), request(*after, order=order), profile, elapsed_seconds=elapsed
    )
    assert (found.tokens or 0) <= found.possible_tokens <= usage.input_tokens
    assert (found.reason is None) == ((found.tokens or 0) == found.possible_tokens) or found.possible_tokens == 0
    assert found.tokens in {0, None} or found.tokens >= profile.cache_minimum_tokens
