"""The last step of every log line: what looks like a secret does not get through.

The first defence is not to log secrets at all. This is the second one, for what a library writes, for a URL in an
error text, for a header that somebody adds to `extra` one day.
"""

import re
from collections.abc import Mapping, MutableMapping
from functools import lru_cache
from typing import Any, Final

REDACTED: Final = "[redacted]"

_SECRET_NAME: Final = re.compile(
    r"(^|[_.-])(authorization|cookies?|passwords?|passwd|secrets?|credentials?|api_?keys?|token|dsn|database_url)$",
)
"""Fields whose values are dropped whole. Counts such as `input_tokens` and ids such as `api_key_id` do not match."""

_SECRET_TEXT: Final = re.compile(
    r"(?P<key>strata_[0-9a-z]{26}_)[0-9A-Za-z]+"
    r"|(?P<url>://[^\s:/@]*:)[^\s@]+(?=@)"
    r"|(?P<scheme>\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"
    r"|(?P<pair>\b(?:password|passwd|api_?key|x-goog-api-key|key|token|secret)=)[^\s&;,'\"]+"
    r"|(?P<vendor>\b(?:sk-ant-|sk-|AIza))[\w-]{16,}",
    re.IGNORECASE,
)
"""Strata's own keys keep their id, which tells the operator which key it was; others keep what introduces them."""

_SUSPICIOUS: Final = ("strata_", "://", "bearer", "basic", "=", "sk-", "aiza")
"""One of these is in every text that `_SECRET_TEXT` matches. Looking for them first is ten times as fast, and nearly
all texts are ids, routes and event names."""

_DEPTH_LIMIT: Final = 6


def redact_text(text: str) -> str:
    """The text without anything that looks like a secret."""
    lowered = text.lower()
    if not any(sign in lowered for sign in _SUSPICIOUS):
        return text
    return _SECRET_TEXT.sub(lambda match: f"{match[match.lastgroup or 0]}{REDACTED}", text)


def redact_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """A structlog processor: the event with every secret replaced, at any depth."""
    return {name: _redact_field(name, value, _DEPTH_LIMIT) for name, value in event.items()}


def _redact_field(name: object, value: object, depth: int) -> object:
    if value is not None and _names_secret(str(name)):
        return REDACTED
    return _redact(value, depth)


@lru_cache(maxsize=1024)
def _names_secret(name: str) -> bool:
    return _SECRET_NAME.search(name.lower().replace("-", "_")) is not None


def _redact(value: object, depth: int) -> object:
    match value:
        case str():
            return redact_text(value)
        case bool() | int() | float() | None:
            return value
        case bytes() | bytearray() | memoryview():
            return f"[{len(value)} bytes]"
        case Mapping() if depth:
            return {str(name): _redact_field(name, item, depth - 1) for name, item in value.items()}
        case list() | tuple() | set() | frozenset() if depth:
            return [_redact(item, depth - 1) for item in value]
        case Mapping() | list() | tuple() | set() | frozenset():
            return "[too deep]"
        case _:
            return redact_text(str(value))
