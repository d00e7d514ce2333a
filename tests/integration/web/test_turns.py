"""Turns over real HTTP: the whole program, the real database, and the emulators of the providers."""

import asyncio
import base64
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from server.app.settings import Settings
from server.conversation.conversation import ConversationState
from server.emulator.reply import FaultKind, Reply, ToolCall
from tests.conftest import StrataServer
from tests.support.builders import NASTY
from tests.support.conversation_driver import eventually
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.fakes.log_capture import capture_log
from tests.support.http_driver import ApiClient, open_api, turns

RAIN = Reply(thinking="Rain?", text="It rains in Oslo.")
ASKS = Reply(thinking="I have to look.", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Oslo"}),))
WAIT_SECONDS = 20


@pytest.fixture
async def api(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server) as opened:
        yield opened


@pytest.mark.parametrize("provider", BOTH)
async def test_a_turn_is_answered_after_its_end(api: ApiClient, emulated: EmulatedProviders, provider: str) -> None:
    conversation = await api.begin(provider)
    emulated[provider].queue_replies(RAIN)
    taken = await api.say(conversation, "What is the weather in Oslo?")
    turn = taken["turn"]
    assert (turn["seq"], turn["kind"], turn["state"], turn["stop_reason"]) == (
        2,
        "model_response",
        "complete",
        "end_turn",
    )
    assert (turn["provider"], turn["model"]) == (provider, emulated[provider].model)
    assert [block["text"] for block in turn["blocks"] if block["type"] == "text"] == ["It rains in Oslo."]
    assert turn["error"] is None
    assert turn["usage"]["output_tokens"] > 0
    assert turn["cost_usd"] > 0
    assert taken["conversation"] == {"id": conversation, "revision": 2, "state": "idle", "pending_tool_calls": []}
    assert await api.expect(200, "GET", turns(conversation, 2)) == turn


@pytest.mark.parametrize("provider", BOTH)
async def test_a_stream_has_the_events_of_the_turn_and_can_be_resumed_from_any_event(
    api: ApiClient, emulated: EmulatedProviders, provider: str
) -> None:
    conversation = await api.begin(provider)
    emulated[provider].queue_replies(RAIN)
    streamed = await api.read_events("POST", turns(conversation), {"input": "What is the weather in Oslo?"})
    assert [number for number, _, _ in streamed] == list(range(1, len(streamed) + 1))
    assert streamed[0][1:] == ("turn.started", {"conversation_id": conversation, "input_seq": 1, "seq": 2})
    assert "".join(data["text"] for _, name, data in streamed if name == "text.delta") == "It rains in Oslo."
    name, end = streamed[-1][1:]
    assert name == "turn.completed"
    assert end["turn"] == await api.expect(200, "GET", turns(conversation, 2))
    assert end["conversation"]["revision"] == 2
    events = f"{turns(conversation, 2)}/events"
    assert await api.read_events("GET", events) == streamed
    for after in range(len(streamed)):
        assert await api.read_events("GET", events, last_event_id=str(after)) == streamed[after:]
    for after in (len(streamed), len(streamed) + 1):
        nothing_left = await api.ask("GET", events, last_event_id=str(after))
        assert (nothing_left.status_code, nothing_left.content) == (204, b"")
    assert await api.read_events("GET", f"{events}?after=2") == streamed[2:]


async def test_the_stream_has_the_headers_for_proxies(api: ApiClient) -> None:
    conversation = await api.begin()
    async with api.listen("POST", turns(conversation), {"input": "Hello"}) as (answer, events):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "x-request-id" in answer.headers
        assert "idempotency-replayed" not in answer.headers
        assert [name async for _, name, _ in events][-1] == "turn.completed"


@pytest.mark.parametrize("provider", BOTH)
async def test_a_tool_loop_shows_everything_but_the_signatures(
    api: ApiClient, emulated: EmulatedProviders, provider: str
) -> None:
    conversation = await api.begin(provider)
    emulated[provider].queue_replies(ASKS, RAIN)
    streamed = await api.read_events("POST", turns(conversation), {"input": "What is the weather in Oslo?"})
    end = streamed[-1][2]
    (call,) = end["conversation"]["pending_tool_calls"]
    assert (call["name"], call["arguments"]) == ("get_weather", {"city": "Oslo"})
    assert end["conversation"]["state"] == "awaiting_tools"
    assert end["turn"]["stop_reason"] == "tool_use"
    assert [data for _, name, data in streamed if name == "tool_call.end"] == [call]
    shown = await api.ask("GET", f"/v1/conversations/{conversation}")
    assert shown.json()["pending_tool_calls"] == [call]
    results = {"tool_results": [{"tool_call_id": call["id"], "output": {"celsius": 4}}]}
    final = await api.ask("POST", turns(conversation), results)
    assert final.json()["conversation"]["state"] == "idle"
    page = await api.ask("GET", turns(conversation))
    assert [turn["kind"] for turn in page.json()["data"]] == [
        "user_task", "model_response", "tool_response", "model_response",
    ]  # fmt: skip
    everything = f"{streamed}{shown.text}{final.text}{page.text}"
    secrets = {text for asked in emulated[provider].requests() for text in signatures(asked)}
    assert secrets, "the emulator saw no signature, so this test shows nothing"
    for secret in secrets:
        assert secret not in everything
        assert base64.b64decode(secret + "==").hex() not in everything


def signatures(node: Any) -> list[str]:
    """Every signature in a request that a provider received."""
    match node:
        case dict():
            own = [node[name] for name in ("signature", "thoughtSignature", "thought_signature") if name in node]
            return [text for text in own if isinstance(text, str) and re.fullmatch(r"[\w+/=-]{16,}", text)] + [
                text for value in node.values() for text in signatures(value)
            ]
        case list():
            return [text for value in node for text in signatures(value)]
        case str() if node.startswith(("{", "[")):
            return re.findall(r'ignature":\s*"([\w+/=-]{16,})"', node)
        case bytes():
            return signatures(node.decode())
        case _:
            return []


async def test_a_request_that_would_break_the_history_is_refused_and_nothing_is_stored(
    api: ApiClient, emulated: EmulatedProviders
) -> None:
    conversation = await api.begin()
    emulated.gemini.queue_replies(ASKS)
    await api.say(conversation)
    for body in (
        {"input": "Never mind."},
        {"tool_results": [{"tool_call_id": "call_other", "output": 1}]},
        {"tool_results": [{"tool_call_id": "call_other", "output": 1}] * 2},
    ):
        problem = await api.expect(422, "POST", turns(conversation), body)
        assert problem["code"] == "history_rule_broken"
        assert problem["rule"]
        assert ("abandon_pending_calls" in problem["hint"]) is ("input" in body)
    assert (await api.expect(200, "GET", f"/v1/conversations/{conversation}"))["revision"] == 2
    taken = await api.expect(200, "POST", turns(conversation), {"input": "Never mind.", "abandon_pending_calls": True})
    assert taken["turn"]["seq"] == 4


async def test_a_repeated_key_gives_the_same_turn_and_another_body_is_refused(
    api: ApiClient, emulated: EmulatedProviders
) -> None:
    conversation = await api.begin()
    first = await api.ask("POST", turns(conversation), {"input": "Hello"}, idempotency_key="key 1")
    assert "idempotency-replayed" not in first.headers
    again = await api.ask(
        "POST", turns(conversation), {"input": [{"type": "text", "text": "Hello"}]}, idempotency_key="key 1"
    )
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == first.json()
    async with api.listen("POST", turns(conversation), {"input": "Hello"}, idempotency_key="key 1") as (
        answer,
        events,
    ):
        assert answer.headers["idempotency-replayed"] == "true"
        assert [event async for event in events][-1][2] == first.json()
    other = await api.ask("POST", turns(conversation), {"input": "Bye"}, idempotency_key="key 1")
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")
    assert other.headers["x-should-retry"] == "false"
    assert len(emulated.gemini.requests()) == 1


async def test_a_declared_retry_is_recognised_without_a_key(api: ApiClient, emulated: EmulatedProviders) -> None:
    conversation = await api.begin()
    first = await api.say(conversation, "Hello", x_stainless_retry_count="0")
    assert await api.say(conversation, "Hello", x_stainless_retry_count="1") == first
    assert (await api.say(conversation, "Hello"))["turn"]["seq"] == 4
    assert len(emulated.gemini.requests()) == 2


@pytest.mark.parametrize("key", ["", "x" * 256, "é", "tab\there"])
async def test_an_invalid_key_is_refused(api: ApiClient, key: str) -> None:
    answer = await api.client.post(
        turns("conv_x"),
        content=b'{"input": "Hello"}',
        headers=[(b"authorization", f"Bearer {api.key}".encode()), (b"idempotency-key", key.encode())],
    )
    assert answer.status_code == 422
    assert answer.json()["errors"] == [
        {
            "path": "idempotency-key",
            "source": "header",
            "message": "Expected 1 to 255 printable ASCII characters",
        }
    ]


async def test_a_turn_can_run_without_a_waiting_client(api: ApiClient, emulated: EmulatedProviders) -> None:
    conversation = await api.begin()
    emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=1)
    answer = await api.ask("POST", turns(conversation), {"input": "Hello"}, prefer="respond-async")
    assert answer.status_code == 202
    assert answer.json()["turn"] == {"seq": 2, "kind": "model_response", "state": "running"}
    assert answer.json()["conversation"]["state"] == "running"
    assert answer.headers["location"] == turns(conversation, 2)
    assert answer.headers["preference-applied"] == "respond-async"
    running = await api.ask("GET", answer.headers["location"])
    assert (running.status_code, running.json()["state"], running.headers["retry-after"]) == (200, "running", "1")
    busy = await api.ask("POST", turns(conversation), {"input": "Another"})
    assert (busy.status_code, busy.json()["code"]) == (409, "conversation_busy")
    assert "retry-after" in busy.headers
    cancelled = await api.expect(200, "POST", f"/v1/conversations/{conversation}/cancel", {"turn_seq": 2})
    assert (cancelled["turn"]["state"], cancelled["conversation"]["state"]) == ("cancelled", "idle")
    assert await api.expect(200, "GET", answer.headers["location"]) == cancelled["turn"]


