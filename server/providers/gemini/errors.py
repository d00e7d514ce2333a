"""Translation of Gemini's error responses."""

import re
from collections.abc import Mapping
from typing import Any, Final

from server.conversation.errors import (
    AnswerRejected,
    CacheGone,
    ContextTooLong,
    ProviderAuthentication,
    ProviderFailed,
    ProviderOverloaded,
    ProviderQuotaExceeded,
    ProviderRateLimited,
    ProviderRejected,
    ProviderTimedOut,
    ProviderUnavailable,
    SignatureRejected,
)
from server.providers.wire.error_response import clean_message, read_delay, read_error_body, read_retry_after
from server.providers.wire.exchange import Recording

_SIGNATURE: Final = re.compile(r"thought[ _]signature", re.IGNORECASE)
_CACHE: Final = re.compile(
    r"cached[ _]?contents?\b.*(not found|expired|denied|does not exist|not exist)"
    r"|(not found|expired|denied).*\bcached[ _]?contents?\b",
    re.IGNORECASE | re.DOTALL,
)
"""Google does not document the message, and has used several."""
_TOO_LONG: Final = re.compile(r"exceeds the maximum number of tokens|token count .*exceeds", re.IGNORECASE)
_QUOTA: Final = re.compile(r"billing|spend|credit|per ?day|daily", re.IGNORECASE)
_NO_CREDIT: Final = re.compile(
    r"credit(s| balance)? (is|are) (too low|depleted|exhausted)|insufficient (credits?|balance|funds)"
    r"|(enable|requires?|without|no active|inactive|disabled) billing"
    r"|billing (account )?(is |has been )?(disabled|closed|inactive)",
    re.IGNORECASE,
)
"""An error about billing and not about the request."""
_SECONDS: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")
_PART: Final = re.compile(r"Unknown name .* at 'contents\[\d+\]\.parts\[\d+\]")
"""A part with an unknown member. Only answers of Gemini can contain one."""
_STATUSES: Final = range(100, 600)
_MAX_DELAY_LENGTH: Final = 40
_BAD_KEY: Final = "API_KEY_INVALID"


def error_from_recording(recording: Recording) -> ProviderFailed:
    """Translate a recorded error response."""
    return error_from_body(read_error_body(recording.body), recording.status, recording.headers)


def error_from_body(body: Any, status: int | None, headers: Mapping[str, str] | None = None) -> ProviderFailed:
    """Translate an error object, of a response or from within a stream."""
    found = body[0] if isinstance(body, list) and body else body
    error = found.get("error", found) if isinstance(found, dict) else {}
    error = error if isinstance(error, dict) else {}
    code = error.get("code")
    code = code if isinstance(code, int) and code in _STATUSES else status
    message = clean_message(error.get("message"))
    facts: dict[str, Any] = {"provider_status": clean_message(error.get("status")) or code}
    facts |= {"provider_message": message} if message else {}
    delay = _find_delay(error, headers or {})
    facts |= {} if delay is None else {"retry_after_seconds": delay}
    match code:
        case 429:
            # A limit without a delay and with a message about billing does not end by waiting.
            is_spent = delay is None and _is_about_billing(message)
            return ProviderQuotaExceeded(**facts) if is_spent else ProviderRateLimited(**facts)
        case 402:
            return ProviderQuotaExceeded(**facts)
        case 400 | 403 if _NO_CREDIT.search(message):
            return ProviderQuotaExceeded(**facts)
        case 401 | 403 if not _CACHE.search(message):
            return ProviderAuthentication(**facts)
        case 400 if any(detail.get("reason") == _BAD_KEY for detail in _details(error)):
            return ProviderAuthentication(**facts)
        case 413:
            return ContextTooLong(**facts)
        case 503:
            return ProviderOverloaded(**facts)
        case 504:
            return ProviderTimedOut(**facts)
        case int() if code >= 500:  # noqa: PLR2004  reason: HTTP
            return ProviderUnavailable(**facts)
    return _rejected(message, facts)


def _rejected(message: str, facts: dict[str, Any]) -> ProviderFailed:
    if _SIGNATURE.search(message):
        return SignatureRejected(**facts)
    if _PART.search(message):
        return AnswerRejected(**facts)
    if _CACHE.search(message):
        return CacheGone(**facts)
    if _TOO_LONG.search(message):
        return ContextTooLong(**facts)
    return ProviderRejected(f"The provider rejected the request: {message}" if message else "", **facts)


def _is_about_billing(message: str) -> bool:
    return bool(_QUOTA.search(message) or _NO_CREDIT.search(message))


def _find_delay(error: dict[str, Any], headers: Mapping[str, str]) -> float | None:
    """Return the delay that Gemini gives in the details of the error or in a header."""
    for detail in _details(error):
        match = _SECONDS.fullmatch(str(detail.get("retryDelay", ""))[:_MAX_DELAY_LENGTH])
        if match:
            return read_delay(match[1])
    return read_retry_after(headers)


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    details = error.get("details")
    return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []
