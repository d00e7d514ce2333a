"""Damages what a provider sends, byte by byte, on the emulator's side of the connection."""

import random
import re
from collections.abc import MutableMapping
from typing import Any

from server.emulator.exchange import ASGIApp, Receive, Scope, Send

_CHUNK_SHARE = 0.3
"""The number of pieces of a damaged answer."""
_SIGNATURE = re.compile(rb'[sS]ignature": ?"([A-Za-z0-9+/_-]{8,})')
_SIGNATURE_SHARE = 0.5
"""Of the damage to a piece that has a signature."""


def mutate(rng: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, removed, repeated, or replaced by something that a parser may fail on."""
    signatures = list(_SIGNATURE.finditer(data))
    if signatures and rng.random() < _SIGNATURE_SHARE:
        # Still well-formed, but not what the provider signed: it is refused when it is sent back.
        place = rng.randrange(*rng.choice(signatures).span(1))
        return data[:place] + (b"A" if data[place : place + 1] != b"A" else b"B") + data[place + 1 :]
    place = rng.randrange(len(data))
    end = min(len(data), place + rng.randrange(1, 24))
    hostile = (
        b"",
        b"\xff\xfe",
        b"\x00",
        b'"\\ud800"',
        b"9" * 5000,
        b"1e400",
        b"[" * 200,
        b"null",
        b"\r\n\r\n",
        b"data: {}\n\n",
        b"-1",
        b"4294967296",
        rng.randbytes(6),
        data[place:end] * 2,
    )
    return data[:place] + rng.choice(hostile) + data[end:]


class Fuzzer:
    """Wraps an emulator: damages the next answer if a seed is set for it."""

    def __init__(self) -> None:
        self.seed: int | None = None

    def around(self, app: ASGIApp) -> ASGIApp:
        async def fuzzed(scope: Scope, receive: Receive, send: Send) -> None:
            seed, self.seed = self.seed, None
            if seed is None:
                await app(scope, receive, send)
                return
            rng = random.Random(seed)  # noqa: S311  reason: test data

            async def send_damaged(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    await send(without_length(message))
                    return
                body = message.get("body", b"")
                if body and rng.random() < _CHUNK_SHARE:
                    body = mutate(rng, body)
                await send({**message, "body": body})

            await app(scope, receive, send_damaged)

        return fuzzed


def without_length(message: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The head of a response whose body may become longer or shorter."""
    return {**message, "headers": [pair for pair in message["headers"] if pair[0] != b"content-length"]}
