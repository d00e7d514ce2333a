"""When to compact, as an assistant's settings say it: the member `compaction`, read strictly.

| member              | takes                        | default | means                                               |
|---------------------|------------------------------|---------|-----------------------------------------------------|
| `policy`            | `cost`, `threshold` or `off` | `cost`  | what decides                                        |
| `keep_exchanges`    | a whole number from 1 on     | 4       | so many of the newest exchanges stay in the buffer  |
| `fixed_cost_tokens` | a whole number from 0 on     | 500     | `cost`: what a compaction costs beside the tokens   |
| `max_turns`         | a whole number from 1 on     | none    | `threshold`: more turns than this are too many      |
| `max_tokens`        | a whole number from 1 on     | 8000    | `threshold`: more tokens than this are too many     |
| `target_tokens`     | a whole number from 0 on     | 0       | `threshold`: the tokens it goes down to          |
| `window_share`      | a number above 0, at most 1  | 0.8     | the share of the window beyond which room is short  |
| `signed`            | true or false                | false   | a block that the provider signs, where the model    |
|                     |                              |         | gives one, in place of a segment                    |

Naming `max_turns` alone puts the default of `max_tokens` out of force. With a `target_tokens` of 0 everything moves but
the exchanges that stay.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.errors import ValidationFailed

_MAX_TOKENS: Final = 8_000


class PolicyKind(StrEnum):
    """What decides when to compact."""

    COST = "cost"
    THRESHOLD = "threshold"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """See the module for what each member means."""

    kind: PolicyKind = PolicyKind.COST
    keep_exchanges: int = 4
    fixed_cost_tokens: int = 500
    max_turns: int | None = None
    max_tokens: int | None = _MAX_TOKENS
    target_tokens: int = 0
    window_share: float = 0.8
    signed: bool = False


def read_policy(settings: Mapping[str, JsonValue]) -> CompactionPolicy:
    """The policy of an assistant. Raises `ValidationFailed` for a member that is unknown or of another type."""
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
            yield name, f"There is no such member; there are {', '.join(_MEMBERS)}."
        elif value is not None:
            is_good, wanted = _MEMBERS[name]
            if not is_good(value):
                yield name, f"This takes {wanted}."
    target: JsonValue = settings.get("target_tokens")
    limit: JsonValue = settings.get("max_tokens") or _MAX_TOKENS
    if _is_whole(target) and _is_whole(limit) and target > limit:
        yield "target_tokens", "This takes no more than max_tokens."


def _is_whole(value: JsonValue) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _from(least: int) -> tuple[Callable[[JsonValue], bool], str]:
    return lambda value: _is_whole(value) and value >= least, f"a whole number from {least} on"


def _is_share(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


_MEMBERS: Final[Mapping[str, tuple[Callable[[JsonValue], bool], str]]] = {
    "policy": (lambda value: value in list(PolicyKind), " or ".join(PolicyKind)),
    "keep_exchanges": _from(1),
    "fixed_cost_tokens": _from(0),
    "max_turns": _from(1),
    "max_tokens": _from(1),
    "target_tokens": _from(0),
    "window_share": (_is_share, "a number above 0 and up to 1"),
    "signed": (lambda value: isinstance(value, bool), "true or false"),
}
