"""A chat: what is typed becomes turns, and what the server says is shown. It knows no terminal."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, assert_never

from server.cli.chat_commands import (
    HELP,
    AnswerCalls,
    CancelTurn,
    Command,
    Fork,
    Leave,
    Misspelt,
    ReplaceContext,
    Say,
    SendImage,
    ShowHelp,
)
from server.cli.chat_prompt import Asker
from server.cli.chat_screen import Screen
from server.cli.chat_text import describe_call
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

_SHOWN_TURNS: Final = 6
_NOT_RUNNING: Final = "turn_not_running"
_RESULT_QUESTION: Final = "result> "
_GO_ON_WITHOUT: Final = "The calls wait. /result answers them; a new message gives them up."


class ChatSession:
    """One conversation at a time, one turn at a time.

    `interrupt` may be called at any moment: the first time it asks the server to cancel the turn that runs, the second
    time it leaves the turn to the server.
    """

    def __init__(
        self,
        client: StrataClient,
        conversation: Conversation,
        *,
        screen: Screen,
        asker: Asker | None,
        tools: Mapping[str, ToolFunction],
    ) -> None:
        """Without an asker, calls of tools that are not here cannot be answered."""
        self.conversation_id = conversation.id
        self.pending: tuple[ToolCallBlock, ...] = conversation.pending_tool_calls
        self.interrupted = False
        self._client = client
        self._screen = screen
        self._asker = asker
        self._tools = tools
        self._reading: asyncio.Task[TurnEnded] | None = None
        self._stream: TurnStream | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self._left = False

    async def resume(self, conversation: Conversation) -> list[str]:
        """Shows the newest turns and joins one that runs. Gives what the user has typed in them."""
        newest: list[Turn] = []
        async for turn in self._client.list_turns(conversation.id, order="desc"):
            newest.append(turn)
            if len(newest) == _SHOWN_TURNS:
                break
        for turn in reversed(newest):
            self._screen.show_turn(turn)
        if conversation.state == ConversationState.RUNNING and newest:
            last = newest[0]
            # The answer to an input has the number behind it.
            seq = last.seq if last.kind == TurnKind.MODEL_RESPONSE else last.seq + 1
            self._screen.note(f"Turn {seq} is running.")
            await self._take(self._client.follow(conversation.id, seq))
        elif self.pending:
            await self.answer_calls()
        return [turn.text for turn in reversed(newest) if turn.kind == TurnKind.USER_TASK and turn.text]

    async def obey(self, command: Command) -> bool:
        """Does what was typed. False: the user wants to leave."""
        match command:
            case Say():
                await self.say(command.text)
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
            case Misspelt():
                self._screen.complain(command.sentence)
            case Leave():
                return False
            case _:
                assert_never(command)
        return True

    async def say(self, task: Task) -> bool:
        """A turn, and those that its tools need. Whether all of them completed and no call is left open."""
        options = TurnOptions(abandon_pending_calls=bool(self.pending))
        return await self._take(self._client.stream(self.conversation_id, task, options=options))

    async def answer_calls(self) -> bool:
        """Results for the calls that wait, and so on until the model asks for no more."""
        while self.pending:
            results = await self._gather_results(self.pending)
            if results is None:
                self._screen.complain(_GO_ON_WITHOUT)
                return False
            ended = await self._read_turn(self._client.stream(self.conversation_id, tool_results=results))
            if ended is None or ended.turn.state != TurnState.COMPLETE:
                return False
        return True

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.interrupted = True
        if self._reading is None:
            return
        if self._cancelling is None:
            seq = self._stream.seq if self._stream is not None else None
            self._cancelling = asyncio.create_task(self._cancel(seq))
        else:
            self._left = True
            self._reading.cancel()

    async def _take(self, stream: TurnStream) -> bool:
        ended = await self._read_turn(stream)
        complete = ended is not None and ended.turn.state == TurnState.COMPLETE
        return complete and await self.answer_calls()

    async def _read_turn(self, stream: TurnStream) -> TurnEnded | None:
        """The turn to its end, shown as it comes. None where it was left, refused or lost; that is shown too."""
        self._left, self._stream = False, stream
        self._screen.begin_turn()
        self._reading = asyncio.create_task(self._show(stream))
        try:
            ended = await self._reading
        except asyncio.CancelledError:
            if not self._left:
                raise
            self._screen.note("The turn is left to the server, where it goes on.")
            return None
        except ClientError as error:
            self._screen.complain(error)
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
            cancelling.cancel()  # the turn has ended, or nobody waits for it any more
            await asyncio.wait({cancelling})

    async def _cancel(self, seq: int | None) -> None:
        try:
            await self._client.cancel(self.conversation_id, seq)
        except StrataProblem as error:
            if error.code == _NOT_RUNNING and self._reading is not None:
                self._screen.note("The server has not begun the turn. Ctrl-C again leaves it.")
            else:
                self._screen.complain(error)
        except ClientError as error:
            self._screen.complain(error)

    async def _gather_results(self, calls: tuple[ToolCallBlock, ...]) -> list[ToolResult] | None:
        """Of the tools that are here, and of the user for the others. None where somebody would rather not."""
        results = []
        for call in calls:
            result = await call_tool(self._tools, call) if call.name in self._tools else await self._ask_result(call)
            if result is None:
                return None
            self._screen.show_result(result)
            results.append(result)
        return results

    async def _ask_result(self, call: ToolCallBlock) -> ToolResult | None:
        if self._asker is None:
            self._screen.complain(f"The model asks for {describe_call(call.name, call.arguments)}, which is not here.")
            return None
        self._screen.note(
            f"What does {describe_call(call.name, call.arguments)} give? JSON or text; /error TEXT, /skip."
        )
        typed = await self._asker.ask(_RESULT_QUESTION)
        if typed is None or typed.strip() == "/skip":
            return None
        return read_result(call.id, typed)

    async def _send_image(self, command: SendImage) -> None:
        try:
            data = await asyncio.to_thread(_read_file, command.path)
        except OSError as error:
            self._screen.complain(f"{command.path} cannot be read: {error.strerror}.")
            return
        text = [TextPart(text=command.text)] if command.text else []
        await self.say([ImagePart(data=data), *text])

    async def _replace_context(self, path: str) -> None:
        try:
            context = json.loads(await asyncio.to_thread(_read_file, path))
        except OSError as error:
            self._screen.complain(f"{path} cannot be read: {error.strerror}.")
            return
        except ValueError as error:
            self._screen.complain(f"{path} is no JSON: {error}.")
            return
        if not isinstance(context, dict):
            self._screen.complain(f"{path} has to hold a JSON object.")
            return
        try:
            await self._client.replace_context(self.conversation_id, context)
        except ClientError as error:
            self._screen.complain(error)
        else:
            self._screen.note("The context is replaced.")

    async def _fork(self, at_seq: int) -> None:
        try:
            fork = await self._client.fork_conversation(self.conversation_id, at_seq)
        except ClientError as error:
            self._screen.complain(error)
            return
        self.conversation_id, self.pending = fork.id, fork.pending_tool_calls
        self._screen.note(f"This is {fork.id} now, with the turns up to {at_seq}.")


def read_result(call_id: str, typed: str) -> ToolResult:
    """JSON where it is JSON, else text; behind `/error` it is an error."""
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
