"""Translation of Claude's error responses."""

import re
from typing import Any, Final

from server.conversation.errors import (
    AnswerRejected,
    ContextTooLong,
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
    SummaryRejected,
)
from server.providers.wire.error_response import clean_message, read_error_body, read_retry_after
from server.providers.wire.exchange import Recording

_PREFIX: Final = re.compile(r"bound to a different conversation", re.IGNORECASE)
_SIGNATURE: Final = re.compile(
    r"`signature`|Invalid `data` in `redacted_thinking`|cannot be modified|Expected ['\"`]thinking"
    r"|thinking\b.*\bsignature\b|\bsignature\b.*\bthinking",
    re.IGNORECASE,
)
"""Every message about signatures and thinking blocks; the quotes differ between releases and platforms."""
_SUMMARY_CODES: Final = frozenset(
    {
        "compaction_block_ambiguous",
        "compaction_block_misplaced",
        "compaction_content_mismatch",
        "compaction_signature_invalid",
        "compaction_tool_changes_mismatch",
        "compaction_too_many_tool_references",
    }
)
"""Codes of errors about a signed summary in the request."""
_PART: Final = re.compile(r"messages\.\d+\.content\.\d+[^:]*: (Input tag|Extra inputs)")
"""A block with an unknown type or member. Only answers of Claude can contain one."""
_TOO_LONG: Final = re.compile(r"prompt is too long|context window|too many (input )?tokens", re.IGNORECASE)


_NO_CREDIT: Final = re.compile(
    r"credit balance is too low|reached your (specified )?(API )?usage limits?|spend(ing)? limit"
    r"|insufficient (credits?|funds)",
    re.IGNORECASE,
)
"""An error about billing and not about the request, with the type `invalid_request_error`."""


def error_from_recording(recording: Recording) -> ProviderFailed:
    """Translate a recorded error response."""
    return error_from_body(read_error_body(recording.body), recording)


def error_from_body(body: Any, recording: Recording | None) -> ProviderFailed:
    """Translate an error object, of a response or from within a stream."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    kind = clean_message(error.get("type"))
    message = clean_message(error.get("message"))
    facts: dict[str, Any] = {"provider_status": kind or (None if recording is None else recording.status)}
    facts |= {"provider_message": message} if message else {}
    delay = None if recording is None else read_retry_after(recording.headers)
    facts |= {} if delay is None else {"retry_after_seconds": delay}
    details = error.get("details")
    code = details.get("error_code") if isinstance(details, dict) else None
    if isinstance(code, str) and code in _SUMMARY_CODES:
        return SummaryRejected(**facts, provider_code=code)
    match kind:
        case "rate_limit_error":
            # Without a delay it is the account's monthly limit, which does not end by waiting.
            has_delay = recording is not None and bool({"retry-after", "retry-after-ms"} & recording.headers.keys())
            return ProviderRateLimited(**facts) if has_delay else ProviderQuotaExceeded(**facts)
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
    """Translate an error without a documented type, such as that of a gateway, by its status."""
    match recording.status if recording is not None else None:
        case 402:
            return ProviderQuotaExceeded(**facts)
        case 401 | 403:
            return ProviderAuthentication(**facts)
        case 413:
            return ContextTooLong(**facts)
        case 429:
            # A gateway may omit the delay for any limit; only Claude omits it for the monthly one.
            return ProviderRateLimited(**facts)
        case 504:
            return ProviderTimedOut(**facts)
        case int(status) if 400 <= status < 500:  # noqa: PLR2004  reason: HTTP
            return _rejected(message, facts)
        case _:
            return ProviderUnavailable(**facts)


def _rejected(message: str, facts: dict[str, Any]) -> ProviderFailed:
    if _NO_CREDIT.search(message):
        return ProviderQuotaExceeded(**facts)
    if _PREFIX.search(message):
        return PrefixMismatch(**facts)
    if _SIGNATURE.search(message):
        return SignatureRejected(**facts)
    if _PART.search(message):
        return AnswerRejected(**facts)
    if _TOO_LONG.search(message):
        return ContextTooLong(**facts)
    return ProviderRejected(f"The provider rejected the request: {message}" if message else "", **facts)
