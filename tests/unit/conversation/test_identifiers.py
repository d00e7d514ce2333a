"""Identifiers are unique, ordered, canonical and typed."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.identifiers import ASSISTANT, CONVERSATION, decode_id, encode_id, new_id, new_uuid


@given(st.uuids())
def test_an_identifier_encodes_its_uuid(value: UUID) -> None:
    text = encode_id(CONVERSATION, value)
    assert text.startswith("conv_")
    assert len(text) == len("conv_") + 26
    assert decode_id(CONVERSATION, text) == value


@given(st.text(max_size=40))
def test_nothing_else_is_an_identifier(text: str) -> None:
    found = decode_id(CONVERSATION, text)
    assert found is None or encode_id(CONVERSATION, found) == text


@pytest.mark.parametrize(
    "spelling",
    [
        "CONV_{body}",
        "conv-{body}",
        "conv_{body}0",
        "{body}",
        "conv_{upper}",
        "conv_{short}",
        " conv_{body}",
        "conv_{body} ",
    ],
)
def test_only_the_canonical_spelling_is_accepted(spelling: str) -> None:
    body = new_id(CONVERSATION).removeprefix("conv_")
    assert decode_id(CONVERSATION, spelling.format(body=body, upper=body.upper(), short=body[:-1])) is None


def test_an_identifier_too_large_for_a_uuid_is_refused() -> None:
    assert decode_id(CONVERSATION, "conv_" + "z" * 26) is None
    assert decode_id(CONVERSATION, "conv_7" + "z" * 25) == UUID(int=2**128 - 1)


def test_an_identifier_of_another_kind_is_refused() -> None:
    assert decode_id(ASSISTANT, new_id(CONVERSATION)) is None


def test_new_uuids_are_version_7_unique_and_ordered() -> None:
    made = [new_uuid() for _ in range(10_000)]
    assert {value.version for value in made} == {7}
    assert {value.variant for value in made} == {"specified in RFC 4122"}
    assert len(set(made)) == len(made)
    # The time is in the leading bits; two ids of the same quarter of a microsecond have a random order.
    assert [value.int >> 64 for value in made] == sorted(value.int >> 64 for value in made)
