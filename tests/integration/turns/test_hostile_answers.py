"""Whole turns with answers that no provider should send: each ends, the next one works, and everything can be read.

The emulators send exactly the given bytes. For any bytes, the turn ends with an error code or a complete answer, the
next user task is answered, the pages and JSON of its calls work, what is stored verifies, and it can be erased.
"""

import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from server.conversation.errors import ProviderFailed, every_error
from server.conversation.usage import COUNT_FAULT, MAX_TOKEN_COUNT
from server.emulator.reply import Fault, FaultKind, Reply
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.recordings.catalogue import RECORDINGS
from tests.recordings.damage import HOSTILE, documents_of, encode, places_in, put
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.http_driver import ApiClient, open_api, turns
from tests.support.page_driver import Operator, open_operator
from tests.support.verifying import verify

CODES = {error.code for error in every_error(ProviderFailed)}
DIGITS = "7" * 200_000
DAMAGED_ANSWERS = 15
DEEP = "[" * 150 + "]" * 150


@pytest.fixture
async def api(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server) as opened:
        yield opened


@pytest.fixture
async def operator(strata_server: StrataServer) -> AsyncIterator[Operator]:
    async with open_operator(strata_server.url) as opened:
        await opened.log_in(strata_server.admin_key)
        yield opened


def gemini(*documents: str) -> bytes:
    return "".join(f"data: {document}\r\n\r\n" for document in documents).encode("utf-8", "surrogatepass")


def gemini_part(part: str, usage: str = '{"promptTokenCount":5}') -> bytes:
    content = f'{{"candidates":[{{"content":{{"parts":[{part}],"role":"model"}},"finishReason":"STOP"}}],'
    return gemini(f'{content}"usageMetadata":{usage},"responseId":"r1"}}')


def gemini_call(args: str) -> bytes:
    return gemini_part(
        f'{{"functionCall":{{"id":"c1","name":"get_weather","args":{args}}},"thoughtSignature":"%SIG%"}}'
    )


def claude(*events: str) -> bytes:
    return "".join(f"data: {event}\n\n" for event in events).encode("utf-8", "surrogatepass")


def claude_block(
    start: str,
    *deltas: str,
    usage: str = '{"input_tokens":5,"output_tokens":1}',
    stop: str | None = '"end_turn"',
    response_id: str = '"msg_1"',
) -> bytes:
    ended = () if stop is None else (f'{{"type":"message_delta","delta":{{"stop_reason":{stop}}},"usage":{usage}}}',)
    return claude(
        f'{{"type":"message_start","message":{{"id":{response_id},"usage":{usage}}}}}',
        f'{{"type":"content_block_start","index":0,"content_block":{start}}}',
        *(f'{{"type":"content_block_delta","index":0,"delta":{delta}}}' for delta in deltas),
        '{"type":"content_block_stop","index":0}',
        *ended,
        '{"type":"message_stop"}',
    )


def claude_call(arguments: str) -> bytes:
    piece = json.dumps({"type": "input_json_delta", "partial_json": arguments})
    start = '{"type":"tool_use","id":"toolu_1","name":"get_weather","input":{}}'
    return claude_block(start, piece, stop='"tool_use"')


def claude_usage(count: str) -> bytes:
    return claude_block('{"type":"text","text":"Hi."}', usage=f'{{"input_tokens":{count},"output_tokens":{count}}}')


