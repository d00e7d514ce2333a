"""Validation of the values in a provider's answer, shared by the folds of both vendors.

An accepted answer is stored, shown and sent back. A value that cannot be sent back would make every later request fail,
so an answer with such a value is a failure of the provider. Its bytes are kept.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from server.conversation.errors import ProviderMalformed
from server.conversation.exact_json import Number, dumps_sendable, make_sendable, to_plain
from server.providers.wire.error_response import clean_message

MAX_DEPTH: Final = 64
"""The nesting depth of one part or block. Providers accept about a hundred levels in a whole request."""
MAX_NUMBER_LENGTH: Final = 1000
"""JSON parsers reject or change numbers that are much longer."""
_MAX_ID_LENGTH: Final = 256
"""The longest id of a tool result that the API accepts."""
_MAX_DETAILS: Final = 20
_MAX_DETAIL_BYTES: Final = 2000
_RESPONSE_ID: Final = re.compile(r"[!-~]{1,256}")
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def check_members(value: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise `ProviderMalformed` if a member is present, not null and of another type.

    A number has none of these types: `loads_exact` returns numbers as a subclass of `str`.
    """
    for name, kind in kinds.items():
        found = value.get(name)
        if found is not None and type(found) is not kind:
            raise ProviderMalformed(f"The provider's answer has a `{name}` that is not of the documented type.")


def check_call_id(call_id: Any, known: Collection[str]) -> None:
    """Raise `ProviderMalformed` for an id that a tool result cannot have, or that another call of the answer has."""
    if type(call_id) is not str or not 0 < len(call_id) <= _MAX_ID_LENGTH or _UNPRINTABLE.search(call_id):
        raise ProviderMalformed("The provider's answer has a tool call with an invalid id.")
    if call_id in known:
        raise ProviderMalformed("The provider's answer has two tool calls with the same id.")


def check_call_name(name: Any) -> None:
    """Raise `ProviderMalformed` for a tool call without a valid name."""
    if type(name) is not str or not 0 < len(name) <= _MAX_ID_LENGTH or _UNPRINTABLE.search(name):
        raise ProviderMalformed("The provider's answer has a tool call without a valid name.")


def check_sendable(value: Any) -> None:
    """Raise `ProviderMalformed` for a part or block that cannot be sent back.

    That is one that is nested too deeply, or has a number that is too long or a member whose name is not an identifier.
    """
    if isinstance(value, dict) and not all(name.isascii() and name.isidentifier() for name in value):
        raise ProviderMalformed("The provider's answer has a member with an invalid name.")
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
        if any(isinstance(item, Number) and len(item) > MAX_NUMBER_LENGTH for item in level):
            raise ProviderMalformed(f"The provider's answer has a number of more than {MAX_NUMBER_LENGTH} characters.")
    raise ProviderMalformed(f"The provider's answer is nested more than {MAX_DEPTH} levels deep.")


def clean_details(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of a stop as they may be passed on: with bounded texts, without long lists and objects."""
    cleaned: dict[str, Any] = {}
    for name, value in list(details.items())[:_MAX_DETAILS]:
        plain = to_plain(value)
        if isinstance(plain, str):
            cleaned[clean_message(name)] = clean_message(plain)
        elif len(dumps_sendable(value)) <= _MAX_DETAIL_BYTES:
            cleaned[clean_message(name)] = make_sendable(plain)
    return cleaned


def read_response_id(value: Any) -> str | None:
    """Return the provider's id of its answer; None if it is not valid, because it may be sent back."""
    return value if type(value) is str and _RESPONSE_ID.fullmatch(value) else None