async def test_a_disconnect_does_not_cancel(api: ApiClient, emulated: EmulatedProviders) -> None:
    conversation = await api.begin()
    emulated.gemini.queue_replies(RAIN)
    async with api.listen("POST", turns(conversation), {"input": "Hello"}) as (_, events):
        assert (await anext(events))[1] == "turn.started"
    streamed = await api.read_events("GET", f"{turns(conversation, 2)}/events")
    assert streamed[-1][1] == "turn.completed"


def finished_turns(log: str) -> list[Any]:
    """The log lines of requests for turns."""
    lines = [json.loads(line) for line in log.splitlines()]
    return [line for line in lines if line["event"] == "http.request_finished" and line["route"].endswith("/turns")]


async def test_a_disconnecting_listener_is_recorded_and_is_no_error(
    api: ApiClient, emulated: EmulatedProviders
) -> None:
    conversation = await api.begin()
    emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=1)
    with capture_log() as log:
        async with api.listen("POST", turns(conversation), {"input": "Hello"}) as (_, events):
            assert (await anext(events))[1] == "turn.started"
        async with asyncio.timeout(WAIT_SECONDS):
            while not (lines := finished_turns(log.getvalue())):
                await api.client.get("/healthz")
    (line,) = lines
    assert (line["status"], line["disconnected"]) == (200, True)
    assert "http.request_failed" not in log.getvalue()
    assert (await api.expect(200, "GET", turns(conversation, 2)))["state"] == "running"
    await api.expect(200, "POST", f"/v1/conversations/{conversation}/cancel")


