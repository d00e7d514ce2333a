"""A page shows any text without being changed by it."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import ValidationFailed
from server.web.admin.conversation_filters import FLAGS, TEXTS, read_filters
from server.web.admin.rendering import render, show_text

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=60) | st.sampled_from(
    ["<script>", "</section>", "<!--", "]]>", '" onload="x', "' x='", "&lt;", "{{ 7*7 }}", "{% raw %}", "\x00", "\r\n"]
)


class Shape(HTMLParser):
    """The tags of a page with their attributes' names, and the texts of one kind of element."""

    def __init__(self, element: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self._element = element
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self._inside = tag == self._element
        if self._inside:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data


def shape_of(page: str, element: str) -> Shape:
    shape = Shape(element)
    shape.feed(page)
    shape.close()
    return shape


def error_page(message: str, title: str = "Not Found") -> str:
    return render(
        "error.html",
        session=None,
        csrf_token=None,
        path="/admin/x",
        request_id="req_1",
        notice=None,
        back_url=None,
        title=title,
        message=message,
        advice=message,
        code=message,
    )


@given(ANY_TEXT)
def test_no_text_changes_the_page_around_it(text: str) -> None:
    plain, hostile = shape_of(error_page("plain"), "code"), shape_of(error_page(text), "code")
    assert [tag for tag in hostile.tags if tag[0] != "p"] == [tag for tag in plain.tags if tag[0] != "p"]
    assert hostile.texts[0] == show_text(text)
    error_page(text).encode()


@given(ANY_TEXT)
def test_no_text_escapes_from_an_attribute(text: str) -> None:
    def page(goal: str) -> str:
        return render(
            "login.html",
            session=None,
            csrf_token=None,
            path="",
            request_id="",
            notice=None,
            goal=goal,
            problem=None,
            wait_minutes=None,
        )

    assert shape_of(page(text), "p").tags == shape_of(page("/admin"), "p").tags


@given(ANY_TEXT)
def test_shown_text_is_visible_and_encodable(text: str) -> None:
    shown = show_text(text)
    shown.encode()
    assert not any((ord(letter) < 32 and letter not in "\t\n") or 0x7F <= ord(letter) < 0xA0 for letter in shown)
    assert not set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069") & set(shown)
    assert show_text(shown) == shown


def test_direction_changes_of_a_text_are_isolated() -> None:
    assert show_text("a\u202eb\x1b[0m\x00\x7f\ud83d\n\t\u05e9") == "a[U+202E]b␛[0m␀␡\ufffd\n\t\u05e9"


def test_filters_are_parsed_from_the_url() -> None:
    query = {
        "text": " oslo ",
        "state": "failed",
        "has_repairs": "1",
        "tokens_from": "5",
        "cost_to": "0.5",
        "x": "y",
        "model": "",
    }
    filters, filled = read_filters({**query, "active_after": "2026-01-31T09:30"})
    assert filled == {k: v.strip() for k, v in query.items() if k not in {"x", "model"}} | {
        "active_after": "2026-01-31T09:30"
    }
    assert (filters.text, filters.state, filters.has_repairs, filters.tokens_from) == ("oslo", "failed", True, 5)
    assert filters.active_after is not None
    assert filters.active_after.isoformat() == "2026-01-31T09:30:00+00:00"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state", "happy"),
        ("stop_reason", "x"),
        ("cost_from", "NaN"),
        ("cost_from", "1e99"),
        ("cost_to", "much"),
        ("tokens_from", "-1"),
        ("tokens_to", "9" * 30),
        ("tokens_to", "\u0661"),
        ("active_after", "yesterday"),
        ("active_after", "0001-01-01T00:00+14:00"),
        ("active_before", "9999-12-31T23:59-14:00"),
        ("text", "x" * 1001),
    ],
)
def test_an_invalid_filter_is_named(name: str, value: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        read_filters({name: value})
    assert f"“{name}”" in caught.value.message


@given(st.dictionaries(st.sampled_from([*TEXTS, *FLAGS, "state", "cost_from", "tokens_to", "active_before"]), ANY_TEXT))
def test_no_url_breaks_the_filters(query: dict[str, str]) -> None:
    try:
        read_filters(query)
    except ValidationFailed as refusal:
        assert refusal.details["errors"]  # noqa: PT017  reason: both results are valid, any other error is not
