"""Token counts without a tokenizer: a deterministic estimate."""

import json
from typing import Any, Final

_CHARACTERS_PER_TOKEN: Final = 4


def count_tokens(text: str) -> int:
    """One token per four characters, at least one for a text that is not empty."""
    return -(-len(text) // _CHARACTERS_PER_TOKEN)


def count_json(value: Any) -> int:
    """The tokens of a JSON value, independent of the order of its keys."""
    return count_tokens(canonical_json(value))


def canonical_json(value: Any) -> str:
    """The canonical text of a JSON value: sorted keys, no spaces, and 1.0 written as 1, as the providers do."""
    return json.dumps(_plain(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
