"""Request headers with a meaning for turns and conversations.

They are read strictly: a malformed value is refused, not ignored. `accept`, `prefer` and the retry count are
exceptions, because libraries add them by themselves.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from litestar.params import HeaderParameter

from server.web.body import MAX_BIGINT
from server.web.sse import EVENT_STREAM
from server.web.validation import refuse

_ETAG: Final = re.compile(r'"([0-9]{1,19})"')
_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_JSON_RANGES: Final = ("application/json", "application/*", "*/*")
"""From the most to the least specific; the first one present is used."""

IfMatch: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="if-match",
        description="The `etag` of the expected revision.",
        schema_extra={"pattern": f"^({_ETAG.pattern}|\\*)$"},
    ),
]
IfNoneMatch: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="if-none-match", description="An `etag`; the answer is 304 if the conversation has not changed."
    ),
]
IdempotencyKey: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="idempotency-key",
        description="1 to 255 printable ASCII characters. A request with the same key and body returns the same turn.",
        schema_extra={"pattern": f"^{_KEY.pattern}$"},
    ),
]
RetryCount: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="x-stainless-retry-count",
        description="More than 0: the request was sent before. Without a key it is recognised by its body.",
    ),
]
Prefer: TypeAlias = Annotated[
    str | None,
    HeaderParameter(name="prefer", description="`respond-async`: answer 202 as soon as the input is stored."),
]
LastEventId: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="last-event-id",
        description="The `id` of the last event received.",
        schema_extra={"pattern": f"^{_NUMBER.pattern}$"},
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnHeaders:
    """The headers of a request for a new turn."""

    idempotency_key: str | None = None
    announces_retry: bool = False
    if_match: str | None = None
    prefers_async: bool = False


async def provide_turn_headers(
    idempotency_key: IdempotencyKey = None,
    retry_count: RetryCount = None,
    if_match: IfMatch = None,
    prefer: Prefer = None,
) -> TurnHeaders:
    return TurnHeaders(
        idempotency_key=read_idempotency_key(idempotency_key),
        announces_retry=announces_retry(retry_count),
        if_match=if_match,
        prefers_async=prefers_async(prefer),
    )


def write_etag(revision: int) -> str:
    """Return the entity tag of a revision."""
    return f'"{revision}"'


def read_expected_revision(if_match: str | None, in_body: int | None = None) -> int | None:
    """Return the expected revision from the header or the body; if both have one, they must be equal."""
    if if_match is None or if_match.strip() == "*":
        return in_body
    tag = _ETAG.fullmatch(if_match.strip())
    if tag is None or int(tag[1]) > MAX_BIGINT:
        raise refuse("if-match", "Expected the `etag` of a conversation, a number in quotes", source="header")
    revision = int(tag[1])
    if in_body not in {None, revision}:
        raise refuse("expected_revision", "Expected the same revision as in the `if-match` header")
    return revision


def is_unchanged(if_none_match: str | None, revision: int) -> bool:
    """Return whether the client has this revision already."""
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return "*" in tags or write_etag(revision) in tags


def read_idempotency_key(value: str | None) -> str | None:
    """Return the key, or None. Raises `ValidationFailed`."""
    if value is not None and _KEY.fullmatch(value) is None:
        raise refuse("idempotency-key", "Expected 1 to 255 printable ASCII characters", source="header")
    return value


def announces_retry(value: str | None) -> bool:
    """Return whether the retry count says that the request was sent before."""
    return value is not None and value.isascii() and value.isdecimal() and int(value[:9]) > 0


def read_last_event_id(header: str | None, in_query: int | None) -> int:
    """Return the number after which events begin. The header takes precedence: browsers send it when they reconnect."""
    if header is None:
        return in_query or 0
    if _NUMBER.fullmatch(header) is None:
        raise refuse("last-event-id", "Expected the number of an event", source="header")
    return int(header)


def wants_stream(accept: str | None) -> bool:
    """Return whether `text/event-stream` is accepted by name and JSON is not preferred."""
    ranges = dict(_ranges(accept or "*/*"))
    stream = ranges.get(EVENT_STREAM, 0.0)
    json = next((ranges[name] for name in _JSON_RANGES if name in ranges), 0.0)
    return stream > 0 and stream >= json


def prefers_async(prefer: str | None) -> bool:
    """Return whether the client prefers an answer before the turn has ended."""
    return any(part.partition(";")[0].strip().lower() == "respond-async" for part in (prefer or "").split(","))


def _ranges(accept: str) -> Iterator[tuple[str, float]]:
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((piece[2:] for piece in parameters if piece.startswith("q=")), "1")
        yield name, float(quality) if re.fullmatch(r"[01](\.[0-9]{0,3})?", quality) else 0.0
