"""Every method sends the right request, parses the answer, and retries only what may be repeated."""

import base64
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from server.conversation.block import ImageBlock, TextBlock, ToolCallBlock, UnknownBlock
from server.conversation.usage import Usage
from server.web.client import (
    AnswerMalformed,
    AssistantDraft,
    ClientError,
    ConversationChange,
    ConversationDraft,
    ImagePart,
    Instructions,
    OnBusy,
    RetryBudget,
    ServerUnreachable,
    StrataClient,
    StrataProblem,
    Task,
    TextPart,
    Tool,
    ToolResult,
    TurnOptions,
)
from tests.support.fakes.scripted_strata import (
    CONVERSATION_ID,
    KEY,
    Answer,
    ScriptedStrata,
    answer_events,
    answer_json,
    problem,
    status_of,
    turn_json,
)
from tests.unit.web.client.conftest import QUICK

CONVERSATION = f"/v1/conversations/{CONVERSATION_ID}"
ASSISTANT = {
    "id": "asst_1",
    "version": 3,
    "created_at": "2026-11-16T08:00:00+00:00",
    "name": "helper",
    "provider": "gemini",
    "model": "gemini-3.1-pro-preview",
    "instructions": {"roles": "Be kind.", "procedure": "", "constraints": "", "new_one": "x"},
    "tools": [{"name": "get_time", "description": "The time.", "parameters": {"type": "object"}}],
    "from_a_later_release": {"x": 1},
}
CONVERSATION_JSON = {
    **status_of(4, [{"id": "call_1", "name": "get_time", "arguments": {}}]),
    "assistant_id": "asst_1",
    "assistant_version": 3,
    "forked_from": {"conversation_id": "conv_0", "seq": 2},
    "context": {"todos": []},
    "from_a_later_release": True,
}


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_an_assistant_is_created_revised_and_loaded(client: StrataClient, strata: ScriptedStrata) -> None:
    for method, path in (
        ("POST", "/v1/assistants"),
        ("PUT", "/v1/assistants/asst_1"),
        ("GET", "/v1/assistants/asst_1"),
    ):
        strata.script(method, path, answer_json(ASSISTANT))
    tool = Tool(name="get_time", description="The time.", parameters={"type": "object"})
    draft = AssistantDraft(name="helper", instructions=Instructions(roles="Be kind."), tools=(tool,))
    made = await client.create_assistant(draft)
    assert (made.id, made.version, made.definition.tools) == ("asst_1", 3, (tool,))
    assert made.definition.instructions == Instructions(roles="Be kind.")
    assert await client.revise_assistant("asst_1", draft) == made
    assert await client.load_assistant("asst_1", version=3) == made
    posted, put, got = strata.requests
    assert posted.body == put.body
    assert "provider" not in posted.body
    assert posted.body["tools"] == [{"name": "get_time", "description": "The time.", "parameters": {"type": "object"}}]
    assert got.query == {"version": "3"}


async def test_a_list_is_read_page_by_page_as_it_is_needed(client: StrataClient, strata: ScriptedStrata) -> None:
    pages = [
        answer_json({"data": [{**ASSISTANT, "id": "asst_1"}, {**ASSISTANT, "id": "asst_2"}], "next_cursor": "c1"}),
        answer_json({"data": [], "next_cursor": "c2"}),
        answer_json({"data": [{**ASSISTANT, "id": "asst_3"}], "next_cursor": None}),
    ]
    strata.script("GET", "/v1/assistants", *pages)
    listed = client.list_assistants()
    assert (await anext(listed)).id == "asst_1"
    assert len(strata.requests) == 1
    assert [assistant.id for assistant in await collect(listed)] == ["asst_2", "asst_3"]
    assert [request.query.get("cursor") for request in strata.requests] == [None, "c1", "c2"]


