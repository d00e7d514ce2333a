"""Reading error responses, as both vendors do it.

A response is read from its recorded bytes, so a stored one gives the same result. It may be anything: the HTML page of
a gateway, text that is not UTF-8, malformed JSON.
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
    """Return the JSON of an error response; None if it is not JSON."""
    try:
        return to_plain(loads_exact(body))
    except ValueError:
        return None


def clean_message(message: object) -> str:
    """Return a provider's message as it may be passed on: bounded, without secrets and control characters."""
    if not isinstance(message, str):
        return ""
    text = redact_text(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", message[: 4 * MAX_MESSAGE_LENGTH])).strip()
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[: MAX_MESSAGE_LENGTH - 1]}…"


def read_delay(text: object, *, unit_seconds: float = 1.0) -> float | None:
    """Return the seconds of a delay, at most 31 days; None if it is not a number of at least 0."""
    try:
        seconds = float(str(text)) * unit_seconds
    except ValueError:
        return None
    return min(seconds, float(_MAX_DELAY_SECONDS)) if math.isfinite(seconds) and seconds >= 0 else None


def read_retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return the delay in `retry-after-ms`, else in `retry-after`, which has seconds or a date; None if missing."""
    if "retry-after-ms" in headers:
        return read_delay(headers["retry-after-ms"], unit_seconds=0.001)
    text = headers.get("retry-after")
    if text is None or (seconds := read_delay(text)) is not None:
        return None if text is None else seconds
    try:
        retry_at = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    retry_at = retry_at if retry_at.tzinfo is not None else retry_at.replace(tzinfo=UTC)
    return read_delay(max(0.0, (retry_at - (now or datetime.now(UTC))).total_seconds()))
