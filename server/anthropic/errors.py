"""What Claude's errors mean."""

import re
from typing import Any, Final

from server.errors import (
    ContextTooLong,
    OpeningRejected,
    PrefixMismatch,
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
from server.wire.exchange import Recording

_PREFIX: Final = re.compile(r"bound to a different conversation", re.IGNORECASE)
_SIGNATURE: Final = re.compile(r"`signature`|cannot be modified|Expected 'thinking'", re.IGNORECASE)
_OF_OPENINGS: Final = frozenset(
    {
        "compaction_block_ambiguous",
        "compaction_block_misplaced",
        "compaction_content_mismatch",
        "compaction_signature_invalid",
        "compaction_tool_changes_mismatch",
        "compaction_too_many_tool_references",
    }
)
"""What is wrong with a signed summary that was sent back."""
_TOO_LONG: Final = re.compile(r"prompt is too long|context window|too many (input )?tokens", re.IGNORECASE)


def error_from_body(body: Any, recording: Recording | None) -> ProviderFailed:
    """An error object, from an answer or from the middle of a stream."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    kind = str(error.get("type") or "")
    message = str(error.get("message") or "")
    facts: dict[str, Any] = {"provider_status": kind or None, "provider_message": message}
    details = error.get("details")
    if isinstance(details, dict) and details.get("error_code") in _OF_OPENINGS:
        return OpeningRejected(**facts, provider_code=details["error_code"])
    match kind:
        case "rate_limit_error":
            return _rate_limited(recording, facts)
        case "overloaded_error":
            return ProviderOverloaded(**facts)
        case "authentication_error" | "permission_error":
            return ProviderAuthentication(**facts)
        case "billing_error":
            return ProviderQuotaExceeded(**facts)
        case "timeout_error":
            return ProviderTimedOut(**facts)
        case "request_too_large":
            return ContextTooLong(**facts)
        case "invalid_request_error" | "not_found_error" | "conflict_error":
            return _rejected(message, facts)
        case _:
            return _unnamed(recording, message, facts)


def _unnamed(recording: Recording | None, message: str, facts: dict[str, Any]) -> ProviderFailed:
    """An error of a kind that is not documented, or of a gateway in between: its status has to do."""
    match recording.status if recording is not None else None:
        case 401 | 403:
            return ProviderAuthentication(**facts)
        case 413:
            return ContextTooLong(**facts)
        case 429:
            limited = _rate_limited(recording, facts)
            # Only Claude itself means the month by saying no delay.
            return limited if isinstance(limited, ProviderRateLimited) else ProviderRateLimited(**facts)
        case 504:
            return ProviderTimedOut(**facts)
        case int(status) if 400 <= status < 500:  # noqa: PLR2004  reason: HTTP
            return _rejected(message, facts)
        case _:
            return ProviderUnavailable(**facts)


def _rejected(message: str, facts: dict[str, Any]) -> ProviderFailed:
    if _PREFIX.search(message):
        return PrefixMismatch(**facts)
    if _SIGNATURE.search(message):
        return SignatureRejected(**facts)
    if _TOO_LONG.search(message):
        return ContextTooLong(**facts)
    return ProviderRejected(f"The provider refused the request: {message}" if message else "", **facts)


def _rate_limited(recording: Recording | None, facts: dict[str, Any]) -> ProviderFailed:
    """Without a delay it is the account's monthly limit, and waiting is pointless."""
    headers = {} if recording is None else recording.headers
    try:
        if "retry-after-ms" in headers:
            return ProviderRateLimited(**facts, retry_after_seconds=float(headers["retry-after-ms"]) / 1000)
        return ProviderRateLimited(**facts, retry_after_seconds=float(headers["retry-after"]))
    except KeyError:
        return ProviderQuotaExceeded(**facts)
    except ValueError:
        return ProviderRateLimited(**facts)
