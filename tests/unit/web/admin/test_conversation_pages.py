"""Complete values for download."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.inspection.excerpts import excerpt_value
from server.web.admin.conversation_pages import render_whole

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@given(VALUES)
def test_json_that_fits_is_whole_and_reads_as_the_value(value: Any) -> None:
    excerpt = excerpt_value([value], limit=6000)
    assert not excerpt.is_cut
    assert json.loads(excerpt.text) == [value]
    assert json.loads(render_whole([value])) == [value]


def test_deeply_nested_json_is_cut_in_an_excerpt_and_complete_in_a_download() -> None:
    excerpt = excerpt_value(nested(190), limit=6000)
    assert excerpt.is_cut
    assert len(excerpt.text) == 6000
    assert json.loads(render_whole(nested(190))) == nested(190)


def test_a_text_is_rendered_unchanged() -> None:
    assert excerpt_value('say "hi"', limit=100).text == 'say "hi"'
    assert render_whole('say "hi"') == 'say "hi"'