async def test_a_waiting_client_is_informed_that_its_turn_was_cancelled(
    api: ApiClient, emulated: EmulatedProviders
) -> None:
    conversation = await api.begin()
    emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=1)
    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as group:
        waiting = group.create_task(api.say(conversation))
        while (await api.ask("GET", turns(conversation, 2))).status_code == 404:
            pass
        await api.expect(200, "POST", f"/v1/conversations/{conversation}/cancel")
    assert waiting.result()["turn"]["state"] == "cancelled"


async def test_there_is_nothing_to_cancel_when_nothing_runs(api: ApiClient) -> None:
    conversation = await api.begin()
    for body in (None, {}, {"turn_seq": 2}, {"turn_seq": None}):
        answer = await api.ask("POST", f"/v1/conversations/{conversation}/cancel", body)
        assert (answer.status_code, answer.json()["code"]) == (409, "turn_not_running"), body
        assert answer.headers["x-should-retry"] == "false"
    assert (await api.expect(422, "POST", f"/v1/conversations/{conversation}/cancel", {"seq": 2}))["errors"]


@pytest.mark.parametrize("provider", BOTH)
async def test_a_failed_turn_is_a_problem_with_what_had_arrived(
    api: ApiClient, emulated: EmulatedProviders, provider: str
) -> None:
    conversation = await api.begin(provider)
    emulated[provider].queue_replies(Reply(text="It rains in Oslo and in Bergen and everywhere else."))
    emulated[provider].inject_fault(FaultKind.CUT, after_chunks=4)
    answer = await api.ask("POST", turns(conversation), {"input": "Hello"})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (502, "provider_disconnected")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert (problem["conversation_id"], problem["turn_seq"]) == (conversation, 2)
    assert problem["turn"] == await api.expect(200, "GET", turns(conversation, 2))
    assert problem["turn"]["state"] == "failed"
    assert problem["turn"]["error"]["code"] == "provider_disconnected"
    streamed = await api.read_events("GET", f"{turns(conversation, 2)}/events")
    assert streamed[-1][1] == "turn.failed"
    assert streamed[-1][2]["error"] == problem["turn"]["error"]
    assert (await api.say(conversation))["turn"]["state"] == "complete"