async def test_a_conversation_is_created_loaded_and_filtered(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.script("POST", "/v1/conversations", answer_json(CONVERSATION_JSON, status=201))
    strata.script("GET", "/v1/conversations", answer_json({"data": [CONVERSATION_JSON], "next_cursor": None}))
    strata.script("GET", CONVERSATION, answer_json(CONVERSATION_JSON))
    made = await client.create_conversation(ConversationDraft(assistant_id="asst_1", mode="voice"))
    assert made.pending_tool_calls == (ToolCallBlock(id="call_1", name="get_time", arguments={}),)
    assert made.forked_from is not None
    assert made.forked_from.seq == 2
    assert await client.load_conversation(CONVERSATION_ID) == made
    when = datetime(2026, 11, 16, tzinfo=UTC)
    assert await collect(client.list_conversations(assistant_id="asst_1", created_after=when)) == [made]
    assert strata.requests[0].body == {"assistant_id": "asst_1", "mode": "voice"}
    assert strata.requests[2].query == {"assistant_id": "asst_1", "created_after": when.isoformat(), "limit": "100"}


async def test_a_conversation_is_changed_forked_and_deleted(client: StrataClient, strata: ScriptedStrata) -> None:
    for method, path in (("PATCH", ""), ("PUT", "/context"), ("POST", "/fork")):
        strata.script(method, CONVERSATION + path, answer_json(CONVERSATION_JSON))
    strata.script("DELETE", CONVERSATION, answer_json({"dry_run": True, "rows": {"turns": 4}}))
    await client.change_conversation(CONVERSATION_ID, ConversationChange(latest=True, args={}, expected_revision=4))
    await client.change_conversation(CONVERSATION_ID, ConversationChange(assistant_version=2, metadata={"a": 1}))
    await client.replace_context(CONVERSATION_ID, {"todos": ["x"]}, expected_revision=4)
    await client.fork_conversation(CONVERSATION_ID, 2)
    erasure = await client.delete_conversation(CONVERSATION_ID, dry_run=True)
    assert (erasure.dry_run, erasure.rows) == (True, {"turns": 4})
    latest, second, context, fork, delete = strata.requests
    assert latest.body == {"assistant_version": "latest", "args": {}, "expected_revision": 4}
    assert second.body == {"assistant_version": 2, "metadata": {"a": 1}}
    assert (context.body, context.headers["if-match"]) == ({"todos": ["x"]}, '"4"')
    assert fork.body == {"at_seq": 2}
    assert delete.query == {"dry_run": "true"}


async def test_turns_are_listed_and_loaded_with_their_blocks(client: StrataClient, strata: ScriptedStrata) -> None:
    image = {"type": "image", "media_type": "image/png", "sha256": "ab", "size_bytes": 9}
    task = {"seq": 1, "kind": "user_task", "state": "complete", "blocks": [image, {"type": "hologram", "z": 1}]}
    answer = turn_json(2, [{"type": "text", "text": "Hi", "shiny": True}], cost_usd=None)
    strata.script("GET", f"{CONVERSATION}/turns", answer_json({"data": [task, answer], "next_cursor": None}))
    strata.script("GET", f"{CONVERSATION}/turns/2", answer_json({**answer, "cost_usd": 0.0123}))
    first, second = await collect(client.list_turns(CONVERSATION_ID, order="desc"))
    assert first.blocks[0] == ImageBlock(media_type="image/png", sha256="ab", size_bytes=9)
    assert isinstance(first.blocks[1], UnknownBlock)
    assert (first.usage, first.cost_usd, second.cost_usd) == (None, None, None)
    assert second.blocks == (TextBlock(text="Hi"),)
    assert second.usage == Usage(fresh_input_tokens=200, cache_read_tokens=800, output_tokens=12)
    assert (await client.load_turn(CONVERSATION_ID, 2)).cost_usd == Decimal("0.0123")
    assert strata.requests[0].query["order"] == "desc"


async def test_a_turn_request_contains_all_arguments(client: StrataClient, strata: ScriptedStrata) -> None:
    for _ in range(2):
        strata.replies.append(lambda seq: answer_events(seq, "ok"))
    options = TurnOptions(
        on_busy=OnBusy.QUEUE, expected_revision=0, args={"a": 1}, language="nb", abandon_pending_calls=True
    )
    task: Task = [TextPart(text="What is \ud800 this?"), ImagePart(data=b"\x89PNG")]
    await client.send(CONVERSATION_ID, task, options=options)
    await client.send(
        CONVERSATION_ID, tool_results=[ToolResult(tool_call_id="call_1", output={"celsius": 4}, is_error=True)]
    )
    first, second = strata.requests
    assert first.body == {
        "input": [
            {"type": "text", "text": "What is \ud800 this?"},
            {"type": "image", "data": base64.b64encode(b"\x89PNG").decode()},
        ],
        "on_busy": "queue",
        "expected_revision": 0,
        "args": {"a": 1},
        "language": "nb",
        "abandon_pending_calls": True,
    }
    assert second.body == {
        "tool_results": [{"tool_call_id": "call_1", "output": {"celsius": 4}, "is_error": True}],
        "on_busy": "reject",
    }


@pytest.mark.parametrize("given", [{}, {"task": "x", "tool_results": []}])
def test_a_turn_is_a_task_or_tool_results(client: StrataClient, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either a task or tool results"):
        client.stream(CONVERSATION_ID, **given)


async def test_a_turn_can_be_started_and_cancelled(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda seq: answer_events(seq, "ok"))
    started = await client.start(CONVERSATION_ID, "Hi")
    assert (started.turn.seq, started.turn.state, started.replayed) == (2, "running", False)
    assert strata.requests[0].headers["prefer"] == "respond-async"
    cancelled = {"turn": turn_json(2, [], state="cancelled"), "conversation": status_of(2)}
    strata.script("POST", f"{CONVERSATION}/cancel", answer_json(cancelled))
    assert (await client.cancel(CONVERSATION_ID, 2)).turn.state == "cancelled"
    await client.cancel(CONVERSATION_ID)
    assert [request.body for request in strata.asked("POST", f"{CONVERSATION}/cancel")] == [{"turn_seq": 2}, {}]


async def test_an_error_has_all_members_of_the_problem(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.script("GET", CONVERSATION, problem(404, "conversation_not_found", "There is none.", "List them."))
    with pytest.raises(StrataProblem) as caught:
        await client.load_conversation(CONVERSATION_ID)
    error = caught.value
    assert (error.code, error.status, error.request_id) == ("conversation_not_found", 404, "req_1")
    assert error.members == {"extra": [1]}
    assert str(error) == "There is none. List them."


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (problem(409, "conversation_busy", retry_after="0"), 3),
        (problem(429, "rate_limited", retry_after="0"), 3),
        (problem(503, "shutting_down", retry_after="0"), 3),
        (problem(500, "internal", x_should_retry="true"), 3),
        (problem(409, "revision_mismatch", x_should_retry="false"), 1),
        (problem(409, "conversation_busy"), 1),
        (problem(503, "turn_interrupted", x_should_retry="false", retry_after="0"), 1),
        (problem(500, "internal", retry_after="0"), 1),
        (problem(429, "rate_limited", retry_after="3600"), 1),
        (problem(503, "shutting_down", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), 1),
    ],
    ids=lambda value: f"{value.status} {dict(value.headers)}" if isinstance(value, Answer) else "",
)
async def test_a_refusal_is_retried_only_if_the_server_allows_it(
    client: StrataClient, strata: ScriptedStrata, answer: Answer, count: int
) -> None:
    strata.script("POST", "/v1/conversations", answer, answer, answer_json(CONVERSATION_JSON))
    making = client.create_conversation(ConversationDraft(assistant_id="asst_1"))
    if count == 3:
        assert (await making).id == CONVERSATION_ID
    else:
        with pytest.raises(StrataProblem):
            await making
    assert len(strata.requests) == count


Method = Callable[[StrataClient], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize(
    ("method", "repeated"),
    [
        (lambda client: client.load_turn(CONVERSATION_ID, 2), True),
        (lambda client: client.replace_context(CONVERSATION_ID, {}), True),
        (lambda client: client.replace_context(CONVERSATION_ID, {}, expected_revision=1), False),
        (lambda client: client.delete_conversation(CONVERSATION_ID, dry_run=True), True),
        (lambda client: client.delete_conversation(CONVERSATION_ID), False),
        (lambda client: client.create_conversation(ConversationDraft(assistant_id="asst_1")), False),
        (lambda client: client.fork_conversation(CONVERSATION_ID, 2), False),
        (lambda client: client.change_conversation(CONVERSATION_ID, ConversationChange(args={})), False),
        (lambda client: client.cancel(CONVERSATION_ID), False),
    ],
    ids=["get", "put", "put if", "dry run", "delete", "create", "fork", "change", "cancel"],
)
async def test_a_request_without_an_answer_is_retried_only_if_it_is_idempotent(
    client: StrataClient, strata: ScriptedStrata, method: Method, *, repeated: bool
) -> None:
    strata.cuts.append(30)
    # None of these routes is scripted, so the answer to the second request is a problem.
    with pytest.raises(StrataProblem if repeated else ServerUnreachable):
        await method(client)
    assert len(strata.requests) == (2 if repeated else 1)


async def test_a_gateway_without_an_upstream_is_retried(client: StrataClient, strata: ScriptedStrata) -> None:
    away = Answer(status=502, headers={"content-type": "text/html"}, body=b"<h1>Bad gateway</h1>")
    strata.script("GET", CONVERSATION, away, away, answer_json(CONVERSATION_JSON))
    assert (await client.load_conversation(CONVERSATION_ID)).revision == 4


async def test_a_server_that_is_not_strata_is_reported_as_such(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.script("GET", CONVERSATION, Answer(status=404, body=b"nothing here"))
    with pytest.raises(AnswerMalformed, match="404 Not Found"):
        await client.load_conversation(CONVERSATION_ID)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"id": 1}', b"\xff", b"null"])
async def test_an_answer_that_cannot_be_read_is_malformed(
    client: StrataClient, strata: ScriptedStrata, body: bytes
) -> None:
    strata.script("GET", CONVERSATION, Answer(headers={"content-type": "application/json"}, body=body))
    with pytest.raises(AnswerMalformed):
        await client.load_conversation(CONVERSATION_ID)


async def test_no_server_is_said_in_a_sentence_and_the_reason_is_told_at_each_attempt() -> None:
    retries: list[tuple[ClientError, float]] = []
    retry_budget = RetryBudget(seconds=0.05, first_wait_seconds=0.001, max_wait_seconds=0.02)
    async with StrataClient(
        "http://127.0.0.1:1", KEY, retry_budget=retry_budget, on_retry=lambda *why: retries.append(why)
    ) as client:
        with pytest.raises(ServerUnreachable, match=r"Cannot connect to http://127\.0\.0\.1:1") as caught:
            await client.create_conversation(ConversationDraft(assistant_id="asst_1"))
    assert not caught.value.sent
    assert len(retries) > 1


@pytest.mark.parametrize(("url", "key"), [("nonsense", KEY), ("ftp://h", KEY), ("http://[", KEY), ("http://h", "a\nb")])
async def test_an_invalid_address_or_key_is_reported_without_the_key(url: str, key: str) -> None:
    with pytest.raises(ServerUnreachable) as caught:
        async with StrataClient(url, key, retry_budget=QUICK) as client:
            await client.load_conversation(CONVERSATION_ID)
    assert key not in str(caught.value)
