"""What clients say in headers, read strictly: a header that is not understood is refused and not passed over.

The exception is what libraries add by themselves: `accept`, `prefer` and the count of retries are hints.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from litestar.params import HeaderParameter

from server.web.body import LARGEST_BIGINT
from server.web.sse import EVENT_STREAM
from server.web.validation import refuse

_ETAG: Final = re.compile(r'"([0-9]{1,19})"')
_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_JSON_RANGES: Final = ("application/json", "application/*", "*/*")
"""From the most to the least specific; the first that is there counts."""

IfMatch: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="if-match",
        description="The `etag` of the revision that this is meant for.",
        schema_extra={"pattern": f"^({_ETAG.pattern}|\\*)$"},
    ),
]
IfNoneMatch: TypeAlias = Annotated[
    str | None,
    HeaderParameter(name="if-none-match", description="An `etag`: answers 304 while the conversation has not changed."),
]
IdempotencyKey: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="idempotency-key",
        description="1 to 255 printable ASCII characters. The same key with the same body is the same turn.",
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
    HeaderParameter(name="prefer", description="`respond-async`: answer 202 as soon as the input is durable."),
]
LastEventId: TypeAlias = Annotated[
    str | None,
    HeaderParameter(
        name="last-event-id",
        description="The number of the last event that arrived.",
        schema_extra={"pattern": f"^{_NUMBER.pattern}$"},
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnHeaders:
    """What the headers add to the body of a new turn."""

    idempotency_key: str | None = None
    announces_retry: bool = False
    if_match: str | None = None
    prefers_no_waiting: bool = False


async def provide_turn_headers(
    idempotency_key: IdempotencyKey = None,
    retry_count: RetryCount = None,
    if_match: IfMatch = None,
    prefer: Prefer = None,
) -> TurnHeaders:
    """Handlers get them as `turn_headers`."""
    return TurnHeaders(
        idempotency_key=read_idempotency_key(idempotency_key),
        announces_retry=announces_retry(retry_count),
        if_match=if_match,
        prefers_no_waiting=wants_no_waiting(prefer),
    )


def write_etag(revision: int) -> str:
    """The entity tag of a conversation."""
    return f'"{revision}"'


def read_expected_revision(if_match: str | None, in_body: int | None = None) -> int | None:
    """The revision that the request expects, said in the header, in the body, or in both alike."""
    if if_match is None or if_match.strip() == "*":
        return in_body
    tag = _ETAG.fullmatch(if_match.strip())
    if tag is None or int(tag[1]) > LARGEST_BIGINT:
        raise refuse("if-match", "Expected the `etag` of a conversation, a number in quotes", source="header")
    revision = int(tag[1])
    if in_body not in {None, revision}:
        raise refuse("expected_revision", "Expected the same revision as in the `if-match` header")
    return revision


def is_unchanged(if_none_match: str | None, revision: int) -> bool:
    """Whether the client has this revision already."""
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return "*" in tags or write_etag(revision) in tags


def read_idempotency_key(value: str | None) -> str | None:
    """The key, if one was sent."""
    if value is not None and _KEY.fullmatch(value) is None:
        raise refuse("idempotency-key", "Expected 1 to 255 printable ASCII characters", source="header")
    return value


def announces_retry(value: str | None) -> bool:
    """Whether the client says that it sent this before."""
    return value is not None and value.isascii() and value.isdecimal() and int(value[:9]) > 0


def read_last_event_id(header: str | None, in_query: int | None) -> int:
    """The number after which the events begin. The header wins: a browser sends it by itself when it reconnects."""
    if header is None:
        return in_query or 0
    if _NUMBER.fullmatch(header) is None:
        raise refuse("last-event-id", "Expected the number of an event", source="header")
    return int(header)


def wants_stream(accept: str | None) -> bool:
    """Whether events are asked for by name, and JSON is not liked better."""
    ranges = dict(_ranges(accept or "*/*"))
    stream = ranges.get(EVENT_STREAM, 0.0)
    json = next((ranges[name] for name in _JSON_RANGES if name in ranges), 0.0)
    return stream > 0 and stream >= json


def wants_no_waiting(prefer: str | None) -> bool:
    """Whether the client prefers to be answered before the work is done."""
    return any(part.partition(";")[0].strip().lower() == "respond-async" for part in (prefer or "").split(","))


def _ranges(accept: str) -> Iterator[tuple[str, float]]:
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((piece[2:] for piece in parameters if piece.startswith("q=")), "1")
        yield name, float(quality) if re.fullmatch(r"[01](\.[0-9]{0,3})?", quality) else 0.0
