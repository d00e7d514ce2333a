"""The fields of the editor are converted to a definition."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.assistant import Assistant, Instructions
from server.conversation.errors import BodyMalformed
from server.web.admin.assistant_drafts import open_draft, read_draft, read_object, read_version, rebase
from tests.support.builders import A_TIME, NASTY, definition


def saved(**changes: Any) -> Assistant:
    return Assistant(id="asst_x", version=3, created_at=A_TIME, definition=definition(**changes))


def sent(assistant: Assistant, **changes: str) -> dict[str, str]:
    """The form data that a browser sends, with its CRLF line endings."""
    fields = {**open_draft(assistant, assistant, "").fields, **changes}
    return {name: text.replace("\n", "\r\n") for name, text in fields.items()}


@given(roles=st.text() | st.just(NASTY) | st.just("a\r\nb\n"), value=st.text() | st.just(NASTY))
def test_an_unchanged_form_changes_nothing(roles: str, value: str) -> None:
    assistant = saved(instructions=Instructions(roles=roles), variables={"value": value})
    draft = read_draft(assistant, sent(assistant))
    assert draft.definition == assistant.definition
    assert draft.problems == ()


def test_an_edited_text_keeps_its_line_endings() -> None:
    assistant = saved(instructions=Instructions(roles="a\r\nb", procedure="c"))
    draft = read_draft(assistant, sent(assistant, roles="a\nb\nmine", procedure="d\ne", variables='{"b": 1, "a": 2}'))
    assert draft.definition.instructions == Instructions(roles="a\r\nb\r\nmine", procedure="d\ne")
    assert list(draft.definition.variables) == ["b", "a"]
    assert draft.definition.tools == assistant.definition.tools


@pytest.mark.parametrize(
    ("changes", "field", "line"),
    [
        ({"roles": "fine\nhid\u202eden"}, "roles", 2),
        ({"variables": '{"a": 1,\n"b"}'}, "variables", 2),
        ({"variables": "[1]"}, "variables", 1),
        ({"variables": '{"a": NaN}'}, "variables", None),
        ({"args": "{"}, "args", 1),
    ],
)
def test_an_invalid_field_is_named_with_its_line(changes: dict[str, str], field: str, line: int | None) -> None:
    assistant = saved()
    [problem] = read_draft(assistant, sent(assistant, **changes)).problems
    assert (problem.template, problem.line) == (field, line)


def test_a_text_that_cannot_be_shown_cannot_be_changed() -> None:
    assistant = saved(instructions=Instructions(roles="a\x1bb"))
    draft = read_draft(assistant, sent(assistant, roles="mine"))
    assert [problem.template for problem in draft.problems] == ["roles"]
    assert draft.definition.instructions.roles == "a\x1bb"
    assert draft.fields["roles"] == "mine"


def test_on_top_of_a_newer_version_only_edited_fields_are_kept() -> None:
    base, newest = saved(), saved(instructions=Instructions(roles="Theirs.", constraints="Theirs."))
    moved = rebase(sent(base, roles="Mine."), base, newest)
    assert read_draft(newest, moved).definition.instructions == Instructions(roles="Mine.", constraints="Theirs.")


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "x", "9" * 30, "\u0663"])
def test_a_form_without_a_version_is_refused(text: str) -> None:
    with pytest.raises(BodyMalformed):
        read_version({"base_version": text})


@pytest.mark.parametrize("levels", [51, 500, 50_000])
def test_an_object_that_is_too_deep_is_refused(levels: int) -> None:
    value, problem = read_object("args", '{"a":' * levels + "1" + "}" * levels)
    assert value == {}
    assert problem is not None
