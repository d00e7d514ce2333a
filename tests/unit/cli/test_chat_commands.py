"""Lines are parsed as messages, commands or invalid commands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cli.chat_session import (
    HELP,
    AnswerCalls,
    CancelTurn,
    Command,
    Exit,
    Fork,
    InvalidCommand,
    ReplaceContext,
    SendImage,
    SendText,
    ShowHelp,
    parse_command,
)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("Hello", SendText(text="Hello")),
        ("  two\nlines ", SendText(text="  two\nlines ")),
        ("//etc is a directory", SendText(text="/etc is a directory")),
        ("/fork 4", Fork(at_seq=4)),
        ("/image cat.png What is this?", SendImage(path="cat.png", text="What is this?")),
        ("/image 'my cat.png' What?", SendImage(path="my cat.png", text="What?")),
        ('/image "my cat.png"', SendImage(path="my cat.png", text="")),
        ("/context world.json", ReplaceContext(path="world.json")),
        ("/result", AnswerCalls()),
        ("/cancel", CancelTurn()),
        ("/help ", ShowHelp()),
        ("/exit", Exit()),
    ],
)
def test_a_line_is_parsed_as_a_command(line: str, command: Command) -> None:
    assert parse_command(line) == command


@pytest.mark.parametrize("line", ["", "  ", "\n"])
def test_a_blank_line_is_no_command(line: str) -> None:
    assert parse_command(line) is None


@pytest.mark.parametrize("line", ["/fork", "/fork two", "/image", "/context", "/frok 4", "/"])
def test_an_invalid_command_is_not_sent(line: str) -> None:
    assert isinstance(parse_command(line), InvalidCommand)


@given(st.text())
def test_any_line_can_be_parsed(line: str) -> None:
    command = parse_command(line)
    assert (command is None) == (not line.strip())


def test_every_command_is_in_the_help() -> None:
    for name in ("/image", "/context", "/fork", "/result", "/cancel", "/exit"):
        assert f"\n{name} " in HELP
