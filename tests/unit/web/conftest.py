"""A running site for each test, with a few routes for tests only."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from typing import Annotated, Literal

import pytest
from litestar import get, post
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream
from pydantic import BaseModel, ConfigDict, Field

from server.conversation.errors import every_error
from tests.support.fakes.log_capture import capture_log
from tests.support.fakes.site import Site, open_site

MARKER = "purple-elephant-content"


class TextPart(BaseModel):
    type: Literal["text"]
    text: Annotated[str, Field(max_length=5)]


class ImagePart(BaseModel):
    type: Literal["image"]
    width: int


class TurnBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]
    count: int = 0
    mode: Literal["a", "b"] = "a"


@post("/test/turns")
async def take(data: JSONBody[TurnBody]) -> dict[str, str]:
    return {"kind": type(data.input).__name__}


@get("/test/pages")
async def page(limit: FromQuery[int], order: FromQuery[Literal["asc", "desc"]] = "asc") -> dict[str, int]:
    return {"limit": limit, "order": len(order)}


@get("/test/errors/{code:str}")
async def fail(code: FromPath[str]) -> None:
    raise next(kind for kind in every_error() if kind.code == code)


@get("/test/crash")
async def crash() -> None:
    int(MARKER)


@get("/test/stream")
async def stream(kind: FromQuery[str]) -> Stream:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 10
        if kind == "broken":
            raise ValueError(MARKER)
        while kind == "endless":
            yield b"y"
            await asyncio.sleep(0.01)

    return Stream(chunks)


@pytest.fixture
def captured_log() -> Iterator[StringIO]:
    with capture_log() as stream:
        yield stream


@pytest.fixture
async def site(captured_log: StringIO) -> AsyncIterator[Site]:
    async with open_site(log=captured_log, more_routes=[take, page, fail, crash, stream]) as running:
        yield running
