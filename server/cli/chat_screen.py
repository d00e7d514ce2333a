"""The terminal side of a chat: turns and events as text, the screens that show them, and the prompt."""

import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Final, Protocol, TextIO, assert_never

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from rich.console import Console
from rich.status import Status
from rich.text import Text

from server.cli.terminal import MAX_ARGUMENT_CHARACTERS, describe_call, escape_controls, one_line
from server.conversation.block import (
    Block,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)
from server.conversation.turn import StopReason, TurnKind, TurnState, describe_ending
from server.conversation.usage import Usage
from server.web.client import (
    ClientError,
    ClientEvent,
    StrataProblem,
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    ToolResult,
    Turn,
    TurnEnded,
    TurnStarted,
    UnknownEvent,
    UsageReported,
)

_UNUSUAL_STOPS: Final[Mapping[str, str]] = {
    StopReason.LENGTH: "The answer reached its length limit.",
    StopReason.REFUSAL: "The model declined to answer.",
    StopReason.PAUSED: "The model paused. Send a message to continue.",
}


def describe_error(error: ClientError) -> str:
    """Describe an error on one line: message, hint and code."""
    code = f" [{error.code}]" if isinstance(error, StrataProblem) else ""
    return one_line(f"{error}{code}")


def describe_end(turn: Turn) -> str | None:
    """Describe how a turn ended. None if the model finished normally."""
    match turn.state:
        case TurnState.CANCELLED:
            return "Cancelled. The partial answer is kept."
        case TurnState.INTERRUPTED | TurnState.FAILED:
            error = turn.error
            message = f"{error.message} {error.hint} [{error.code}]" if error else "The turn failed."
            return one_line(f"{message} {_describe_why(turn)}")
        case _:
            message = _UNUSUAL_STOPS.get(turn.stop_reason or "", "")
            return one_line(f"{message} {_describe_why(turn)}") or None


def _describe_why(turn: Turn) -> str:
    """Describe what the provider reported about the end of a turn."""
    error = turn.error
    details: dict[str, object] = {"stop_details": turn.stop_details}
    if error is not None:
        details["provider_message"] = error.provider_message
        details["retry_after_seconds"] = error.retry_after_seconds
    return describe_ending(details)


def describe_turn(turn: Turn) -> str:
    """Describe the number, tokens, cost and model of a turn on one line."""
    parts = [f"turn {turn.seq}"]
    if turn.usage is not None:
        parts += _tokens(turn.usage)
    parts.append(_cost(turn.cost_usd))
    if turn.model:
        parts.append(one_line(turn.model))
    return " · ".join(parts)


def describe_blocks(turn: Turn) -> list[str]:
    """Render the blocks of a stored turn, without its reasoning."""
    return [text for block in turn.blocks if (text := _describe_block(block))]


def _describe_block(block: Block) -> str:
    match block:
        case TextBlock():
            return escape_controls(block.text)
        case ToolCallBlock():
            return f"→ {describe_call(block.name, block.arguments)}"
        case ToolResultBlock():
            return f"← {one_line(json.dumps(block.output, ensure_ascii=False))[:MAX_ARGUMENT_CHARACTERS]}"
        case ImageBlock():
            return f"({one_line(block.media_type)}, {block.size_bytes:,} bytes)"
        case ThinkingBlock() | UnknownBlock():
            return ""


def _tokens(usage: Usage) -> list[str]:
    cached = f" ({100 * usage.cache_read_tokens / usage.input_tokens:.0f} % cached)" if usage.input_tokens else ""
    thinking = [f"{usage.reasoning_tokens:,} thinking"] if usage.reasoning_tokens else []
    return [f"{usage.input_tokens:,} in{cached}", f"{usage.output_tokens:,} out", *thinking]


def _cost(cost_usd: Decimal | None) -> str:
    if cost_usd is None:
        return "price unknown"
    return f"${cost_usd:.4f}" if cost_usd >= Decimal("0.0001") or not cost_usd else "<$0.0001"


class Style(StrEnum):
    """The style of a piece of text, as rich writes it."""

    PLAIN = ""
    TYPED = "bold"
    THOUGHT = "dim italic"
    CALL = "cyan"
    NOTE = "dim"
    WARNING = "yellow"
    ERROR = "red"


Piece = tuple[str, Style]


