"""Where a chat is shown: a terminal, or a pipe that wants the answers and nothing else."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol, TextIO, assert_never

from rich.console import Console
from rich.status import Status
from rich.text import Text

from server.cli.chat_text import (
    describe_blocks,
    describe_call,
    describe_end,
    describe_error,
    describe_turn,
    harmless,
)
from server.conversation.turn import TurnKind
from server.web.client import (
    ClientError,
    ClientEvent,
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


class Look(StrEnum):
    """How a piece of text looks, in rich's words."""

    PLAIN = ""
    TYPED = "bold"
    THOUGHT = "dim italic"
    CALL = "cyan"
    NOTE = "dim"
    WARNING = "yellow"
    ERROR = "red"


Piece = tuple[str, Look]


class TurnWriter:
    """Events to pieces of text. Reasoning, answer and calls begin on lines of their own; none ends in mid-line."""

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._look: Look | None = None
        self._mid_line = False

    def write(self, event: ClientEvent) -> Iterator[Piece]:
        match event:
            case ThinkingDelta():
                if self._thinking:
                    yield from self._continue(event.text, Look.THOUGHT)
            case TextDelta():
                yield from self._continue(event.text, Look.PLAIN)
            case ToolCallEnd():
                yield from self._line(f"→ {describe_call(event.name, event.arguments)}", Look.CALL)
            case TurnEnded():
                yield from self._end(event.turn)
            case TurnStarted() | ToolCallBegin() | ToolCallDelta() | UsageReported() | UnknownEvent():
                return
            case _:
                assert_never(event)

    def close(self) -> Iterator[Piece]:
        """What ends the line where a turn was left in the middle of one."""
        if self._mid_line:
            yield "\n", Look.PLAIN
        self._mid_line, self._look = False, None

    def _continue(self, text: str, look: Look) -> Iterator[Piece]:
        shown = harmless(text)
        if not shown:
            return
        if look is not self._look:
            yield from self.close()
        self._look, self._mid_line = look, not shown.endswith("\n")
        yield shown, look

    def _line(self, text: str, look: Look) -> Iterator[Piece]:
        yield from self.close()
        yield f"{text}\n", look

    def _end(self, turn: Turn) -> Iterator[Piece]:
        sentence = describe_end(turn)
        if sentence:
            yield from self._line(sentence, Look.WARNING)
        yield from self._line(describe_turn(turn), Look.NOTE)


class Screen(Protocol):
    """Shows what happens. `begin_turn` and `end_turn` stand around the events of a turn."""

    def begin_turn(self) -> None: ...

    def show(self, event: ClientEvent) -> None: ...

    def show_result(self, result: ToolResult) -> None: ...

    def show_turn(self, turn: Turn) -> None: ...

    def end_turn(self) -> None: ...

    def note(self, sentence: str) -> None: ...

    def complain(self, error: ClientError | str) -> None: ...


class TerminalScreen:
    """Everything, in colours where the terminal and the user (NO_COLOR) want them."""

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
            self._stop_waiting()
            self._print(*piece)

    def show_result(self, result: ToolResult) -> None:
        look = Look.WARNING if result.is_error else Look.NOTE
        self._print(f"← {harmless(str(result.output))}\n", look)

    def show_turn(self, turn: Turn) -> None:
        look = Look.TYPED if turn.kind == TurnKind.USER_TASK else Look.PLAIN
        for text in describe_blocks(turn):
            self._print(f"{'> ' if look is Look.TYPED else ''}{text}\n", look)
        if turn.kind == TurnKind.MODEL_RESPONSE:
            self._print(f"{describe_turn(turn)}\n", Look.NOTE)

    def end_turn(self) -> None:
        self._stop_waiting()
        for piece in self._writer.close():
            self._print(*piece)

    def note(self, sentence: str) -> None:
        self._between_lines(sentence, Look.NOTE)

    def complain(self, error: ClientError | str) -> None:
        self._between_lines(describe_error(error) if isinstance(error, ClientError) else error, Look.ERROR)

    def _between_lines(self, sentence: str, look: Look) -> None:
        for piece in self._writer.close():
            self._print(*piece)
        self._print(f"{harmless(sentence)}\n", look)

    def _stop_waiting(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: str, look: Look) -> None:
        self._console.print(Text(text, style=look.value), end="", soft_wrap=True)


class PipeScreen:
    """The answers on one stream, each ended by a line end; what is wrong on the other."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._mid_line = False

    def begin_turn(self) -> None:
        self._mid_line = False

    def show(self, event: ClientEvent) -> None:
        if isinstance(event, TextDelta) and event.text:
            text = harmless(event.text)
            self._mid_line = not text.endswith("\n")
            self._out.write(text)
            self._out.flush()
        elif isinstance(event, TurnEnded) and (sentence := describe_end(event.turn)):
            self._say(sentence)

    def show_result(self, result: ToolResult) -> None:
        """Answers alone are shown."""

    def show_turn(self, turn: Turn) -> None:
        """As above."""

    def end_turn(self) -> None:
        if self._mid_line:
            self._out.write("\n")
        self._out.flush()
        self._mid_line = False

    def note(self, sentence: str) -> None:
        self._say(sentence)

    def complain(self, error: ClientError | str) -> None:
        self._say(describe_error(error) if isinstance(error, ClientError) else error)

    def _say(self, sentence: str) -> None:
        self._err.write(f"strata: {harmless(sentence)}\n")
        self._err.flush()