async def test_turns_are_paged_in_either_order(api: ApiClient) -> None:
    conversation = await api.begin()
    for _ in range(3):
        await api.say(conversation)
    for order, expected in (("asc", [1, 2, 3, 4, 5, 6]), ("desc", [6, 5, 4, 3, 2, 1])):
        found: list[int] = []
        cursor: str | None = ""
        while cursor is not None:
            path = f"{turns(conversation)}?limit=4&order={order}" + (f"&cursor={cursor}" if cursor else "")
            page = await api.expect(200, "GET", path)
            found += [turn["seq"] for turn in page["data"]]
            cursor = page["next_cursor"]
        assert found == expected
    await api.expect(422, "GET", f"{turns(conversation)}?order=up")
    assert (await api.expect(400, "GET", f"{turns(conversation)}?cursor=x"))["code"] == "cursor_invalid"


async def test_a_missing_turn_is_not_found(api: ApiClient) -> None:
    conversation = await api.begin()
    await api.say(conversation)
    for seq in ("3", "0", "-1", str(2**70), "9" * 5000):
        for path in (f"{turns(conversation)}/{seq}", f"{turns(conversation)}/{seq}/events"):
            answer = await api.ask("GET", path)
            assert answer.status_code == 404, (seq, answer.text)
    problem = await api.expect(404, "GET", f"{turns(conversation, 1)}/events")
    assert problem["code"] == "turn_not_found"
    assert "2" in problem["hint"]


@pytest.mark.parametrize("provider", BOTH)
async def test_any_text_is_returned_as_valid_json(api: ApiClient, emulated: EmulatedProviders, provider: str) -> None:
    conversation = await api.begin(provider)
    emulated[provider].queue_replies(
        Reply(text=f"{NASTY.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')}")
    )
    streamed = await api.read_events("POST", turns(conversation), {"input": NASTY})
    assert streamed[-1][1] == "turn.completed"
    asked = await api.expect(200, "GET", turns(conversation, 1))
    joined = NASTY.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert asked["blocks"] == [{"type": "text", "text": joined}]


class TestRate:
    """With a limit that the set-up of a test just fits into."""

    @pytest.fixture
    def server_settings(self, server_settings: Settings) -> Settings:
        return server_settings.model_copy(update={"rate_limit_per_minute": 3})

    async def test_a_duplicate_is_answered_above_the_rate(self, api: ApiClient) -> None:
        conversation = await api.begin()
        first = await api.say(conversation, "Hello", idempotency_key="key")
        answer = await api.ask("GET", f"/v1/conversations/{conversation}")
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert int(answer.headers["retry-after"]) >= 1
        again = await api.ask("POST", turns(conversation), {"input": "Hello"}, idempotency_key="key")
        assert (again.status_code, again.json()) == (200, first)
        assert again.headers["idempotency-replayed"] == "true"
        for body, key, status in (
            ({"input": "Hello"}, "another key", 429),
            ({"input": "Bye"}, "key", 409),
            ({"input": ""}, "key", 422),
        ):
            assert (await api.ask("POST", turns(conversation), body, idempotency_key=key)).status_code == status


async def test_a_stalled_listener_blocks_no_other(
    api: ApiClient, strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    conversation = await api.begin()
    emulated.gemini.queue_replies(Reply(text="word after " * 3_000))
    address = httpx2.URL(strata_server.url)
    body = b'{"input": "Tell me everything."}'
    head = (
        f"POST {turns(conversation)} HTTP/1.1\r\nhost: strata\r\nauthorization: Bearer {strata_server.client_key}\r\n"
        f"accept: text/event-stream\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        narrow.setblocking(False)  # noqa: FBT003  reason: the socket's own signature
        loop = asyncio.get_running_loop()
        await loop.sock_connect(narrow, (address.host, address.port))
        await loop.sock_sendall(narrow, head.encode() + body)
        # Nothing is read. The turn still ends, and other listeners get all of it.
        await eventually(lambda: _is_idle(strata_server, conversation))
        streamed = await api.read_events("GET", f"{turns(conversation, 2)}/events")
        assert len(streamed) > 3_000
        received = bytearray()
        while b"event: turn.completed" not in received[-100_000:]:
            piece = await asyncio.wait_for(loop.sock_recv(narrow, 1 << 20), WAIT_SECONDS)
            assert piece
            received += piece
    assert received.count(b"event: text.delta") == sum(name == "text.delta" for _, name, _ in streamed)


async def _is_idle(server: StrataServer, conversation_id: str) -> bool:
    conversation = await server.program.store.load_conversation(server.tenant.id, conversation_id)
    return conversation.state is ConversationState.IDLE and conversation.revision > 0
