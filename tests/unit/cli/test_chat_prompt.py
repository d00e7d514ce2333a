"""The prompt, with a pipe instead of a keyboard."""

from collections.abc import Iterator

import pytest
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from server.cli.chat_screen import ChatPrompt

ESCAPE, CTRL_C, CTRL_D, UP = "\x1b", "\x03", "\x04", "\x1b[A"
PASTE_BEGIN, PASTE_END = "\x1b[200~", "\x1b[201~"


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


@pytest.fixture
def prompt(keyboard: PipeInput) -> ChatPrompt:
    return ChatPrompt(terminal_in=keyboard, terminal_out=DummyOutput())


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("Hello\r", "Hello"),
        (f"one{ESCAPE}\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        (f"{PASTE_BEGIN}one\ntwo\n{PASTE_END}\r", "one\ntwo\n"),
        (f"nonsense{CTRL_C}sense\r", "sense"),
        ("\r", ""),
        (CTRL_D, None),
        (f"x\x7f{CTRL_D}", None),
    ],
)
async def test_keys_make_a_line(keyboard: PipeInput, prompt: ChatPrompt, keys: str, line: str | None) -> None:
    keyboard.send_text(keys)
    assert await prompt.ask("> ") == line


async def test_earlier_lines_can_be_recalled(keyboard: PipeInput, prompt: ChatPrompt) -> None:
    prompt.remember(["long ago"])
    keyboard.send_text("Hello\r")
    await prompt.ask("> ")
    keyboard.send_text(f"{UP}\r")
    assert await prompt.ask("> ") == "Hello"
    keyboard.send_text(f"{UP}{UP}\r")
    assert await prompt.ask("> ") == "long ago"
