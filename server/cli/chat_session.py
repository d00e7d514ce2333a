"""A chat without its terminal: the commands that a user can type, and the session that runs them."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias, assert_never

from server.cli.chat_screen import Screen
from server.cli.terminal import describe_call
from server.conversation.block import JsonValue, ToolCallBlock
from server.conversation.conversation import ConversationState
from server.conversation.turn import TurnKind, TurnState
from server.web.client import (
    ClientError,
    Conversation,
    ImagePart,
    StrataClient,
    StrataProblem,
    Task,
    TextPart,
    ToolFunction,
    ToolResult,
    Turn,
    TurnEnded,
    TurnOptions,
    TurnStream,
    call_tool,
)

HELP: Final = """\
Enter sends. Esc Enter, or a backslash at the end of a line, begins a new line.
Ctrl-C cancels the running turn, or clears the line. Ctrl-D exits.

/image PATH TEXT   send an image with a text; put a path with spaces in quotes
/context FILE      replace the conversation's context with the JSON object in a file
/fork N            continue in a new conversation with the turns up to number N
/result            enter the results of pending tool calls
/cancel            cancel a turn that is running without being shown
/exit              exit; the conversation is kept
To send a message that begins with a slash, type two slashes."""
_MAX_SHOWN_TURNS: Final = 6
_NOT_RUNNING: Final = "turn_not_running"
_RESULT_QUESTION: Final = "result> "
_CALLS_PENDING: Final = "The tool calls are pending. Use /result to enter their results; a new message abandons them."


@dataclass(frozen=True, slots=True, kw_only=True)
class SendText:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendImage:
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceContext:
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    at_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCalls:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTurn:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowHelp:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidCommand:
    """A line that is not a valid command. Nothing is sent."""

    message: str


Command: TypeAlias = (
    SendText | SendImage | ReplaceContext | Fork | AnswerCalls | CancelTurn | ShowHelp | Exit | InvalidCommand
)

_BARE: Final[dict[str, Command]] = {
    "/result": AnswerCalls(),
    "/cancel": CancelTurn(),
    "/help": ShowHelp(),
    "/exit": Exit(),
    "/quit": Exit(),
}


def parse_command(line: str) -> Command | None:
    """Parse a line. None if it is blank.

    A line without a leading slash is a message. Two leading slashes are a message that begins with one.
    """
    if not line.strip():
        return None
    if not line.startswith("/"):
        return SendText(text=line)
    if line.startswith("//"):
        return SendText(text=line[1:])
    name, _, rest = line.strip().partition(" ")
    return _BARE[name] if name in _BARE else _parse_with_argument(name, rest.strip())


def _parse_with_argument(name: str, rest: str) -> Command:
    match name:
        case "/fork":
            if rest.isdecimal():
                return Fork(at_seq=int(rest))
            return InvalidCommand(message="/fork needs the number of a turn.")
        case "/image":
            path, text = _split_path(rest)
            return (
                SendImage(path=path, text=text) if path else InvalidCommand(message="/image needs the path of a file.")
            )
        case "/context":
            path, _ = _split_path(rest)
            return (
                ReplaceContext(path=path) if path else InvalidCommand(message="/context needs the path of a JSON file.")
            )
        case _:
            return InvalidCommand(message=f"Unknown command {name}. /help lists the commands.")


def _split_path(text: str) -> tuple[str, str]:
    """Split a path, which is quoted if it contains spaces, from the text after it."""
    quote = text[:1]
    if quote in {'"', "'"} and quote in text[1:]:
        path, _, rest = text[1:].partition(quote)
    else:
        path, _, rest = text.partition(" ")
    return path, rest.strip()


class Prompt(Protocol):
    """Reads a line from the user."""

    async def ask(self, question: str) -> str | None:
        """Return the text that was typed. None if the user wants to exit."""


class ChatSession:
    """Runs one conversation at a time, and one turn at a time.

    `interrupt` may be called at any time. The first call asks the server to cancel the running turn; the second stops
    following the turn, which continues in the server.
    """

    def __init__(
        self,
        client: StrataClient,
        conversation: Conversation,
        *,
        screen: Screen,
        prompt: Prompt | None,
        tools: Mapping[str, ToolFunction],
    ) -> None:
        """Without a prompt, only calls of `tools` can be answered."""
        self.conversation_id = conversation.id
        self.pending: tuple[ToolCallBlock, ...] = conversation.pending_tool_calls
        self.interrupted = False
        self._client = client
        self._screen = screen
        self._prompt = prompt
        self._tools = tools
        self._reading: asyncio.Task[TurnEnded] | None = None
        self._stream: TurnStream | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self._unfollowed = False

    async def resume(self, conversation: Conversation) -> list[str]:
        """Show the newest turns and follow a running one. Returns the messages that the user typed in them."""
        newest: list[Turn] = []
        async for turn in self._client.list_turns(conversation.id, order="desc"):
            newest.append(turn)
            if len(newest) == _MAX_SHOWN_TURNS:
                break
        for turn in reversed(newest):
            self._screen.show_turn(turn)
        if conversation.state == ConversationState.RUNNING and newest:
            last = newest[0]
            # The answer has the number after its input.
            seq = last.seq if last.kind == TurnKind.MODEL_RESPONSE else last.seq + 1
            self._screen.note(f"Turn {seq} is running.")
            await self._take(self._client.follow(conversation.id, seq))
        elif self.pending:
            await self.answer_calls()
        return [turn.text for turn in reversed(newest) if turn.kind == TurnKind.USER_TASK and turn.text]

    async def run_command(self, command: Command) -> bool:
        """Run a command. Returns False if the user wants to exit."""
        match command:
            case SendText():
                await self.send(command.text)
            case SendImage():
                await self._send_image(command)
            case ReplaceContext():
                await self._replace_context(command.path)
            case Fork():
                await self._fork(command.at_seq)
            case AnswerCalls():
                await self.answer_calls()
            case CancelTurn():
                await self._cancel(None)
            case ShowHelp():
                self._screen.note(HELP)
            case InvalidCommand():
                self._screen.show_error(command.message)
            case Exit():
                return False
            case _:
                assert_never(command)
        return True

    async def send(self, task: Task) -> bool:
        """Send a task and the results of its tool calls. Returns whether all turns completed and no call is pending."""
        options = TurnOptions(abandon_pending_calls=bool(self.pending))
        return await self._take(self._client.stream(self.conversation_id, task, options=options))

    async def answer_calls(self) -> bool:
        """Answer pending tool calls until the model makes no more. Returns whether all turns completed."""
        while self.pending:
            results = await self._gather_results(self.pending)
            if results is None:
                self._screen.show_error(_CALLS_PENDING)
                return False
            ended = await self._read_turn(self._client.stream(self.conversation_id, tool_results=results))
            if ended is None or ended.turn.state != TurnState.COMPLETE:
                return False
        return True

    def interrupt(self) -> None:
        """Cancel the running turn, or stop following it if that was already requested."""
        self.interrupted = True
        if self._reading is None:
            return
        if self._cancelling is None:
            seq = self._stream.seq if self._stream is not None else None
            self._cancelling = asyncio.create_task(self._cancel(seq))
        else:
            self._unfollowed = True
            self._reading.cancel()

    async def _take(self, stream: TurnStream) -> bool:
        ended = await self._read_turn(stream)
        complete = ended is not None and ended.turn.state == TurnState.COMPLETE
        return complete and await self.answer_calls()

    async def _read_turn(self, stream: TurnStream) -> TurnEnded | None:
        """Show a turn to its end. None if the stream failed, or if the user stopped following it."""
        self._unfollowed, self._stream = False, stream
        self._screen.begin_turn()
        self._reading = asyncio.create_task(self._show(stream))
        try:
            ended = await self._reading
        except asyncio.CancelledError:
            if not self._unfollowed:
                raise
            self._screen.note("The turn continues in the server.")
            return None
        except ClientError as error:
            self._screen.show_error(error)
            return None
        finally:
            self._reading = None
            await self._end_cancelling()
            self._screen.end_turn()
        self.pending = ended.conversation.pending_tool_calls
        return ended

    async def _show(self, stream: TurnStream) -> TurnEnded:
        async with stream:
            async for event in stream:
                self._screen.show(event)
                if isinstance(event, TurnEnded):
                    return event
        raise AssertionError("a stream ends with the end of its turn")

    async def _end_cancelling(self) -> None:
        cancelling, self._cancelling = self._cancelling, None
        if cancelling is not None:
            cancelling.cancel()  # the turn has ended, or is no longer followed
            await asyncio.wait({cancelling})

    async def _cancel(self, seq: int | None) -> None:
        try:
            await self._client.cancel(self.conversation_id, seq)
        except StrataProblem as error:
            if error.code == _NOT_RUNNING and self._reading is not None:
                self._screen.note("The server has not started the turn yet. Press Ctrl-C again to stop waiting for it.")
            else:
                self._screen.show_error(error)
        except ClientError as error:
            self._screen.show_error(error)

    async def _gather_results(self, calls: tuple[ToolCallBlock, ...]) -> list[ToolResult] | None:
        """Call local tools, and prompt for the results of the others. None if the user skips a call."""
        results = []
        for call in calls:
            result = await call_tool(self._tools, call) if call.name in self._tools else await self._ask_result(call)
            if result is None:
                return None
            self._screen.show_result(result)
            results.append(result)
        return results

    async def _ask_result(self, call: ToolCallBlock) -> ToolResult | None:
        described = describe_call(call.name, call.arguments)
        if self._prompt is None:
            self._screen.show_error(f"The model called {described}, which is not available here.")
            return None
        self._screen.note(f"Result of {described}? Enter JSON, text, /error TEXT or /skip.")
        typed = await self._prompt.ask(_RESULT_QUESTION)
        if typed is None or typed.strip() == "/skip":
            return None
        return read_result(call.id, typed)

    async def _send_image(self, command: SendImage) -> None:
        try:
            data = await asyncio.to_thread(_read_file, command.path)
        except OSError as error:
            self._screen.show_error(f"{command.path} cannot be read: {error.strerror}.")
            return
        text = [TextPart(text=command.text)] if command.text else []
        await self.send([ImagePart(data=data), *text])

    async def _replace_context(self, path: str) -> None:
        try:
            context = json.loads(await asyncio.to_thread(_read_file, path))
        except OSError as error:
            self._screen.show_error(f"{path} cannot be read: {error.strerror}.")
            return
        except ValueError as error:
            self._screen.show_error(f"{path} is not JSON: {error}.")
            return
        if not isinstance(context, dict):
            self._screen.show_error(f"{path} must contain a JSON object.")
            return
        try:
            await self._client.replace_context(self.conversation_id, context)
        except ClientError as error:
            self._screen.show_error(error)
        else:
            self._screen.note("The context was replaced.")

    async def _fork(self, at_seq: int) -> None:
        try:
            fork = await self._client.fork_conversation(self.conversation_id, at_seq)
        except ClientError as error:
            self._screen.show_error(error)
            return
        self.conversation_id, self.pending = fork.id, fork.pending_tool_calls
        self._screen.note(f"Continuing in {fork.id}, with the turns up to {at_seq}.")


def read_result(call_id: str, typed: str) -> ToolResult:
    """Parse a result: JSON if possible, otherwise text. After `/error` it is an error."""
    is_error = typed.startswith("/error")
    text = typed.removeprefix("/error").strip() if is_error else typed
    output: JsonValue
    try:
        output = json.loads(text)
    except ValueError:
        output = text
    return ToolResult(tool_call_id=call_id, output=output, is_error=is_error)


def _read_file(path: str) -> bytes:
    return Path(path).expanduser().read_bytes()
