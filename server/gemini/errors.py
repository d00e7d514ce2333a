"""What Gemini's errors mean."""

import re
from typing import Any, Final

from server.errors import (
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

_SIGNATURE: Final = re.compile(r"thought[ _]signature", re.IGNORECASE)
_CACHE: Final = re.compile(
    r"cached[ _]?contents?\b.*(not found|expired|denied|does not exist|not exist)"
    r"|(not found|expired|denied).*\bcached[ _]?contents?\b",
    re.IGNORECASE | re.DOTALL,
)
"""Google documents no text for it, and has had several."""
_TOO_LONG: Final = re.compile(r"exceeds the maximum number of tokens|token count .*exceeds", re.IGNORECASE)
_QUOTA: Final = re.compile(r"billing|spend|credit|per ?day|daily", re.IGNORECASE)
_SECONDS: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)s")
_BAD_KEY: Final = "API_KEY_INVALID"


def error_from_body(body: Any, status: int | None) -> ProviderFailed:
    """An error object, from an answer or from the middle of a stream."""
    found = body[0] if isinstance(body, list) and body else body
    error = found.get("error", found) if isinstance(found, dict) else {}
    error = error if isinstance(error, dict) else {}
    code = error.get("code") if isinstance(error.get("code"), int) else status
    message = str(error.get("message") or "")
    facts: dict[str, Any] = {"provider_status": error.get("status") or code, "provider_message": message}
    match code:
        case 429:
            return _rate_limited(error, message, facts)
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
    if _CACHE.search(message):
        return CacheGone(**facts)
    if _TOO_LONG.search(message):
        return ContextTooLong(**facts)
    return ProviderRejected(f"The provider refused the request: {message}" if message else "", **facts)


def _rate_limited(error: dict[str, Any], message: str, facts: dict[str, Any]) -> ProviderFailed:
    """With a delay it is worth waiting; without one, and with words about money, it is not."""
    delay = next(
        (
            float(match[1])
            for detail in _details(error)
            if (match := _SECONDS.fullmatch(str(detail.get("retryDelay", ""))))
        ),
        None,
    )
    if delay is None and _QUOTA.search(message):
        return ProviderQuotaExceeded(**facts)
    return ProviderRateLimited(**facts) if delay is None else ProviderRateLimited(**facts, retry_after_seconds=delay)


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    details = error.get("details")
    return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []
