"""What the error responses of both vendors have in common: how they are read, and what of them is passed on.

A response is read from its recorded bytes, so that the same is found in a stored one. It may be anything: a gateway's
page, text that is not UTF-8, JSON that no parser takes.
"""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from server.conversation.exact_json import loads_exact, to_plain
from server.conversation.redaction import redact_text

MAX_MESSAGE_LENGTH: Final = 1000
_MAX_DELAY_SECONDS: Final = 31 * 86_400
_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def read_error_body(body: bytes) -> Any:
    """The JSON of an error response; None for what is not JSON."""
    try:
        return to_plain(loads_exact(body))
    except ValueError:
        return None


def clean_message(message: object) -> str:
    """A provider's message as it may be passed on: bounded, without secrets and without control characters."""
    if not isinstance(message, str):
        return ""
    text = redact_text(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", message[: 4 * MAX_MESSAGE_LENGTH])).strip()
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[: MAX_MESSAGE_LENGTH - 1]}…"


def read_delay(text: object, *, unit_seconds: float = 1.0) -> float | None:
    """Seconds from a number; None for what is no number that anybody could wait for."""
    try:
        seconds = float(str(text)) * unit_seconds
    except ValueError:
        return None
    return min(seconds, float(_MAX_DELAY_SECONDS)) if math.isfinite(seconds) and seconds >= 0 else None


def read_retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """How long the response asks to wait: `retry-after-ms`, else `retry-after` as seconds or as a date."""
    if "retry-after-ms" in headers:
        return read_delay(headers["retry-after-ms"], unit_seconds=0.001)
    asked = headers.get("retry-after")
    if asked is None or (seconds := read_delay(asked)) is not None:
        return None if asked is None else seconds
    try:
        moment = parsedate_to_datetime(asked)
    except (ValueError, TypeError):
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return read_delay(max(0.0, (moment - (now or datetime.now(UTC))).total_seconds()))