TEXT = '{"text":"Hi."}'
CASES: dict[str, dict[str, bytes]] = {
    GEMINI: {
        "count of 2^31": gemini_part(TEXT, '{"promptTokenCount":2147483648,"candidatesTokenCount":4294967296}'),
        "count of 2^63": gemini_part(TEXT, '{"promptTokenCount":9223372036854775808,"thoughtsTokenCount":-5}'),
        "count of 5000 digits": gemini_part(TEXT, f'{{"promptTokenCount":{"9" * 5000},"totalTokenCount":1e400}}'),
        "text is a number": gemini_part('{"text":5}'),
        "text is an object": gemini_part('{"text":{"a":1}}'),
        "call is a number": gemini_part('{"functionCall":7}'),
        "call name is a list": gemini_part('{"functionCall":{"id":"c1","name":["f"],"args":{}}}'),
        "two calls with one id": gemini_part(",".join(['{"functionCall":{"id":"c1","name":"get_weather"}}'] * 2)),
        "arguments 150 deep": gemini_call(f'{{"a":{DEEP}}}'),
        "arguments of 200,000 digits": gemini_call(f'{{"a":{DIGITS}}}'),
        "a lone surrogate in a text": gemini_part(r'{"text":"a\ud800b"}'),
        "a NUL in a response id": gemini_part(TEXT).replace(b'"r1"', rb'"r\u0000\ud800"'),
        "a stream without an end": gemini(f'{{"candidates":[{{"content":{{"parts":[{TEXT}]}}}}]}}'),
        "parts are no list": gemini('{"candidates":[{"content":{"parts":"x"},"finishReason":"STOP"}]}'),
        "an error in the middle": gemini('{"error":{"code":[],"message":{},"details":7}}'),
    },
    ANTHROPIC: {
        "count of 2^31": claude_usage("2147483648"),
        "count of 2^63": claude_usage("9223372036854775808"),
        "count of 5000 digits": claude_usage("9" * 5000),
        "negative count": claude_usage("-7"),
        "type is a list": claude_block('{"type":["text"],"text":"Hi."}'),
        "type is missing": claude_block('{"text":"Hi."}'),
        "text is a number": claude_block('{"type":"text","text":5}'),
        "call without an id": claude_block('{"type":"tool_use","name":"get_weather","input":{}}', stop='"tool_use"'),
        "arguments 150 deep": claude_call(f'{{"a":{DEEP}}}'),
        "arguments of 200,000 digits": claude_call(f'{{"a":{DIGITS}}}'),
        "a lone surrogate in the arguments": claude_call(r'{"city":"\ud800"}'),
        "a lone surrogate in a text": claude_block(r'{"type":"text","text":"a\ud800b"}'),
        "a response id that cannot be sent": claude_block(
            '{"type":"text","text":"Hi."}', response_id=r'"msg\u0000\ud800"'
        ),
        "no stop reason": claude_block('{"type":"text","text":"Hi."}', stop=None),
        "stop reason is null": claude_block('{"type":"text","text":"Hi."}', stop="null"),
        "stop reason is a list": claude_block('{"type":"text","text":"Hi."}', stop='["end_turn"]'),
        "a stream that goes on": claude_block('{"type":"text","text":"Hi."}') * 2,
        "a delta of another block": claude_block(
            '{"type":"thinking","thinking":""}', '{"type":"text_delta","text":"x"}'
        ),
        "an error in the middle": claude(
            '{"type":"error","error":{"type":[],"message":{},"details":{"error_code":[]}}}'
        ),
    },
}
PAGES = {
    "not UTF-8": (502, b"<html>\xff\xfe Schl\xfcssel</html>"),
    "deep JSON": (400, b"[" * 100_000),
    "a long number": (400, b'{"error":{"code":' + b"9" * 6000 + b"}}"),
    "nothing": (400, b""),
    "no object": (429, b'"slow down"'),
}


async def assert_goes_on(
    server: StrataServer, api: ApiClient, operator: Operator, database: Database, conversation_id: str, ended: Any
) -> None:
    """What holds after a turn, for any end."""
    conversation = f"/admin/api/conversations/{conversation_id}"
    events = await api.read_events("GET", turns(conversation_id, 2) + "/events")
    assert events[-1][1] in {"turn.completed", "turn.failed"}
    assert (await api.expect(200, "GET", turns(conversation_id, 2)))["state"] == ended["turn"]["state"]
    await assert_pages_work(operator, conversation_id, server)
    calls = ended["conversation"]["pending_tool_calls"]
    if calls:
        results = [{"tool_call_id": call["id"], "output": {"celsius": 4}} for call in calls]
        answered = await api.expect(200, "POST", turns(conversation_id), {"tool_results": results})
        assert answered["turn"]["state"] == "complete"
    answered = await api.say(conversation_id, "And now?")
    assert answered["turn"]["state"] == "complete"
    async with open_api(server, server.admin_key) as admin:
        await admin.expect(200, "GET", conversation)
    verified = await verify(database, [conversation_id])
    assert verified.mismatches == ()
    erased = await api.ask("DELETE", f"/v1/conversations/{conversation_id}")
    assert erased.status_code in {200, 204}


async def assert_pages_work(operator: Operator, conversation_id: str, server: StrataServer) -> None:
    page = await operator.get(f"/admin/conversations/{conversation_id}")
    assert page.status_code == 200, page.text
    call = f"conversations/{conversation_id}/calls/2/1"
    for path in (f"/admin/{call}", f"/admin/{call}/request", f"/admin/{call}/response", f"/admin/{call}/json"):
        answer = await operator.get(path)
        assert answer.status_code == 200, (path, answer.text)
    async with open_api(server, server.admin_key) as admin:
        shown = await admin.expect(200, "GET", f"/admin/api/{call}")
        assert shown["request"]["proof"] == "equal"


@pytest.mark.parametrize(
    ("provider", "name"), [(provider, name) for provider, cases in CASES.items() for name in cases]
)
async def test_a_turn_ends_and_the_next_one_works(
    strata_server: StrataServer,
    api: ApiClient,
    operator: Operator,
    database: Database,
    emulated: EmulatedProviders,
    provider: str,
    name: str,
) -> None:
    conversation_id = await api.begin(provider)
    emulated[provider].queue_replies(Fault(kind=FaultKind.RAW, body=CASES[provider][name]))
    answer = await api.ask("POST", turns(conversation_id), {"input": "Hello."})
    ended = answer.json()
    if answer.status_code != 200:
        assert ended["code"] in CODES, ended
    await assert_goes_on(strata_server, api, operator, database, conversation_id, ended)


