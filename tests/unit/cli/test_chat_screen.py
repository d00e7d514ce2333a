"""Events become lines: reasoning, answers and calls are separate, and a pipe gets only the answers."""

import re
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from server.cli.chat_screen import PipeScreen, Style, TerminalScreen, TurnWriter
from server.cli.terminal import escape_controls
from server.conversation.block import TextBlock
from server.conversation.usage import Usage
from server.web.client import (
    ClientEvent,
    ConversationStatus,
    StrataProblem,
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    ToolResult,
    Turn,
    TurnEnded,
    TurnError,
    TurnStarted,
    UnknownEvent,
    UsageReported,
)

STATUS = ConversationStatus(id="conv_1", revision=2, state="idle")
DONE = TurnEnded(turn=Turn(seq=2, kind="model_response", state="complete"), conversation=STATUS)
FAILED = TurnEnded(
    turn=Turn(
        seq=2,
        kind="model_response",
        state="failed",
        error=TurnError(code="provider_disconnected", message="It broke.", hint="Again."),
    ),
    conversation=STATUS,
)
DELTAS = st.one_of(
    st.builds(ThinkingDelta, text=st.text()),
    st.builds(TextDelta, text=st.text()),
    st.builds(ToolCallEnd, call_id=st.just("c"), name=st.text(), arguments=st.dictionaries(st.text(), st.text())),
    st.just(UnknownEvent(name="x", data={})),
)


def terminal(*, colours: bool = False, thinking: bool = True) -> tuple[TerminalScreen, StringIO]:
    out = StringIO()
    console = Console(file=out, force_terminal=colours, color_system="standard" if colours else None, highlight=False)
    return TerminalScreen(console, thinking=thinking), out


def shown(*events: ClientEvent, thinking: bool = True) -> str:
    screen, out = terminal(thinking=thinking)
    screen.begin_turn()
    for event in events:
        screen.show(event)
    screen.end_turn()
    return out.getvalue()


def test_reasoning_answer_and_calls_have_lines_of_their_own() -> None:
    text = shown(
        TurnStarted(conversation_id="conv_1", input_seq=1, seq=2),
        ThinkingDelta(text="Hm, "),
        ThinkingDelta(text="well."),
        TextDelta(text="It is"),
        TextDelta(text=" cold.\n"),
        ToolCallBegin(call_id="call_1", name="get_weather"),
        ToolCallDelta(call_id="call_1", arguments_json="{"),
        ToolCallEnd(call_id="call_1", name="get_weather", arguments={"city": "Oslo"}),
        UsageReported(usage=Usage()),
        DONE,
    )
    assert text == 'Hm, well.\nIt is cold.\n→ get_weather(city="Oslo")\nturn 2 · price unknown\n'


def test_reasoning_can_be_left_out() -> None:
    assert shown(ThinkingDelta(text="Hm."), TextDelta(text="Yes."), thinking=False) == "Yes.\n"


def test_a_failure_is_shown_after_the_partial_answer() -> None:
    text = shown(TextDelta(text="Hel"), FAILED)
    assert text == "Hel\nIt broke. Again. [provider_disconnected]\nturn 2 · price unknown\n"


@given(st.lists(DELTAS))
def test_any_sequence_of_events_gives_complete_lines_without_controls(events: list[ClientEvent]) -> None:
    writer = TurnWriter(thinking=True)
    pieces = [piece for event in [*events, DONE] for piece in writer.write(event)]
    text = "".join(text for text, _ in pieces)
    assert text.endswith("\n")
    assert "\x1b" not in text
    expected = "".join(event.text for event in events if isinstance(event, TextDelta))
    plain = "".join(text for text, style in pieces if style is Style.PLAIN)
    assert plain.replace("\n", "") == escape_controls(expected).replace("\n", "")


def test_only_the_screen_sets_colours() -> None:
    screen, out = terminal(colours=True)
    for event in (ThinkingDelta(text="Hm."), TextDelta(text="\x1b[31mred"), DONE):
        screen.show(event)
    assert "␛[31mred" in out.getvalue()
    sequences = set(re.findall(r"\x1b\[[0-9;]*m", out.getvalue()))
    assert sequences == {"\x1b[2;3m", "\x1b[2m", "\x1b[0m"}


def test_markup_of_the_model_is_printed_as_text() -> None:
    assert shown(TextDelta(text="[bold]x[/bold] :smile: [link=file:///]")) == "[bold]x[/bold] :smile: [link=file:///]\n"


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen, out = terminal(colours=True)
    screen.show(ToolCallEnd(call_id="c", name="x", arguments={}))
    screen.show_error("No.")
    assert "\x1b[3" not in out.getvalue()


def test_a_long_line_is_not_cut() -> None:
    assert shown(TextDelta(text="word " * 200)) == "word " * 200 + "\n"


def test_a_note_within_an_answer_begins_a_line() -> None:
    screen, out = terminal()
    screen.begin_turn()
    screen.show(TextDelta(text="Hel"))
    screen.note("Trying\x1b again.")
    screen.show(TextDelta(text="lo"))
    screen.end_turn()
    assert out.getvalue() == "Hel\nTrying␛ again.\nlo\n"


def test_stored_turns_results_and_errors_are_shown() -> None:
    screen, out = terminal()
    screen.show_turn(Turn(seq=1, kind="user_task", state="complete", blocks=(TextBlock(text="Hi"),)))
    screen.show_turn(Turn(seq=2, kind="model_response", state="complete", blocks=(TextBlock(text="Hello"),)))
    screen.show_result(ToolResult(tool_call_id="call_1", output={"a": 1}))
    screen.show_error(StrataProblem("No.", code="key_rejected", status=401))
    assert out.getvalue() == "> Hi\nHello\nturn 2 · price unknown\n← {'a': 1}\nNo. [key_rejected]\n"


def test_a_pipe_receives_the_answers_and_nothing_else() -> None:
    out, err = StringIO(), StringIO()
    screen = PipeScreen(out, err)
    for text in ("Hel", "lo", "Bye\n"):
        screen.begin_turn()
        screen.show(ThinkingDelta(text="Hm."))
        screen.show(TextDelta(text=f"{text}\x1b"[: len(text)]))
        screen.show(ToolCallEnd(call_id="c", name="x", arguments={}))
        screen.show(DONE)
        screen.end_turn()
    assert out.getvalue() == "Hel\nlo\nBye\n"
    assert err.getvalue() == ""
    screen.show(TextDelta(text="\x1b[2J"))
    screen.show(FAILED)
    screen.note("Note.")
    screen.show_error("No.")
    assert out.getvalue().endswith("␛[2J")
    assert err.getvalue() == "strata: It broke. Again. [provider_disconnected]\nstrata: Note.\nstrata: No.\n"
