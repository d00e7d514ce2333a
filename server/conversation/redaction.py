"""Redaction: texts without anything that looks like a secret.

It is applied to every log line and to every message of a provider that is passed on. It is the second defence, after
not writing secrets in the first place: for what a library logs, or a URL in the text of an error.
"""

import re
from typing import Final

REDACTED: Final = "[redacted]"

_SECRET_TEXT: Final = re.compile(
    r"(?P<key>strata_[0-9a-z]{26}_)[0-9A-Za-z]+"
    r"|(?P<url>://[^\s:/@]*:)[^\s@]+(?=@)"
    r"|(?P<scheme>\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"
    r"|(?P<pair>\b(?:password|passwd|api_?key|x-goog-api-key|key|token|secret)=)[^\s&;,'\"]+"
    r"|(?P<vendor>\b(?:sk-ant-|sk-|AIza))[\w-]{16,}",
    re.IGNORECASE,
)
"""Keys of Strata keep their id, so that an operator can identify the key; other matches keep their prefix."""

_SUSPICIOUS: Final = ("strata_", "://", "bearer", "basic", "=", "sk-", "aiza")
"""Every text that `_SECRET_TEXT` matches contains one of these. Searching for them first is ten times as fast, and
nearly all texts are ids, routes and event names."""


def redact_text(text: str) -> str:
    """Return the text with everything that looks like a secret replaced."""
    lowered = text.lower()
    if not any(sign in lowered for sign in _SUSPICIOUS):
        return text
    return _SECRET_TEXT.sub(lambda match: f"{match[match.lastgroup or 0]}{REDACTED}", text)
