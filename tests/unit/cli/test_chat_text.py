"""Texts of a chat: without control characters, and on one line if required."""

import unicodedata
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cli.chat_screen import describe_blocks, describe_end, describe_error, describe_turn
from server.cli.terminal import describe_call, escape_controls, one_line
from server.conversation.block import ImageBlock, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from server.conversation.usage import Usage
from server.web.client import ServerUnreachable, StrataProblem, Turn, TurnError

ANY_TEXT = st.text(st.characters() | st.sampled_from("\x1b\x07\r\n\t\x9b\u202e\ud800"))


def turn(**members: object) -> Turn:
    return Turn(**{"seq": 4, "kind": "model_response", "state": "complete", **members})  # type: ignore[arg-type]  # reason: the members of an example


@given(ANY_TEXT)
def test_no_control_character_is_left(text: str) -> None:
    shown = escape_controls(text)
    controls = {char for char in shown if unicodedata.category(char) in {"Cc", "Cs"}}
    assert controls <= {"\n", "\t"}
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    shown.encode()


@given(ANY_TEXT, ANY_TEXT)
def test_a_text_can_be_escaped_in_pieces(first: str, second: str) -> None:
    assert escape_controls(first) + escape_controls(second) == escape_controls(first + second)


@given(st.text(st.characters(exclude_categories=["C"]) | st.sampled_from("\n\t")))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert escape_controls(text) == text


def test_an_escape_sequence_is_shown_and_not_executed() -> None:
    assert escape_controls("\x1b[31mred\x1b]0;title\x07") == "␛[31mred␛]0;title␇"


@given(ANY_TEXT)
def test_a_line_is_one_line(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1


def test_a_tool_call_is_shown_as_a_function_call() -> None:
    assert describe_call("get_weather", {"city": "Tromsø", "days": 3}) == 'get_weather(city="Tromsø", days=3)'
    assert describe_call("x\x1b[2J", {}) == "x␛[2J()"
    assert len(describe_call("x", {"text": "y" * 10_000})) < 600


@pytest.mark.parametrize(
    ("members", "line"),
    [
        (
            {
                "usage": Usage(fresh_input_tokens=200, cache_read_tokens=800, output_tokens=1234, reasoning_tokens=5),
                "cost_usd": Decimal("0.0123"),
                "model": "gemini-3.1-pro-preview",
            },
            "turn 4 · 1,000 in (80 % cached) · 1,234 out · 5 thinking · $0.0123 · gemini-3.1-pro-preview",
        ),
        ({"usage": Usage()}, "turn 4 · 0 in · 0 out · price unknown"),
        ({"cost_usd": Decimal("0.00001")}, "turn 4 · <$0.0001"),
        ({"cost_usd": Decimal(0)}, "turn 4 · $0.0000"),
    ],
)
def test_a_turn_is_described_on_one_line(members: dict[str, object], line: str) -> None:
    assert describe_turn(turn(**members)) == line


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"stop_reason": "end_turn"}, None),
        ({"stop_reason": "something new"}, None),
        ({"stop_reason": "length"}, "The answer reached its length limit."),
        (
            {"stop_reason": "refusal", "stop_details": {"reason": "refusal", "category": "bio"}},
            "The model declined to answer. Category: bio",
        ),
        ({"stop_reason": "end_turn", "stop_details": {"stop_sequence": "END\x1b[0m"}}, "Stop sequence: END␛[0m"),
        (
            {
                "state": "failed",
                "error": TurnError(
                    code="provider_rate_limited",
                    message="Slow.",
                    hint="Wait.",
                    provider_message="Quota\nused up.",
                    retry_after_seconds=30.0,
                ),
            },
            "Slow. Wait. [provider_rate_limited] Provider message: Quota used up. Retry after 30 s.",
        ),
        ({"state": "cancelled"}, "Cancelled. The partial answer is kept."),
        ({"state": "failed"}, "The turn failed."),
        (
            {"state": "interrupted", "error": TurnError(code="turn_interrupted", message="It stopped.", hint="Go on.")},
            "It stopped. Go on. [turn_interrupted]",
        ),
    ],
)
def test_an_unusual_end_is_described(members: dict[str, object], sentence: str | None) -> None:
    assert describe_end(turn(**members)) == sentence


def test_an_error_is_described_with_its_hint_and_code() -> None:
    problem = StrataProblem("No\nkey.", code="key_rejected", status=401, hint="Make one.")
    assert describe_error(problem) == "No key. Make one. [key_rejected]"
    assert describe_error(ServerUnreachable("Nobody there.", sent=False)) == "Nobody there."


def test_a_stored_turn_is_printed_without_its_reasoning() -> None:
    blocks = (
        ThinkingBlock(text="Hm."),
        TextBlock(text="Hello\x1b"),
        ToolCallBlock(id="call_1", name="get_time", arguments={}),
        ToolResultBlock(tool_call_id="call_1", output={"a": "ø"}),
        ImageBlock(media_type="image/png", sha256="ab", size_bytes=2048),
    )
    shown = describe_blocks(turn(blocks=blocks))
    assert shown == ["Hello␛", "→ get_time()", '← {"a": "ø"}', "(image/png, 2,048 bytes)"]
