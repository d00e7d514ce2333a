"""How much fits on a page."""

from html import escape

from hypothesis import given
from hypothesis import strategies as st

from server.inspection.excerpts import Excerpt
from server.web.admin.page_budget import PageBudget, open_window
from server.web.admin.rendering import show_text

ANY_TEXT = st.text(st.sampled_from('a"&<\u202e\x1b\U0001f600\n'), max_size=60)


@given(texts=st.lists(st.tuples(ANY_TEXT, st.integers(0, 80)), max_size=8), size=st.integers(0, 300))
def test_a_page_never_exceeds_its_budget(texts: list[tuple[str, int]], size: int) -> None:
    budget = PageBudget(size)
    sent = 0
    for text, limit in texts:
        shown = budget.fit(Excerpt(text=text), limit)
        weight = len(escape(show_text(shown.text)).encode())
        assert weight <= limit
        assert text.startswith(shown.text)
        assert shown.is_cut is (shown.text != text)
        sent += weight
    assert sent <= size


@given(text=ANY_TEXT)
def test_content_within_the_budget_is_shown_completely(text: str) -> None:
    assert PageBudget(1000).fit(Excerpt(text=text), 1000) == Excerpt(text=text)
    assert PageBudget(1000).fit_line(text, 1000) == text


@given(items=st.lists(st.integers(), max_size=12), head=st.integers(0, 5), tail=st.integers(0, 5))
def test_a_window_has_both_ends_and_counts_the_rest(items: list[int], head: int, tail: int) -> None:
    window = open_window(items, head=head, tail=tail)

    shown = (*window.head, *window.tail)
    assert all(items[number] == item for number, item in shown)
    assert len(shown) + window.left_out == window.total == len(items)
    assert window.left_out == max(0, len(items) - head - tail)
    assert window.map(str).head == tuple((number, str(item)) for number, item in window.head)
