"""The Python client against the whole program: real HTTP, real Postgres, both providers emulated."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.conversation.block import ImageBlock
from server.conversation.turn import TurnState
from server.emulator.reply import FaultKind, Reply, ToolCall
from server.web.client import (
    AnswerMalformed,
    AssistantDraft,
    Conversation,
    ConversationChange,
    ConversationDraft,
    ImagePart,
    Instructions,
    RetryBudget,
    StrataClient,
    StrataProblem,
    TextPart,
    ThinkingDelta,
    ToolRan,
    TurnFailed,
    TurnOptions,
)
from tests.conftest import StrataServer
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.cutting_proxy import open_cutting_proxy
from tests.support.strata_process import PROJECT, environment
from tests.support.turn_service_driver import WEATHER

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360f8cfc000000301010018dd8db00000000049454e44ae426082"
)
QUICK = RetryBudget(seconds=20, first_wait_seconds=0.001, max_wait_seconds=0.05)
CALLS = Reply(
    thinking="I have to look.",
    tool_calls=(
        ToolCall(name="get_weather", arguments={"city": "Oslo"}),
        ToolCall(name="get_weather", arguments={"city": "Bergen"}),
    ),
)


@pytest.fixture
async def client(strata_server: StrataServer) -> AsyncIterator[StrataClient]:
    async with StrataClient(strata_server.url, strata_server.client_key, retry_budget=QUICK) as client:
        yield client


async def start_conversation(client: StrataClient, provider: str, model: str) -> Conversation:
    draft = AssistantDraft(
        name="helper",
        provider=provider,
        model=model,
        instructions=Instructions(roles="You are {{ assistant.name }}."),
        tools=(WEATHER,),
    )
    assistant = await client.create_assistant(draft)
    return await client.create_conversation(ConversationDraft(assistant_id=assistant.id))


async def test_assistants_and_conversations_are_stored(client: StrataClient) -> None:
    draft = AssistantDraft(name="helper", description="Helps.", variables={"tone": "kind"}, tools=(WEATHER,))
    made = await client.create_assistant(draft)
    assert made.definition.tools == (WEATHER,)
    revised = await client.revise_assistant(made.id, AssistantDraft(name="helper", description="Helps more."))
    assert (revised.id, revised.version) == (made.id, 2)
    assert await client.load_assistant(made.id, version=1) == made
    assert [assistant.version for assistant in [item async for item in client.list_assistants()]] == [2]

    first = await client.create_conversation(
        ConversationDraft(assistant_id=made.id, assistant_version=1, identifier="one", metadata={"a": 1})
    )
    second = await client.create_conversation(ConversationDraft(assistant_id=made.id))
    assert (first.identifier, first.assistant_version, second.assistant_version) == ("one", 1, 2)
    assert [item.id async for item in client.list_conversations(assistant_id=made.id)] == [second.id, first.id]
    assert [item.id async for item in client.list_conversations(identifier="one")] == [first.id]

    changed = await client.change_conversation(first.id, ConversationChange(latest=True, args={"tone": "dry"}))
    assert (changed.assistant_version, changed.args, changed.metadata) == (2, {"tone": "dry"}, {"a": 1})
    with pytest.raises(StrataProblem) as caught:
        await client.replace_context(first.id, {}, expected_revision=first.revision)
    assert caught.value.code == "revision_mismatch"
    replaced = await client.replace_context(first.id, {"todos": ["tea"]}, expected_revision=changed.revision)
    assert (await client.load_conversation(first.id)).context == replaced.context == {"todos": ["tea"]}

    assert (await client.delete_conversation(first.id, dry_run=True)).rows["conversations"] == 1
    assert not (await client.delete_conversation(first.id)).dry_run
    with pytest.raises(StrataProblem) as caught:
        await client.load_conversation(first.id)
    assert (caught.value.code, caught.value.status) == ("conversation_not_found", 404)
    assert caught.value.request_id


@pytest.mark.parametrize("provider", BOTH)
async def test_a_tool_loop_ends_with_an_answer(
    client: StrataClient, emulated: EmulatedProviders, provider: str
) -> None:
    conversation = await start_conversation(client, provider, emulated[provider].model)
    emulated[provider].queue_replies(CALLS)

    def get_weather(city: str) -> dict[str, int]:
        if city == "Bergen":
            raise LookupError("it rains too hard to tell")
        return {"celsius": 4}

    async with client.run_tools(conversation.id, "Weather?", {"get_weather": get_weather}) as loop:
        ran = [event.result async for event in loop if isinstance(event, ToolRan)]
        ended = await loop.result()
    assert [result.is_error for result in ran] == [False, True]
    assert (ended.turn.seq, ended.turn.state, ended.conversation.state) == (4, TurnState.COMPLETE, "idle")
    assert ended.turn.text
    assert ended.turn.usage is not None
    turns = [turn async for turn in client.list_turns(conversation.id)]
    assert [turn.kind for turn in turns] == ["user_task", "model_response", "tool_response", "model_response"]
    assert turns[3] == await client.load_turn(conversation.id, 4)


@pytest.mark.parametrize("provider", BOTH)
async def test_cut_connections_lose_and_repeat_nothing(
    strata_server: StrataServer, client: StrataClient, emulated: EmulatedProviders, provider: str
) -> None:
    conversation = await start_conversation(client, provider, emulated[provider].model)
    async with open_cutting_proxy(strata_server.url) as proxy:
        for round_number, cuts in enumerate([[0], [100], [500, 0, 700], [900, 900, 900], [1500]]):
            proxy.cuts.extend(cuts)
            async with StrataClient(proxy.url, strata_server.client_key, retry_budget=QUICK) as far:
                async with far.stream(conversation.id, f"Story number {round_number}, please.") as stream:
                    events = [event async for event in stream]
                assert stream.seq is not None
                async with client.follow(conversation.id, stream.seq) as again:
                    assert events == [event async for event in again]
            proxy.cuts.clear()
        assert proxy.connections_made > 5
    assert len(emulated[provider].requests()) == 5


async def test_the_same_key_is_the_same_turn(client: StrataClient, emulated: EmulatedProviders) -> None:
    conversation = await start_conversation(client, "gemini", emulated.gemini.model)
    options = TurnOptions(idempotency_key="mine")
    first = await client.send(conversation.id, "Hi", options=options)
    async with client.stream(conversation.id, "Hi", options=options) as stream:
        assert stream.replayed
        assert await stream.result() == first
    assert len(emulated.gemini.requests()) == 1
    with pytest.raises(StrataProblem) as caught:
        await client.send(conversation.id, "Ho", options=options)
    assert caught.value.code == "idempotency_key_reused"


async def test_a_running_turn_is_followed_and_cancelled(client: StrataClient, emulated: EmulatedProviders) -> None:
    conversation = await start_conversation(client, "gemini", emulated.gemini.model)
    emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=4)
    started = await client.start(conversation.id, "Tell me a story.")
    assert (started.turn.seq, started.turn.state) == (2, "running")
    assert (await client.load_turn(conversation.id, 2)).state == "running"
    async with client.follow(conversation.id, 2) as stream:
        async for event in stream:
            if isinstance(event, ThinkingDelta):
                break
        cancelled = await client.cancel(conversation.id, 2)
        ended = await stream.result()
    assert cancelled.turn == ended.turn
    assert ended.turn.state == TurnState.CANCELLED
    assert ended.turn.blocks
    with pytest.raises(StrataProblem) as caught:
        await client.cancel(conversation.id)
    assert caught.value.code == "turn_not_running"


async def test_a_failed_turn_keeps_what_had_arrived(client: StrataClient, emulated: EmulatedProviders) -> None:
    conversation = await start_conversation(client, "anthropic", emulated.anthropic.model)
    emulated.anthropic.inject_fault(FaultKind.CUT, after_chunks=6)
    with pytest.raises(TurnFailed) as caught:
        await client.send(conversation.id, "Tell me a story.")
    assert caught.value.code == "provider_disconnected"
    assert caught.value.hint
    assert (await client.load_turn(conversation.id, 2)) == caught.value.ended.turn
    assert (await client.send(conversation.id, "Go on.")).turn.state == TurnState.COMPLETE


async def test_pending_calls_have_to_be_answered_or_abandoned(
    client: StrataClient, emulated: EmulatedProviders
) -> None:
    conversation = await start_conversation(client, "gemini", emulated.gemini.model)
    emulated.gemini.queue_replies(CALLS)
    ended = await client.send(conversation.id, "Weather?")
    loaded = await client.load_conversation(conversation.id)
    assert loaded.pending_tool_calls == ended.conversation.pending_tool_calls == ended.turn.tool_calls
    with pytest.raises(StrataProblem) as caught:
        await client.send(conversation.id, "Never mind.")
    assert caught.value.code == "history_rule_broken"
    options = TurnOptions(abandon_pending_calls=True)
    assert (await client.send(conversation.id, "Never mind.", options=options)).turn.state == TurnState.COMPLETE


async def test_a_fork_has_the_turns_up_to_its_position(client: StrataClient, emulated: EmulatedProviders) -> None:
    conversation = await start_conversation(client, "gemini", emulated.gemini.model)
    for task in ("One.", "Two."):
        await client.send(conversation.id, task)
    fork = await client.fork_conversation(conversation.id, 2)
    assert fork.forked_from is not None
    assert (fork.forked_from.conversation_id, fork.forked_from.seq) == (conversation.id, 2)
    assert [turn.seq async for turn in client.list_turns(fork.id)] == [1, 2]
    assert (await client.send(fork.id, "Three.")).turn.seq == 4


@pytest.mark.parametrize("provider", BOTH)
async def test_an_image_reaches_the_model(client: StrataClient, emulated: EmulatedProviders, provider: str) -> None:
    conversation = await start_conversation(client, provider, emulated[provider].model)
    await client.send(conversation.id, [TextPart(text="What is this?"), ImagePart(data=PNG)])
    task = await client.load_turn(conversation.id, 1)
    image = next(block for block in task.blocks if isinstance(block, ImageBlock))
    assert (image.media_type, image.size_bytes) == ("image/png", len(PNG))
    assert "image/png" in str(emulated[provider].requests()[-1]["body"])


async def test_a_wrong_key_is_reported(strata_server: StrataServer) -> None:
    async with StrataClient(strata_server.url, "strata_wrong", retry_budget=QUICK) as client:
        with pytest.raises(StrataProblem) as caught:
            await anext(client.list_assistants())
    assert (caught.value.code, caught.value.status) == ("key_rejected", 401)


async def test_the_program_in_the_docs_runs(strata_server: StrataServer, tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", (PROJECT / "docs/guides/python-client.md").read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    settings = {"STRATA_URL": strata_server.url, "STRATA_API_KEY": strata_server.client_key}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(tmp_path / "program.py"),
        env=environment({**settings, "PYTHONPATH": str(PROJECT)}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "Usage(" in out.decode()
    assert "celsius" in out.decode()


async def test_following_beyond_the_end_reports_that_nothing_is_left(client: StrataClient) -> None:
    conversation = await start_conversation(client, "gemini", "gemini-3.1-pro-preview")
    async with client.stream(conversation.id, "Hello") as stream:
        await stream.result()
    with pytest.raises(AnswerMalformed, match="no events after"):
        async with client.follow(conversation.id, 2, after=stream.last_event_id) as again:
            await again.result()
