"""The pieces of a text add up to the text, and tokens are counted deterministically."""

from hypothesis import given
from hypothesis import strategies as st

from server.emulator.latency import FULL_SPEED, Latency, pieces
from server.emulator.tokens import canonical_json, count_json, count_tokens


@given(st.text())
def test_pieces_joined_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert all(pieces(text))


def test_pieces_are_words() -> None:
    assert pieces("One two,  three\n") == ["One ", "two,  ", "three\n"]


@given(st.text(), st.text())
def test_more_text_has_no_fewer_tokens(text: str, more: str) -> None:
    assert count_tokens(text) <= count_tokens(text + more)
    assert (count_tokens(text) == 0) == (text == "")


def test_json_counts_the_same_in_any_order_of_keys() -> None:
    assert count_json({"a": 1, "b": 2.0}) == count_json({"b": 2, "a": 1})
    assert canonical_json({"b": [1.0, {"d": None, "c": "ä"}]}) == '{"b":[1,{"c":"ä","d":null}]}'


async def test_full_speed_does_not_wait_and_a_slow_pace_does() -> None:
    await FULL_SPEED.wait_first()
    await FULL_SPEED.wait_next()

    assert FULL_SPEED.slowed() == Latency(first_chunk_seconds=2, seconds_per_chunk=2)
