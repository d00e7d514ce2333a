"""HTTP to one server: requests, retries, decoded answers and errors."""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import httpx2

from server.conversation.block import JsonValue
from server.web.client.errors import AnswerMalformed, ClientError, ServerUnreachable, StrataProblem

EVENT_STREAM: Final = "text/event-stream"
_PROBLEM: Final = "application/problem+json"
_GATEWAY: Final = frozenset({502, 503, 504})
"""Statuses of a proxy that cannot reach the server."""
_WAITING_MAY_HELP: Final = frozenset({409, 429, 503})
_MEMBERS: Final = frozenset({"type", "title", "status", "code", "detail", "hint", "request_id"})
_NEVER_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_NO_SERVER: Final = "Is the server running, and is the address right?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long to wait for the next byte of the server."""

    connect_seconds: float = 10.0
    answer_seconds: float = 60.0
    silence_seconds: float = 45.0
    """In a stream. The server sends an event or a comment every 15 seconds at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudget:
    """How long to retry. The wait doubles with each attempt and is shortened at random, to spread out many clients."""

    seconds: float = 60.0
    """From the first failure, or from the last progress of a stream. 0: no retries."""
    first_wait_seconds: float = 0.25
    max_wait_seconds: float = 8.0


OnRetry: TypeAlias = Callable[[ClientError, float], None]
"""Called before each retry with the error and the wait in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the server."""

    method: str
    path: str
    body: JsonValue = None
    query: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    """Sending it twice has the same effect as sending it once."""


class Retries:
    """The attempts of one operation.

    A request is repeated only if that does no harm: if it never left, if it is repeatable by its nature or its
    idempotency key, or if the server refused it with a `retry-after`.
    """

    __slots__ = ("_budget", "_deadline", "_on_retry", "_wait_seconds")

    def __init__(self, budget: RetryBudget, on_retry: OnRetry | None) -> None:
        self._budget = budget
        self._on_retry = on_retry
        self._deadline: float | None = None
        self._wait_seconds = budget.first_wait_seconds

    def reset(self) -> None:
        """Reset the budget after progress."""
        self._deadline = None
        self._wait_seconds = self._budget.first_wait_seconds

    async def wait_after(self, error: ClientError, *, repeatable: bool) -> None:
        """Wait until the next attempt. Raises the error if there is none."""
        least = _min_wait(error, repeatable=repeatable)
        if least is None:
            raise error
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._budget.seconds
        wait = max(least, self._wait_seconds * random.uniform(0.5, 1))  # noqa: S311  reason: spreads load, keeps no secret
        if now + wait > self._deadline:
            raise error
        self._wait_seconds = min(self._wait_seconds * 2, self._budget.max_wait_seconds)
        if self._on_retry is not None:
            self._on_retry(error, wait)
        await asyncio.sleep(wait)


def _min_wait(error: ClientError, *, repeatable: bool) -> float | None:
    """Return the shortest wait before the same request; None if it must not be repeated."""
    match error:
        case ServerUnreachable():
            return 0.0 if repeatable or not error.sent else None
        case StrataProblem():
            return error.retry_after_seconds
        case _:
            return None


class Connection:
    """A pool of connections to one server, with one key."""

    def __init__(
        self, base_url: str, api_key: str, *, timeouts: Timeouts, retry_budget: RetryBudget, on_retry: OnRetry | None
    ) -> None:
        """Raises `ServerUnreachable` for an address or a key that can never work. The message omits the key."""
        _check(base_url, api_key)
        self.base_url = base_url
        self._timeouts = timeouts
        self._retry_budget = retry_budget
        self._on_retry = on_retry
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {api_key}", "accept-encoding": "identity"},
            verify=_trusted(),
        )

    async def close(self) -> None:
        await self._client.aclose()

    def new_retries(self) -> Retries:
        return Retries(self._retry_budget, self._on_retry)

    async def fetch(self, request: Request) -> Any:
        """Return the JSON of the answer, retrying within the budget."""
        return (await self.fetch_with_headers(request))[0]

    async def fetch_with_headers(self, request: Request) -> tuple[Any, Mapping[str, str]]:
        """Return the JSON of the answer and its headers, retrying within the budget."""
        retries = self.new_retries()
        while True:
            try:
                response = await self._send(request, stream=False)
            except ClientError as error:
                await retries.wait_after(error, repeatable=request.repeatable)
                continue
            with decoding(f"answer to {request.method} {request.path}"):
                return json.loads(response.content), response.headers

    async def open_stream(self, request: Request) -> httpx2.Response:
        """Return an answer with an unread stream of events, which the caller closes. Makes one attempt."""
        response = await self._send(request, stream=True)
        if response.status_code == HTTPStatus.NO_CONTENT:
            await response.aclose()
            raise AnswerMalformed("The turn has ended, and there are no events after the given one.")
        if response.headers.get("content-type", "").partition(";")[0].strip() != EVENT_STREAM:
            await response.aclose()
            raise AnswerMalformed(f"The server did not answer {request.method} {request.path} with a stream of events.")
        return response

    async def _send(self, request: Request, *, stream: bool) -> httpx2.Response:
        headers = {"accept": EVENT_STREAM if stream else "application/json", **request.headers}
        if request.body is not None:
            headers["content-type"] = "application/json"
        silence = self._timeouts.silence_seconds if stream else self._timeouts.answer_seconds
        built = self._client.build_request(
            request.method,
            request.path,
            content=_encode_body(request.body) if request.body is not None else None,
            params=dict(request.query) or None,
            headers=headers,
            timeout=httpx2.Timeout(silence, connect=self._timeouts.connect_seconds),
        )
        try:
            response = await self._client.send(built, stream=stream)
            if response.is_success:
                return response
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx2.TransportError as error:
            raise self.unreachable(error) from error
        raise self._problem(response)

    def unreachable(self, error: httpx2.TransportError) -> ServerUnreachable:
        """Return the error for a failure of the transport."""
        sent = not isinstance(error, _NEVER_SENT)
        what = str(error) or type(error).__name__
        message = f"The connection to {self.base_url} was lost" if sent else f"Cannot connect to {self.base_url}"
        return ServerUnreachable(f"{message} ({what}).", hint=_NO_SERVER, sent=sent)

    def _problem(self, response: httpx2.Response) -> ClientError:
        if response.headers.get("content-type", "").partition(";")[0].strip() != _PROBLEM:
            if response.status_code in _GATEWAY:
                return ServerUnreachable(
                    f"{self.base_url} answers {response.status_code}: a proxy cannot reach the server.", sent=True
                )
            return AnswerMalformed(
                f"{self.base_url} answers {response.status_code} {response.reason_phrase}, "
                "which is not the answer of a Strata server.",
                hint="Is the address right?",
            )
        with decoding("problem"):
            members = json.loads(response.content)
            return StrataProblem(
                members["detail"],
                code=members["code"],
                status=response.status_code,
                hint=members.get("hint") or "",
                request_id=members.get("request_id") or "",
                retry_after_seconds=_retry_after(response.status_code, response.headers),
                members={name: value for name, value in members.items() if name not in _MEMBERS},
            )


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Raise `AnswerMalformed` for the errors that decoders raise."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise AnswerMalformed(
            f"The server's {what} cannot be read ({type(error).__name__}: {error}).",
            hint="Is it a Strata server of about the same release as this client?",
        ) from error


def _encode_body(body: JsonValue) -> bytes:
    """Encode JSON in ASCII, which can hold any text, including unpaired surrogates."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")


@cache
def _trusted() -> ssl.SSLContext:
    """Load the trusted certificate authorities, once: it takes longer than a request."""
    return httpx2.create_ssl_context()


def _check(base_url: str, api_key: str) -> None:
    try:
        parts, url = urlsplit(base_url), httpx2.URL(base_url)
    except (ValueError, httpx2.InvalidURL):
        parts, url = urlsplit(""), httpx2.URL()
    if parts.scheme not in {"http", "https"} or not url.host:
        raise ServerUnreachable(
            f"{base_url!r} is not the address of a server.", hint="It looks like http://127.0.0.1:8400.", sent=False
        )
    if not (api_key and api_key.isascii() and api_key.isprintable()):
        raise ServerUnreachable("The key is empty or has characters that keys do not have.", sent=False)


def _retry_after(status: int, headers: Mapping[str, str]) -> float | None:
    """Return the wait that the server's headers ask for; None if the request must not be repeated."""
    verdict = headers.get("x-should-retry", "").lower()
    written = headers.get("retry-after", "")
    seconds = float(written) if written.isdecimal() else None
    if verdict == "false" or (verdict != "true" and status not in _WAITING_MAY_HELP):
        return None
    return seconds if seconds is not None or verdict != "true" else 0.0
