"""When to compact: the member `compaction` of an assistant's settings.

| member              | value                          | default | meaning                                             |
|---------------------|--------------------------------|---------|-----------------------------------------------------|
| `policy`            | `cost`, `threshold` or `off`   | `cost`  | how the time of a compaction is chosen              |
| `keep_exchanges`    | an integer of at least 1       | 4       | how many of the newest exchanges stay               |
| `fixed_cost_tokens` | an integer of at least 0       | 500     | `cost`: the fixed cost of a compaction              |
| `max_turns`         | an integer of at least 1       | none    | `threshold`: the maximum turns in the buffer        |
| `max_tokens`        | an integer of at least 1       | 8000    | `threshold`: the maximum tokens in the buffer       |
| `target_tokens`     | an integer of at least 0       | 0       | `threshold`: the tokens that stay in the buffer     |
| `window_share`      | a number above 0 and at most 1 | 0.8     | the share of the window above which room is made    |
| `signed`            | true or false                  | false   | signed summaries instead of segments, if the model  |
|                     |                                |         | supports them                                       |

If only `max_turns` is set, `max_tokens` has no default. With a `target_tokens` of 0, all exchanges are moved except
those that stay.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.errors import ValidationFailed

_MAX_TOKENS: Final = 8_000


class PolicyKind(StrEnum):
    """How the time of a compaction is chosen."""

    COST = "cost"
    THRESHOLD = "threshold"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """See the module for the members."""

    kind: PolicyKind = PolicyKind.COST
    keep_exchanges: int = 4
    fixed_cost_tokens: int = 500
    max_turns: int | None = None
    max_tokens: int | None = _MAX_TOKENS
    target_tokens: int = 0
    window_share: float = 0.8
    signed: bool = False


def read_policy(settings: Mapping[str, JsonValue]) -> CompactionPolicy:
    """Read the policy of an assistant. Raises `ValidationFailed` for a member that is unknown or has a wrong type."""
    errors = [
        {"path": f"settings.compaction.{name}", "source": "body", "message": message}
        for name, message in _find_faults(settings)
    ]
    if errors:
        raise ValidationFailed(f"{errors[0]['path']}: {errors[0]['message']}", errors=errors)
    members = {name: value for name, value in settings.items() if value is not None}
    kind = PolicyKind(members.pop("policy", PolicyKind.COST))
    if "max_turns" in members:
        members.setdefault("max_tokens", None)
    return CompactionPolicy(kind=kind, **members)


def _find_faults(settings: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if name not in _MEMBERS:
            yield name, f"There is no such member. The members are {', '.join(_MEMBERS)}."
        elif value is not None:
            is_valid, expected = _MEMBERS[name]
            if not is_valid(value):
                yield name, f"The value must be {expected}."
    target: JsonValue = settings.get("target_tokens")
    limit: JsonValue = settings.get("max_tokens") or _MAX_TOKENS
    if _is_whole(target) and _is_whole(limit) and target > limit:
        yield "target_tokens", "The value must not exceed max_tokens."


def _is_whole(value: JsonValue) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(minimum: int) -> tuple[Callable[[JsonValue], bool], str]:
    return lambda value: _is_whole(value) and value >= minimum, f"an integer of at least {minimum}"


def _is_share(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


_MEMBERS: Final[Mapping[str, tuple[Callable[[JsonValue], bool], str]]] = {
    "policy": (lambda value: value in list(PolicyKind), " or ".join(PolicyKind)),
    "keep_exchanges": _at_least(1),
    "fixed_cost_tokens": _at_least(0),
    "max_turns": _at_least(1),
    "max_tokens": _at_least(1),
    "target_tokens": _at_least(0),
    "window_share": (_is_share, "a number above 0 and up to 1"),
    "signed": (lambda value: isinstance(value, bool), "true or false"),
}
