"""The line that a user types on."""

from collections.abc import Iterable
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output


class Asker(Protocol):
    """Somebody who can be asked."""

    async def ask(self, question: str) -> str | None:
        """What was typed; None where the user wants to leave."""


class ChatPrompt:
    """A prompt with editing, history and more than one line.

    Enter sends. Esc Enter begins a new line, and so does a backslash before Enter. Ctrl-C clears what is typed, Ctrl-D
    on an empty line leaves. What is pasted stays as it is. The history is in memory alone: nothing that was typed is
    written to this machine's disk.
    """

    def __init__(self, *, terminal_in: Input | None = None, terminal_out: Output | None = None) -> None:
        self._history = InMemoryHistory()
        self._session: PromptSession[str] = PromptSession(
            history=self._history,
            multiline=True,
            key_bindings=_bindings(),
            prompt_continuation=". ",
            input=terminal_in,
            output=terminal_out,
        )

    def remember(self, typed: Iterable[str]) -> None:
        """Adds to the history what was typed in an earlier chat."""
        for text in typed:
            self._history.append_string(text)

    async def ask(self, question: str) -> str | None:
        try:
            # Ctrl-C is a key here. The signal belongs to the chat, which has to know whether a turn runs.
            return await self._session.prompt_async(question, handle_sigint=False)
        except EOFError:
            return None


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return bindings
