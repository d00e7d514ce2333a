"""What the values of a provider's answer have to be before they are taken: shared by the folds of both vendors.

What is taken is stored, shown and sent back. A value that could not be sent back would make every later request fail:
an answer with one is a failure of the provider, and its bytes are kept.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from server.conversation.errors import ProviderMalformed
from server.conversation.exact_json import Number, dumps_sendable, make_sendable, to_plain
from server.providers.wire.provider_errors import clean_message

MAX_DEPTH: Final = 64
"""Of one part or block. Providers read at most about a hundred levels of a whole request."""
MAX_NUMBER_LENGTH: Final = 1000
"""Parsers of JSON refuse or change numbers that are much longer."""
_MAX_ID_LENGTH: Final = 256
"""As long as the API takes the id of a tool result."""
_MAX_DETAILS: Final = 20
_MAX_DETAIL_BYTES: Final = 2000
_RESPONSE_ID: Final = re.compile(r"[!-~]{1,256}")
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def check_members(value: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise `ProviderMalformed` for a member that is there, is not null and is of another type.

    A number is none of these types: `loads_exact` gives it as a kind of text.
    """
    for name, kind in kinds.items():
        found = value.get(name)
        if found is not None and type(found) is not kind:
            raise ProviderMalformed(f"The provider's answer has a `{name}` of another type than documented.")


def check_call_id(call_id: Any, known: Collection[str]) -> None:
    """Raise `ProviderMalformed` for an id that cannot be answered, or that another call of the answer has."""
    if type(call_id) is not str or not 0 < len(call_id) <= _MAX_ID_LENGTH or _UNPRINTABLE.search(call_id):
        raise ProviderMalformed("The provider's answer has a tool call whose id cannot be one.")
    if call_id in known:
        raise ProviderMalformed("The provider's answer has two tool calls with the same id.")


def check_call_name(name: Any) -> None:
    """Raise `ProviderMalformed` for a tool call without a name, or with one that no tool can have."""
    if type(name) is not str or not 0 < len(name) <= _MAX_ID_LENGTH or _UNPRINTABLE.search(name):
        raise ProviderMalformed("The provider's answer has a tool call without a name that can be one.")


def check_sendable(value: Any) -> None:
    """Raise `ProviderMalformed` for a part or block that could not be sent back.

    It is nested too deeply, holds too long a number, or has a member whose name cannot be one of the API's.
    """
    if isinstance(value, dict) and not all(name.isascii() and name.isidentifier() for name in value):
        raise ProviderMalformed("The provider's answer has a member whose name cannot be one.")
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
    """What a provider says about a stop as it may be passed on: texts are bounded, long lists and objects left out."""
    cleaned: dict[str, Any] = {}
    for name, value in list(details.items())[:_MAX_DETAILS]:
        plain = to_plain(value)
        if isinstance(plain, str):
            cleaned[clean_message(name)] = clean_message(plain)
        elif len(dumps_sendable(value)) <= _MAX_DETAIL_BYTES:
            cleaned[clean_message(name)] = make_sendable(plain)
    return cleaned


def read_response_id(value: Any) -> str | None:
    """The provider's id of its answer; None for what cannot be one, since it may be sent back."""
    return value if type(value) is str and _RESPONSE_ID.fullmatch(value) else None
