"""The bounded mapping for the caches of a process."""

from hypothesis import given
from hypothesis import strategies as st

from server.conversation.lru import LruCache


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    assert cache.put("c", 3) == [2]
    assert list(cache) == ["a", "c"]
    assert cache.get("b") is None


def test_asking_whether_an_entry_is_there_does_not_mark_it_as_used() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert "a" in cache
    assert cache.put("c", 3) == [1]


def test_a_replaced_entry_counts_once_and_is_the_newest() -> None:
    cache: LruCache[str, bytes] = LruCache(10, weigh=len)
    cache.put("a", b"1234")
    cache.put("b", b"1234")
    assert cache.put("a", b"123456") == []
    assert list(cache) == ["b", "a"]
    assert cache.put("c", b"1") == [b"1234"]


def test_a_heavy_entry_evicts_as_many_as_necessary() -> None:
    cache: LruCache[str, bytes] = LruCache(10, weigh=len)
    for key in "abc":
        cache.put(key, b"123")
    assert cache.put("d", b"1234567") == [b"123", b"123"]
    assert list(cache) == ["c", "d"]


def test_the_newest_entry_stays_even_if_it_exceeds_the_limit() -> None:
    cache: LruCache[str, bytes] = LruCache(3, weigh=len)
    cache.put("a", b"1")
    assert cache.put("b", b"12345") == [b"1"]
    assert cache.get("b") == b"12345"
    assert cache.put("c", b"1") == [b"12345"]


def test_removed_entries_release_their_weight() -> None:
    cache: LruCache[str, bytes] = LruCache(4, weigh=len)
    cache.put("a", b"1234")
    assert cache.pop("a") == b"1234"
    assert cache.pop("a") is None
    assert cache.put("b", b"12") == []
    cache.clear()
    assert len(cache) == 0
    cache.put("c", b"12")
    assert cache.put("d", b"12") == []


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "pop"]), st.integers(0, 6), st.binary(max_size=5)), max_size=60)
)
def test_it_agrees_with_a_list_in_order_of_use(steps: list[tuple[str, int, bytes]]) -> None:
    cache: LruCache[int, bytes] = LruCache(12, weigh=len)
    model: list[tuple[int, bytes]] = []
    for action, key, value in steps:
        known = next((entry for entry in model if entry[0] == key), None)
        expected = None if known is None else known[1]
        if action == "get":
            assert cache.get(key) == expected
            model = [*(entry for entry in model if entry[0] != key), *([known] if known else [])]
        elif action == "pop":
            assert cache.pop(key) == expected
            model = [entry for entry in model if entry[0] != key]
        else:
            model = [*(entry for entry in model if entry[0] != key), (key, value)]
            evicted = []
            while sum(len(data) for _, data in model) > 12 and len(model) > 1:
                evicted.append(model.pop(0)[1])
            assert cache.put(key, value) == evicted
        assert list(cache) == [key for key, _ in model]
