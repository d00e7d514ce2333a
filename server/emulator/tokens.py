"""Counting tokens without a tokenizer: an estimate that is always the same for the same text."""

import json
from typing import Any, Final

_CHARACTERS_PER_TOKEN: Final = 4


def count_tokens(text: str) -> int:
    """About a token for four characters, at least one for a text that is not empty."""
    return -(-len(text) // _CHARACTERS_PER_TOKEN)


def count_json(value: Any) -> int:
    """The tokens of a JSON value, whatever the order of its keys."""
    return count_tokens(canonical_json(value))


def canonical_json(value: Any) -> str:
    """One text per JSON value: sorted keys, no blanks, and 1.0 is 1, as it is for the providers."""
    return json.dumps(_plain(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
