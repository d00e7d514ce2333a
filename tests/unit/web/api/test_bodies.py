import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.fakes.site import BODY_LIMIT, Site

JSON = {"content-type": "application/json"}
URL = "/test/turns"


def head_of(length: int) -> bytes:
    """The head of a request that announces a body of this length."""
    lines = (f"POST {URL} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}", "", "")
    return "\r\n".join(lines).encode()


async def test_a_valid_body_is_accepted(site: Site) -> None:
    for media_type in ("application/json", "application/json; charset=utf-8", "application/merge-patch+json"):
        answer = await site.client.post(URL, content=b'{"input": "hi"}', headers={"content-type": media_type})
        assert (answer.status_code, answer.json()) == (201, {"kind": "str"})
    assert (await site.client.post(URL, content=b'{"input": "hi"}')).status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"input": "hi"',
        b"\xff\xfe",
        b'{"input": "\xff"}',
        b"nope",
        b'{"input": NaN}',
        b'{"input": "\\ud83d", "count": 1e400}',
    ],
    ids=["cut", "unclosed", "utf-16", "not utf-8", "bare word", "NaN", "a number beyond all"],
)
async def test_a_body_that_is_not_json_is_malformed(site: Site, body: bytes) -> None:
    answer = await site.client.post(URL, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "body_malformed")
    assert not site.events("http.request_failed")


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "a", "count": 1, "input": "b"}',
        b'{"input": "a", "in\\u0070ut": "b"}',
        b'{"input": "half: \\ud83d", "input": "b"}',
        b'{"input": [{"input": 1, "input": 2}]}',
        b'{"count" : 1, "input"\n: "a", "input"\t:"b"}',
    ],
    ids=["plain", "escaped", "read slowly", "inside", "white space"],
)
async def test_a_duplicate_key_is_refused_by_name(site: Site, body: bytes) -> None:
    answer = await site.client.post(URL, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "body_malformed")
    assert answer.json()["key"] == "input"
    assert 'the key "input" appears twice' in answer.json()["detail"]


async def test_a_text_that_looks_like_a_key_is_not_a_key(site: Site) -> None:
    answer = await site.client.post(URL, content=b'{"input": "{\\"input\\": 1, \\"input\\": 2}"}', headers=JSON)
    assert answer.status_code == 201


async def test_a_lone_surrogate_is_accepted_in_a_text_and_not_in_a_name(site: Site) -> None:
    answer = await site.client.post(URL, content=b'{"input": "half an emoji: \\ud83d"}', headers=JSON)
    assert (answer.status_code, answer.json()) == (201, {"kind": "str"})
    refused = await site.client.post(URL, content=b'{"input": "a", "\\ud83d": 1}', headers=JSON)
    assert (refused.status_code, refused.json()["code"]) == (422, "validation_failed")


async def test_a_text_is_not_accepted_as_a_number(site: Site) -> None:
    answer = await site.client.post(URL, content=b'{"input": "a", "count": "3"}', headers=JSON)
    assert answer.json()["errors"] == [
        {"path": "count", "source": "body", "message": "Input should be a valid integer"}
    ]


async def test_a_body_that_is_nested_too_deeply_is_malformed(site: Site) -> None:
    answer = await site.client.post(URL, content=b"[" * (BODY_LIMIT - 1), headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "body_malformed")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
async def test_another_content_type_is_refused(site: Site, media_type: str) -> None:
    answer = await site.client.post(URL, content=b'{"input": "hi"}', headers={"content-type": media_type})
    assert (answer.status_code, answer.json()["code"]) == (415, "media_type_unsupported")


async def test_an_empty_body_is_missing(site: Site) -> None:
    answer = await site.client.post(URL, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"path": "", "source": "body", "message": "A JSON body is required"}]


async def test_a_body_at_the_limit_is_accepted(site: Site) -> None:
    empty = len(b'{"input": ""}')
    body = b'{"input": "' + b"x" * (BODY_LIMIT - empty) + b'"}'
    assert len(body) == BODY_LIMIT
    assert (await site.client.post(URL, content=body, headers=JSON)).status_code == 201


async def test_a_body_that_announces_too_many_bytes_is_refused_before_it_is_read(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head_of(BODY_LIMIT + 1))
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode()
    writer.close()
    await writer.wait_closed()
    assert head.startswith("HTTP/1.1 413")
    assert "application/problem+json" in head
    assert "x-content-type-options: nosniff" in head


async def test_a_chunked_body_is_refused_when_it_exceeds_the_limit(site: Site) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(BODY_LIMIT // 512 + 4):
            sent += 512
            yield b" " * 512

    answer = await site.client.post(URL, content=chunks(), headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_an_incomplete_body_is_not_a_server_error(site: Site) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head_of(100) + b"{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(30):
        while not site.events("http.request_finished"):  # noqa: ASYNC110  reason: a log has no event to wait for
            await asyncio.sleep(0.01)
    (event,) = site.events("http.request_finished")
    assert (event["status"], event["disconnected"]) == (499, True)
    assert not site.events("http.request_failed")