class TurnWriter:
    """Turns events into styled text. Reasoning, answer and calls each begin on a new line."""

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._style: Style | None = None
        self._mid_line = False

    def write(self, event: ClientEvent) -> Iterator[Piece]:
        match event:
            case ThinkingDelta():
                if self._thinking:
                    yield from self._continue(event.text, Style.THOUGHT)
            case TextDelta():
                yield from self._continue(event.text, Style.PLAIN)
            case ToolCallEnd():
                yield from self._line(f"→ {describe_call(event.name, event.arguments)}", Style.CALL)
            case TurnEnded():
                yield from self._end(event.turn)
            case TurnStarted() | ToolCallBegin() | ToolCallDelta() | UsageReported() | UnknownEvent():
                return
            case _:
                assert_never(event)

    def close(self) -> Iterator[Piece]:
        """End the current line, if the last piece did not end it."""
        if self._mid_line:
            yield "\n", Style.PLAIN
        self._mid_line, self._style = False, None

    def _continue(self, text: str, style: Style) -> Iterator[Piece]:
        shown = escape_controls(text)
        if not shown:
            return
        if style is not self._style:
            yield from self.close()
        self._style, self._mid_line = style, not shown.endswith("\n")
        yield shown, style

    def _line(self, text: str, style: Style) -> Iterator[Piece]:
        yield from self.close()
        yield f"{text}\n", style

    def _end(self, turn: Turn) -> Iterator[Piece]:
        message = describe_end(turn)
        if message:
            yield from self._line(message, Style.WARNING)
        yield from self._line(describe_turn(turn), Style.NOTE)


class Screen(Protocol):
    """Shows a chat. `begin_turn` is called before the events of a turn, and `end_turn` after them."""

    def begin_turn(self) -> None: ...

    def show(self, event: ClientEvent) -> None: ...

    def show_result(self, result: ToolResult) -> None: ...

    def show_turn(self, turn: Turn) -> None: ...

    def end_turn(self) -> None: ...

    def note(self, message: str) -> None: ...

    def show_error(self, error: ClientError | str) -> None: ...


class TerminalScreen:
    """Shows everything on a terminal, in colours unless NO_COLOR is set or the terminal has none."""

    def __init__(self, console: Console, *, thinking: bool) -> None:
        self._console = console
        self._thinking = thinking
        self._writer = TurnWriter(thinking=thinking)
        self._status: Status | None = None

    def begin_turn(self) -> None:
        self._writer = TurnWriter(thinking=self._thinking)
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()

    def show(self, event: ClientEvent) -> None:
        for piece in self._writer.write(event):
            self._stop_spinner()
            self._print(*piece)

    def show_result(self, result: ToolResult) -> None:
        style = Style.WARNING if result.is_error else Style.NOTE
        self._print(f"← {escape_controls(str(result.output))}\n", style)

    def show_turn(self, turn: Turn) -> None:
        style = Style.TYPED if turn.kind == TurnKind.USER_TASK else Style.PLAIN
        for text in describe_blocks(turn):
            self._print(f"{'> ' if style is Style.TYPED else ''}{text}\n", style)
        if turn.kind == TurnKind.MODEL_RESPONSE:
            self._print(f"{describe_turn(turn)}\n", Style.NOTE)

    def end_turn(self) -> None:
        self._stop_spinner()
        for piece in self._writer.close():
            self._print(*piece)

    def note(self, message: str) -> None:
        self._print_line(message, Style.NOTE)

    def show_error(self, error: ClientError | str) -> None:
        self._print_line(describe_error(error) if isinstance(error, ClientError) else error, Style.ERROR)

    def _print_line(self, message: str, style: Style) -> None:
        for piece in self._writer.close():
            self._print(*piece)
        self._print(f"{escape_controls(message)}\n", style)

    def _stop_spinner(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: str, style: Style) -> None:
        self._console.print(Text(text, style=style.value), end="", soft_wrap=True)


class PipeScreen:
    """Writes answers to one stream, each ended by a line end, and notes and errors to another."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._mid_line = False

    def begin_turn(self) -> None:
        self._mid_line = False

    def show(self, event: ClientEvent) -> None:
        if isinstance(event, TextDelta) and event.text:
            text = escape_controls(event.text)
            self._mid_line = not text.endswith("\n")
            self._out.write(text)
            self._out.flush()
        elif isinstance(event, TurnEnded) and (message := describe_end(event.turn)):
            self._write_error(message)

    def show_result(self, result: ToolResult) -> None:
        """Show nothing: the output contains only answers."""

    def show_turn(self, turn: Turn) -> None:
        """Show nothing, for the same reason."""

    def end_turn(self) -> None:
        if self._mid_line:
            self._out.write("\n")
        self._out.flush()
        self._mid_line = False

    def note(self, message: str) -> None:
        self._write_error(message)

    def show_error(self, error: ClientError | str) -> None:
        self._write_error(describe_error(error) if isinstance(error, ClientError) else error)

    def _write_error(self, message: str) -> None:
        self._err.write(f"strata: {escape_controls(message)}\n")
        self._err.flush()


class ChatPrompt:
    """A prompt with editing, history and several lines.

    Enter sends. Esc Enter begins a new line, and so does a backslash before Enter. Ctrl-C clears the line, Ctrl-D on an
    empty line exits. Pasted text keeps its lines. The history is kept in memory only and never written to disk.
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
        """Add messages of an earlier chat to the history."""
        for text in typed:
            self._history.append_string(text)

    async def ask(self, question: str) -> str | None:
        try:
            # Ctrl-C is a key here. The signal is handled by the chat, which knows whether a turn is running.
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
