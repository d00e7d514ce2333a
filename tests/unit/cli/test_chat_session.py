"""A chat without a terminal: messages become turns, tool calls are answered, Ctrl-C cancels only the turn."""

import asyncio
import json
from collections import deque
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from server.cli.chat import DEMO_FUNCTIONS, DEMO_TOOLS
from server.cli.chat_screen import TerminalScreen
from server.cli.chat_session import ChatSession, parse_command, read_result
from server.web.client import StrataClient, ToolResult
from tests.support.fakes.scripted_strata import (
    CONVERSATION_ID,
    ScriptedStrata,
    answer_events,
    answer_json,
    called,
    failed,
    problem,
    status_of,
    turn_json,
)

CONVERSATION = f"/v1/conversations/{CONVERSATION_ID}"
WEATHER = {"id": "call_1", "name": "get_weather", "arguments": {"city": "Oslo"}}
TIME = {"id": "call_2", "name": "get_time", "arguments": {}}


class Typist:
    """Answers questions with prepared lines, then ends the input."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque()

    async def ask(self, question: str) -> str | None:
        return self.lines.popleft() if self.lines else None


class Chat:
    """A session, its output, and the prepared answers to its questions."""

    def __init__(self, client: StrataClient, *, asks: bool = True) -> None:
        self.client = client
        self.out = StringIO()
        self.typist = Typist()
        self._asks = asks
        self.screen = TerminalScreen(Console(file=self.out, highlight=False), thinking=True)

    async def open(self) -> ChatSession:
        self.conversation = await self.client.load_conversation(CONVERSATION_ID)
        self.session = ChatSession(
            self.client,
            self.conversation,
            screen=self.screen,
            prompt=self.typist if self._asks else None,
            tools=DEMO_FUNCTIONS,
        )
        return self.session

    async def type(self, line: str) -> bool:
        command = parse_command(line)
        assert command is not None
        return await self.session.run_command(command)

    @property
    def shown(self) -> str:
        return self.out.getvalue()


@pytest.fixture
async def chat(client: StrataClient) -> Chat:
    chat = Chat(client)
    await chat.open()
    return chat


def turns_of(strata: ScriptedStrata) -> list[Any]:
    return [request.body for request in strata.asked("POST", f"{CONVERSATION}/turns")]


async def test_a_message_is_a_turn_and_its_answer_is_shown(chat: Chat, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda seq: answer_events(seq, "Hel", "lo.", thinking="Hm."))
    assert await chat.type("Hi")
    assert turns_of(strata) == [{"input": "Hi", "on_busy": "reject"}]
    assert chat.shown.startswith("Hm.\nHello.\nturn 2 · 1,000 in (80 % cached) · 12 out · $0.0123")


async def test_local_tools_run_and_the_user_is_prompted_for_other_results(chat: Chat, strata: ScriptedStrata) -> None:
    strata.replies.extend([lambda seq: called(seq, WEATHER, TIME), lambda seq: answer_events(seq, "Cold.")])
    chat.typist.lines.append('{"celsius": 4}')
    assert await chat.session.send("Weather?")
    weather, time = turns_of(strata)[1]["tool_results"]
    assert weather == {"tool_call_id": "call_1", "output": {"celsius": 4}, "is_error": False}
    assert time["tool_call_id"] == "call_2"
    assert not time["is_error"]
    assert '→ get_weather(city="Oslo")' in chat.shown
    assert "Cold." in chat.shown


async def test_skipped_calls_stay_pending_and_can_be_answered_later(chat: Chat, strata: ScriptedStrata) -> None:
    strata.replies.extend([lambda seq: called(seq, WEATHER), lambda seq: answer_events(seq, "Cold.")])
    chat.typist.lines.append("/skip")
    assert not await chat.session.send("Weather?")
    assert "The tool calls are pending." in chat.shown
    chat.typist.lines.append("rain")
    await chat.type("/result")
    assert turns_of(strata)[1]["tool_results"][0]["output"] == "rain"
    assert chat.session.pending == ()


async def test_a_new_message_abandons_pending_calls(chat: Chat, strata: ScriptedStrata) -> None:
    strata.replies.extend([lambda seq: called(seq, WEATHER), lambda seq: answer_events(seq, "Fine.")])
    await chat.session.send("Weather?")
    await chat.session.send("Never mind.")
    first, second = turns_of(strata)
    assert "abandon_pending_calls" not in first
    assert second["abandon_pending_calls"] is True


async def test_a_call_of_a_missing_tool_fails_without_a_prompt(client: StrataClient, strata: ScriptedStrata) -> None:
    chat = Chat(client, asks=False)
    session = await chat.open()
    strata.replies.append(lambda seq: called(seq, WEATHER))
    assert not await session.send("Weather?")
    assert "which is not available here" in chat.shown


@pytest.mark.parametrize(
    ("typed", "output", "is_error"),
    [
        ("4", 4, False),
        ("cold", "cold", False),
        ('{"a": [1]}', {"a": [1]}, False),
        ("/error no network", "no network", True),
        ("", "", False),
    ],
)
def test_a_typed_result_is_json_or_text(typed: str, output: object, *, is_error: bool) -> None:
    assert read_result("call_1", typed) == ToolResult(tool_call_id="call_1", output=output, is_error=is_error)


async def test_a_failed_turn_is_shown_and_the_chat_continues(chat: Chat, strata: ScriptedStrata) -> None:
    strata.replies.extend([lambda seq: failed(seq, "Hel"), lambda seq: answer_events(seq, "Hello.")])
    assert not await chat.session.send("Hi")
    assert "Hel\nThe provider is overloaded. Try again in a moment. [provider_overloaded]" in chat.shown
    assert await chat.session.send("Hi")


async def test_a_rejected_request_is_shown_on_one_line(chat: Chat, strata: ScriptedStrata) -> None:
    strata.script("POST", f"{CONVERSATION}/turns", problem(401, "key_rejected", "The key is unknown.", "Make one."))
    assert not await chat.session.send("Hi")
    assert chat.shown == "The key is unknown. Make one. [key_rejected]\n"


async def begin_turn(chat: Chat, strata: ScriptedStrata) -> asyncio.Task[bool]:
    """A turn that has streamed some text and has not ended."""
    strata.replies.append(lambda seq: answer_events(seq, "Hel", state="cancelled", stop_reason="aborted"))
    strata.held.clear()
    strata.request_came.clear()
    taking = asyncio.create_task(chat.session.send("Hi"))
    while "Hel" not in chat.shown:  # noqa: ASYNC110  reason: what is shown has no event to wait for
        await asyncio.sleep(0.001)
    return taking


async def test_ctrl_c_cancels_the_turn_and_keeps_the_partial_answer(chat: Chat, strata: ScriptedStrata) -> None:
    cancelled = {"turn": turn_json(2, [], state="cancelled"), "conversation": status_of(2)}
    strata.script("POST", f"{CONVERSATION}/cancel", answer_json(cancelled))
    taking = await begin_turn(chat, strata)
    strata.request_came.clear()
    chat.session.interrupt()
    await strata.request_came.wait()
    strata.held.set()
    assert not await taking
    assert strata.asked("POST", f"{CONVERSATION}/cancel")[0].body == {"turn_seq": 2}
    assert "Hel\nCancelled. The partial answer is kept.\n" in chat.shown
    strata.replies.append(lambda seq: answer_events(seq, "Hello."))
    assert await chat.session.send("Again.")


async def test_ctrl_c_twice_stops_following_the_turn(chat: Chat, strata: ScriptedStrata) -> None:
    strata.script("POST", f"{CONVERSATION}/cancel", problem(409, "turn_not_running", x_should_retry="false"))
    taking = await begin_turn(chat, strata)
    chat.session.interrupt()
    chat.session.interrupt()
    assert not await taking
    assert "continues in the server" in chat.shown


async def test_ctrl_c_without_a_turn_does_nothing(chat: Chat, strata: ScriptedStrata) -> None:
    chat.session.interrupt()
    strata.replies.append(lambda seq: answer_events(seq, "Hello."))
    assert await chat.session.send("Hi")
    assert not strata.asked("POST", f"{CONVERSATION}/cancel")


async def test_cancelling_the_task_of_a_chat_ends_it(chat: Chat, strata: ScriptedStrata) -> None:
    taking = await begin_turn(chat, strata)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking


async def test_a_running_turn_is_cancelled_by_command(chat: Chat, strata: ScriptedStrata) -> None:
    strata.script("POST", f"{CONVERSATION}/cancel", problem(409, "turn_not_running", "Nothing runs."))
    assert await chat.type("/cancel")
    assert "Nothing runs." in chat.shown


async def test_resuming_shows_the_newest_turns_and_follows_the_running_one(
    client: StrataClient, strata: ScriptedStrata
) -> None:
    strata.replies.append(lambda seq: answer_events(seq, "Hel", "lo."))
    await client.start(CONVERSATION_ID, "Hi")
    task = {"seq": 1, "kind": "user_task", "state": "complete", "blocks": [{"type": "text", "text": "Hi"}]}
    strata.script("GET", f"{CONVERSATION}/turns", answer_json({"data": [task], "next_cursor": None}))
    strata.conversation["state"] = "running"
    chat = Chat(client)
    session = await chat.open()
    assert await session.resume(chat.conversation) == ["Hi"]
    assert chat.shown.startswith("> Hi\nTurn 2 is running.\nHello.\nturn 2 · ")


async def test_resuming_prompts_for_pending_results(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.conversation.update(status_of(2, [WEATHER]))
    answered = [turn_json(seq, [{"type": "text", "text": f"Answer {seq}."}]) for seq in range(20, 1, -2)]
    strata.script("GET", f"{CONVERSATION}/turns", answer_json({"data": answered, "next_cursor": "more"}))
    strata.replies.append(lambda seq: answer_events(seq, "Cold."))
    chat = Chat(client)
    session = await chat.open()
    chat.typist.lines.append("4")
    await session.resume(chat.conversation)
    assert "Answer 8." not in chat.shown
    assert "Answer 10." in chat.shown
    assert chat.shown.index("Answer 10.") < chat.shown.index("Answer 20.") < chat.shown.index("Cold.")
    assert turns_of(strata)[0]["tool_results"][0]["output"] == 4


async def test_an_image_is_sent_with_its_text(chat: Chat, strata: ScriptedStrata, tmp_path: Path) -> None:
    path = tmp_path / "my cat.png"
    path.write_bytes(b"\x89PNG")
    strata.replies.append(lambda seq: answer_events(seq, "A cat."))
    await chat.type(f"/image '{path}' What is this?")
    assert [part["type"] for part in turns_of(strata)[0]["input"]] == ["image", "text"]


async def test_the_context_is_replaced_from_a_file(chat: Chat, strata: ScriptedStrata, tmp_path: Path) -> None:
    strata.script("PUT", f"{CONVERSATION}/context", answer_json(strata.conversation))
    path = tmp_path / "context.json"
    path.write_text(json.dumps({"todos": ["tea"]}))
    await chat.type(f"/context {path}")
    assert strata.asked("PUT", f"{CONVERSATION}/context")[0].body == {"todos": ["tea"]}
    assert "The context was replaced." in chat.shown


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/image {dir}/none.png x", "none.png cannot be read: No such file or directory."),
        ("/context {dir}/none.json", "none.json cannot be read: No such file or directory."),
        ("/context {dir}/text", "text is not JSON"),
        ("/context {dir}/list", "list must contain a JSON object."),
        ("/fork 3", "It cannot be. [turn_not_found]"),
        ("/frok", "Unknown command /frok. /help lists the commands."),
        ("/help", "Ctrl-C cancels the running turn"),
    ],
)
async def test_an_impossible_command_prints_a_message_and_sends_nothing(
    chat: Chat, strata: ScriptedStrata, tmp_path: Path, line: str, sentence: str
) -> None:
    (tmp_path / "text").write_text("{")
    (tmp_path / "list").write_text("[]")
    strata.script("POST", f"{CONVERSATION}/fork", problem(404, "turn_not_found"))
    assert await chat.type(line.format(dir=tmp_path))
    assert sentence in chat.shown
    assert not turns_of(strata)


async def test_the_chat_continues_in_a_fork(chat: Chat, strata: ScriptedStrata) -> None:
    strata.script("POST", f"{CONVERSATION}/fork", answer_json({**strata.conversation, "id": "conv_2"}, status=201))
    await chat.type("/fork 2")
    assert chat.session.conversation_id == "conv_2"
    assert "Continuing in conv_2" in chat.shown


async def test_exit_ends_the_chat(chat: Chat) -> None:
    assert not await chat.type("/exit")


def test_the_demo_tools_match_their_declarations() -> None:
    assert {tool.name for tool in DEMO_TOOLS} == set(DEMO_FUNCTIONS)
    assert {DEMO_FUNCTIONS["roll_dice"](sides=2) for _ in range(200)} == {1, 2}