@pytest.mark.parametrize("provider", BOTH)
@pytest.mark.parametrize("name", PAGES)
async def test_an_error_page_of_any_bytes_is_a_failure_of_the_provider(
    strata_server: StrataServer,
    api: ApiClient,
    operator: Operator,
    database: Database,
    emulated: EmulatedProviders,
    provider: str,
    name: str,
) -> None:
    status, body = PAGES[name]
    conversation_id = await api.begin(provider)
    page = Fault(kind=FaultKind.RAW, body=body, status=status, content_type="text/html")
    emulated[provider].queue_replies(*[page] * 4)
    answer = await api.ask("POST", turns(conversation_id), {"input": "Hello."})
    ended = answer.json()
    assert answer.status_code != 200
    assert ended["code"] in CODES, ended
    emulated[provider].lines.turns.clear()
    await assert_goes_on(strata_server, api, operator, database, conversation_id, ended)


@pytest.mark.parametrize("provider", BOTH)
async def test_an_impossible_count_is_bounded_and_recorded(
    strata_server: StrataServer, api: ApiClient, emulated: EmulatedProviders, provider: str
) -> None:
    conversation_id = await api.begin(provider)
    emulated[provider].queue_replies(Fault(kind=FaultKind.RAW, body=CASES[provider]["count of 5000 digits"]))
    ended = await api.say(conversation_id)
    assert ended["turn"]["usage"]["fresh_input_tokens"] == MAX_TOKEN_COUNT
    async with open_api(strata_server, strata_server.admin_key) as admin:
        shown = await admin.expect(200, "GET", f"/admin/api/conversations/{conversation_id}/calls/2/1")
    assert COUNT_FAULT in json.dumps(shown)


@pytest.mark.parametrize("provider", BOTH)
async def test_a_lone_surrogate_is_sent_back_as_something_that_the_provider_accepts(
    api: ApiClient, emulated: EmulatedProviders, provider: str
) -> None:
    """The client gets what was received; it cannot be part of a request."""
    conversation_id = await api.begin(provider)
    emulated[provider].queue_replies(
        Fault(kind=FaultKind.RAW, body=CASES[provider]["a lone surrogate in a text"]), Reply(text="Ok.")
    )
    ended = await api.say(conversation_id)
    assert [block["text"] for block in ended["turn"]["blocks"]] == ["a\ud800b"]
    assert (await api.say(conversation_id, "And?"))["turn"]["state"] == "complete"
    assert "a\ufffdb" in json.dumps(emulated[provider].requests()[-1]["body"], ensure_ascii=False)


@pytest.mark.parametrize("provider", BOTH)
async def test_one_damaged_answer_after_the_other_leaves_a_conversation_usable(
    api: ApiClient,
    operator: Operator,
    database: Database,
    emulated: EmulatedProviders,
    provider: str,
) -> None:
    """A seeded sequence: recorded answers with a hostile value somewhere, in one conversation that has to continue.

    Without undocumented members: these are sent back unchanged, and the emulator does not know them.
    """
    chance = Random(f"{provider} 2")  # noqa: S311  reason: a seeded choice
    bodies = [one.body for one in RECORDINGS if one.vendor == provider and b"future" not in one.body]
    hostile = [value for value in HOSTILE if not isinstance(value, dict)]
    conversation_id = await api.begin(provider)
    seq = 0
    for _ in range(DAMAGED_ANSWERS):
        documents = documents_of(chance.choice(bodies)) or [{}]
        at = chance.randrange(len(documents))
        documents[at] = put(documents[at], chance.choice(places_in(documents[at])), chance.choice(hostile))
        emulated[provider].queue_replies(Fault(kind=FaultKind.RAW, body=encode(documents)))
        asked = {"input": "Hello.", "abandon_pending_calls": True}
        answer = await api.ask("POST", turns(conversation_id), asked)
        assert answer.status_code == 200 or answer.json()["code"] in CODES, answer.text
        emulated[provider].lines.turns.clear()
        taken = await api.expect(200, "POST", turns(conversation_id), {**asked, "input": "And now?"})
        assert taken["turn"]["state"] == "complete"
        seq += 4
        for path in (f"calls/{seq - 2}/1", ""):
            page = await operator.get(f"/admin/conversations/{conversation_id}/{path}".rstrip("/"))
            assert page.status_code == 200, page.text
    assert (await verify(database, [conversation_id])).mismatches == ()
    assert (await api.ask("DELETE", f"/v1/conversations/{conversation_id}")).status_code in {200, 204}
