import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from server.conversation.block import ImageBlock, TextBlock, ToolResultBlock
from server.conversation.conversation import OnBusy
from server.conversation.errors import HistoryRuleBroken, ValidationFailed
from server.conversation.turn import TurnKind
from server.turns.request import TurnRequest
from server.web.api.turn_body import TurnInput, read_turn_request
from server.web.headers import TurnHeaders
from tests.support.builders import NASTY
from tests.support.strategies import any_text, json_values
from tests.unit.conversation.test_image import gif, png

LIMIT = 1000


def part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), **more}


async def read(body: dict[str, Any], **headers: Any) -> TurnRequest:
    decoded = TurnInput.model_validate(body)
    return await read_turn_request("conv_1", decoded, TurnHeaders(**headers), image_limit_bytes=LIMIT)


async def refused(body: dict[str, Any], **headers: Any) -> tuple[str, str]:
    """The field that is invalid, and the reason."""
    with pytest.raises(ValidationFailed) as caught:
        await read(body, **headers)
    faults: Any = caught.value.details["errors"]
    return faults[0]["path"], faults[0]["message"]


async def test_a_text_is_a_task_of_the_user() -> None:
    request = await read(
        {"input": NASTY, "on_busy": "queue", "args": {"a": 1}, "language": "nb", "abandon_pending_calls": True},
        idempotency_key="key",
        announces_retry=True,
        if_match='"7"',
    )
    assert request == TurnRequest(
        conversation_id="conv_1",
        kind=TurnKind.USER_TASK,
        blocks=(TextBlock(text=NASTY),),
        body_hash=request.body_hash,
        on_busy=OnBusy.QUEUE,
        abandons_calls=True,
        language="nb",
        args={"a": 1},
        idempotency_key="key",
        announces_retry=True,
        expected_revision=7,
    )
    assert len(request.body_hash) == 32


async def test_results_are_a_tool_response() -> None:
    results = [
        {"tool_call_id": "b", "output": None},
        {"tool_call_id": "a", "output": {"z": 1, "a": NASTY}, "is_error": True},
    ]
    request = await read({"tool_results": results})
    assert request.kind is TurnKind.TOOL_RESPONSE
    assert request.answers == ("b", "a")
    assert request.blocks == (
        ToolResultBlock(tool_call_id="b", output=None),
        ToolResultBlock(tool_call_id="a", output={"z": 1, "a": NASTY}, is_error=True),
    )


async def test_an_image_is_stored_once_by_its_hash() -> None:
    picture = png()
    request = await read(
        {"input": [part(picture), {"type": "text", "text": "Twice."}, part(picture, media_type="image/png")]}
    )
    block = ImageBlock(media_type="image/png", sha256=hashlib.sha256(picture).hexdigest(), size_bytes=len(picture))
    assert request.blocks == (block, TextBlock(text="Twice."), block)
    (blob,) = request.blobs
    assert (blob.data, blob.media_type, blob.sha256.hex()) == (picture, "image/png", block.sha256)


async def test_the_declared_type_must_match_the_content() -> None:
    path, message = await refused({"input": [part(gif(), media_type="image/png")]})
    assert (path, message) == ("input.0.media_type", "Expected image/gif, the type of the bytes")


@pytest.mark.parametrize(
    "data",
    [
        "data:image/png;base64," + base64.b64encode(png()).decode(),
        base64.b64encode(png()).decode().rstrip("=") + "\n",
        base64.b64encode(png()).decode() + "AAAA=",
        base64.urlsafe_b64encode(b"\xff\xfe\xfd" * 20).decode(),
        "é",
        base64.b64encode(b"plain text").decode(),
        base64.b64encode(png() + bytes(LIMIT)).decode(),
        base64.b64encode(png().ljust(LIMIT + 1, b"\0")).decode(),
    ],
)
async def test_invalid_images_are_refused(data: str) -> None:
    path, message = await refused({"input": [{"type": "text", "text": "Look."}, {"type": "image", "data": data}]})
    assert path == "input.1.data"
    assert data not in message


