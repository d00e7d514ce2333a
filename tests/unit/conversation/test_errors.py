"""The tree of errors is complete, and each error describes the problem and the remedy."""

import re

import pytest

from server.cli.exit_codes import exit_code_of
from server.conversation import errors
from server.conversation.errors import StrataError, every_error

ALL = list(every_error())


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    defined = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, StrataError) and value is not StrataError
    ]
    assert drawn == defined


def test_codes_are_unique_and_machine_readable() -> None:
    codes = [kind.code for kind in ALL]
    assert len(codes) == len(set(codes)) > 30
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.code)
def test_each_error_is_a_sentence_and_has_an_exit_code(kind: type[StrataError]) -> None:
    error = kind()
    assert error.message[0].isupper()
    assert error.message.endswith(".")
    assert error.advice.endswith((".", "`"))
    assert "\n" not in str(error)
    assert 64 <= exit_code_of(kind) <= 78


def test_a_given_message_replaces_the_docstring() -> None:
    error = errors.ConversationBusy("Turn 4 runs.", hint="Wait.", running_seq=4)
    assert (str(error), error.details) == ("Turn 4 runs. Wait.", {"running_seq": 4})
