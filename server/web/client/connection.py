"""HTTP to one server: requests out, JSON and problems in."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from server.conversation.block import JsonValue
from server.web.client.decoding import decode_json, understanding
from server.web.client.errors import AnswerMalformed, ClientError, ServerUnreachable, StrataProblem
from server.web.client.requests import encode_body
from server.web.client.retries import OnRetry, RetryBudget, Waiting

EVENT_STREAM: Final = "text/event-stream"
_PROBLEM: Final = "application/problem+json"
_GATEWAY: Final = frozenset({502, 503, 504})
"""What something between us and the server answers while the server is away."""
_WAITING_MAY_HELP: Final = frozenset({409, 429, 503})
_MEMBERS: Final = frozenset({"type", "title", "status", "code", "detail", "hint", "request_id"})
_NEVER_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_NO_SERVER: Final = "Is the server running, and is the address right?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long to wait for the server's next byte."""

    connect_seconds: float = 10.0
    answer_seconds: float = 60.0
    silence_seconds: float = 45.0
    """In a stream. A server says something every 15 seconds at the latest; longer silence is a dead connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    method: str
    path: str
    body: JsonValue = None
    query: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    """Sending it twice has the effect of once."""


class Connection:
    """Connections are kept open between requests; `close` ends them."""

    def __init__(
        self, base_url: str, api_key: str, *, timeouts: Timeouts, retry_budget: RetryBudget, on_retry: OnRetry
    ) -> None:
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

    def waiting(self) -> Waiting:
        """For the attempts at one thing."""
        return Waiting(self._retry_budget, self._on_retry)

    async def ask(self, ask: Ask) -> Any:
        """The JSON of the answer."""
        return (await self.ask_with_headers(ask))[0]

    async def ask_with_headers(self, ask: Ask) -> tuple[Any, Mapping[str, str]]:
        """The JSON of the answer and its headers. Tries again as long as there is patience and no harm in it."""
        waiting = self.waiting()
        while True:
            try:
                answer = await self._send(ask, stream=False)
            except ClientError as error:
                await waiting.wait_after(error, repeatable=ask.repeatable)
                continue
            return decode_json(answer.content, f"answer to {ask.method} {ask.path}"), answer.headers

    async def open_stream(self, ask: Ask) -> httpx2.Response:
        """An answer whose body is a stream that has not been read. One attempt; the caller closes it."""
        answer = await self._send(ask, stream=True)
        if answer.status_code == HTTPStatus.NO_CONTENT:
            await answer.aclose()
            raise AnswerMalformed("The turn has ended, and no event is left behind the one that was named.")
        if answer.headers.get("content-type", "").partition(";")[0].strip() != EVENT_STREAM:
            await answer.aclose()
            raise AnswerMalformed(f"The server did not answer {ask.method} {ask.path} with a stream of events.")
        return answer

    async def _send(self, ask: Ask, *, stream: bool) -> httpx2.Response:
        headers = {"accept": EVENT_STREAM if stream else "application/json", **ask.headers}
        if ask.body is not None:
            headers["content-type"] = "application/json"
        silence = self._timeouts.silence_seconds if stream else self._timeouts.answer_seconds
        request = self._client.build_request(
            ask.method,
            ask.path,
            content=encode_body(ask.body) if ask.body is not None else None,
            params=dict(ask.query) or None,
            headers=headers,
            timeout=httpx2.Timeout(silence, connect=self._timeouts.connect_seconds),
        )
        try:
            answer = await self._client.send(request, stream=stream)
            if answer.is_success:
                return answer
            try:
                await answer.aread()
            finally:
                await answer.aclose()
        except httpx2.TransportError as error:
            raise self.unreachable(error) from error
        raise self._problem(answer)

    def unreachable(self, error: httpx2.TransportError) -> ServerUnreachable:
        """What a fault of the wire means here."""
        sent = not isinstance(error, _NEVER_SENT)
        what = str(error) or type(error).__name__
        sentence = "The connection to" if sent else "There is no connection to"
        lost = f"{sentence} {self.base_url}{' was lost' if sent else ''} ({what})."
        return ServerUnreachable(lost, hint=_NO_SERVER, sent=sent)

    def _problem(self, answer: httpx2.Response) -> ClientError:
        if answer.headers.get("content-type", "").partition(";")[0].strip() != _PROBLEM:
            if answer.status_code in _GATEWAY:
                return ServerUnreachable(
                    f"{self.base_url} answers {answer.status_code}: the server behind it is away.", sent=True
                )
            return AnswerMalformed(
                f"{self.base_url} answers {answer.status_code} {answer.reason_phrase}, "
                "and not as a Strata server does.",
                hint="Is the address right?",
            )
        members = decode_json(answer.content, "problem")
        with understanding("problem"):
            return StrataProblem(
                members["detail"],
                code=members["code"],
                status=answer.status_code,
                hint=members.get("hint") or "",
                request_id=members.get("request_id") or "",
                retry_after_seconds=_retry_after(answer.status_code, answer.headers),
                members={name: value for name, value in members.items() if name not in _MEMBERS},
            )


@cache
def _trusted() -> ssl.SSLContext:
    """The authorities that this machine's clients trust. Reading them takes longer than a request, hence once."""
    return httpx2.create_ssl_context()


def _check(base_url: str, api_key: str) -> None:
    """Refuses at once what could never work, and does not repeat a key."""
    try:
        parts, url = urlsplit(base_url), httpx2.URL(base_url)
    except (ValueError, httpx2.InvalidURL):
        parts, url = urlsplit(""), httpx2.URL()
    if parts.scheme not in {"http", "https"} or not url.host:
        raise ServerUnreachable(
            f"{base_url!r} is no address of a server.", hint="It looks like http://127.0.0.1:8400.", sent=False
        )
    if not (api_key and api_key.isascii() and api_key.isprintable()):
        raise ServerUnreachable("The key is empty, or has characters that no key has.", sent=False)


def _retry_after(status: int, headers: Mapping[str, str]) -> float | None:
    """The server's word on whether to send the same again, and when. Without its word it is not sent again."""
    verdict = headers.get("x-should-retry", "").lower()
    written = headers.get("retry-after", "")
    seconds = float(written) if written.isdecimal() else None
    if verdict == "false" or (verdict != "true" and status not in _WAITING_MAY_HELP):
        return None
    return seconds if seconds is not None or verdict != "true" else 0.0