async def test_an_image_at_the_limit_is_accepted() -> None:
    request = await read({"input": [part(png().ljust(LIMIT, b"\0"))]})
    assert len(request.blobs[0].data) == LIMIT


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": "a", "tool_results": [{"tool_call_id": "a", "output": 1}]},
        {"input": ""},
        {"input": " \n\t"},
        {"input": None},
        {"input": []},
        {"input": "x" * 1_000_001},
        {"input": [{"type": "text", "text": ""}]},
        {"input": [{"type": "text", "text": "a", "cache": True}]},
        {"input": [{"type": "video", "data": "a"}]},
        {"input": [{"type": "text", "text": "a"}] * 65},
        {"input": 7},
        {"tool_results": []},
        {"tool_results": [{"tool_call_id": "a"}]},
        {"tool_results": [{"tool_call_id": "", "output": 1}]},
        {"tool_results": [{"tool_call_id": "a", "output": 1, "is_error": "yes"}]},
        {"tool_results": [{"tool_call_id": str(number), "output": 1} for number in range(129)]},
        {"tool_results": [{"tool_call_id": "a", "output": 1}], "abandon_pending_calls": True},
        {"tool_results": [{"tool_call_id": "a", "output": json.loads("[" * 51 + "]" * 51)}]},
        {"tool_results": [{"tool_call_id": "a", "output": "x" * 4 * 1024 * 1024}]},
        {"input": "a", "on_busy": "wait"},
        {"input": "a", "expected_revision": -1},
        {"input": "a", "expected_revision": "3"},
        {"input": "a", "expected_revision": True},
        {"input": "a", "expected_revision": 2**63},
        {"input": "a", "args": []},
        {"input": "a", "args": {"a": "x" * 262_144}},
        {"input": "a", "stream": True},
    ],
    ids=lambda body: str(body)[:60],
)
def test_an_undocumented_body_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TurnInput.model_validate(body)


def test_only_the_invalid_part_is_named() -> None:
    with pytest.raises(ValidationError) as caught:
        TurnInput.model_validate({"input": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]})
    assert [fault["loc"][-1] for fault in caught.value.errors()] == ["text"]


async def test_values_at_the_limits_are_accepted() -> None:
    await read({"input": "x" * 1_000_000})
    await read({"input": [{"type": "text", "text": "a"}] * 64})
    await read({"tool_results": [{"tool_call_id": str(number), "output": 1} for number in range(128)]})
    await read({"tool_results": [{"tool_call_id": "a", "output": json.loads("[" * 50 + "]" * 50)}]})


async def test_a_second_result_for_a_call_breaks_a_named_rule() -> None:
    results = [{"tool_call_id": call_id, "output": 1} for call_id in ("a", "b", "a", "c", "c")]
    with pytest.raises(HistoryRuleBroken) as caught:
        await read({"tool_results": results})
    assert caught.value.details == {"rule": "one_response_per_call", "repeated_ids": ["a", "c"]}


async def test_the_revision_is_the_same_in_body_and_header() -> None:
    assert (await refused({"input": "a", "expected_revision": 3}, if_match='"4"'))[0] == "expected_revision"
    assert (await read({"input": "a", "expected_revision": 3}, if_match='"3"')).expected_revision == 3


async def test_the_hash_is_of_the_parsed_body() -> None:
    async def meaning(**body: Any) -> bytes:
        return (await read(body)).body_hash

    plain = await meaning(input="a")
    same = [
        await meaning(input=[{"type": "text", "text": "a"}]),
        await meaning(input="a", on_busy="supersede", expected_revision=4),
        await meaning(input="a", args={}),
    ]
    assert set(same) == {plain}
    other = [
        await meaning(input="b"),
        await meaning(input="a", language="nb"),
        await meaning(input="a", args={"a": 1}),
        await meaning(input="a", abandon_pending_calls=True),
        await meaning(input=[part(png())]),
        await meaning(input=[part(png(width=4))]),
        await meaning(tool_results=[{"tool_call_id": "a", "output": 1}]),
        await meaning(tool_results=[{"tool_call_id": "a", "output": 1.0}]),
        await meaning(tool_results=[{"tool_call_id": "a", "output": 1, "is_error": True}]),
    ]
    assert len({plain, *other}) == len(other) + 1
    in_order = await meaning(tool_results=[{"tool_call_id": "a", "output": {"a": 1, "b": 2}}])
    assert in_order == await meaning(tool_results=[{"output": {"b": 2, "a": 1}, "tool_call_id": "a"}])


@given(any_text.filter(str.strip), json_values)
async def test_any_text_and_any_output_is_accepted_unchanged(text: str, output: Any) -> None:
    assert (await read({"input": text})).blocks == (TextBlock(text=text),)
    request = await read({"tool_results": [{"tool_call_id": "a", "output": output}]})
    assert request.blocks == (ToolResultBlock(tool_call_id="a", output=output),)


@given(st.binary(max_size=40))
async def test_any_bytes_are_an_image_or_are_refused(data: bytes) -> None:
    assert (await refused({"input": [part(b"\x89" + data)]}))[0] == "input.0.data"
