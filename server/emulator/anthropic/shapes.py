"""Checks of JSON shapes, with the wording of the API's validation."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from server.emulator.anthropic.caller import Caller
from server.emulator.anthropic.errors import extra_input, invalid

Check: TypeAlias = Callable[[Any, str, Caller], None]
"""Checks one value at a path. Raises `Refused`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An object with exactly these fields."""

    fields: Mapping[str, Check]
    required: tuple[str, ...] = ()
    betas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Fields that exist only for a request with one of these betas."""

    def __call__(self, value: Any, path: str, caller: Caller) -> None:
        if not isinstance(value, dict):
            raise invalid(f"{path}: Input should be a valid dictionary")
        for name in self.required:
            if name not in value:
                raise invalid(f"{_join(path, name)}: Field required")
        for name, item in value.items():
            if name not in self.fields or not self._is_open(name, caller):
                raise extra_input(_join(path, name))
            self.fields[name](item, _join(path, name), caller)

    def _is_open(self, name: str, caller: Caller) -> bool:
        needed = self.betas.get(name)
        return needed is None or caller.has_beta(*needed)


def anything(_value: Any, _path: str, _caller: Caller) -> None:
    """Accept any value."""


def string(value: Any, path: str, _caller: Caller) -> None:
    if not isinstance(value, str):
        raise invalid(f"{path}: Input should be a valid string")


def boolean(value: Any, path: str, _caller: Caller) -> None:
    if not isinstance(value, bool):
        raise invalid(f"{path}: Input should be a valid boolean")


def mapping(value: Any, path: str, _caller: Caller) -> None:
    if not isinstance(value, dict):
        raise invalid(f"{path}: Input should be a valid dictionary")


def number(value: Any, path: str, _caller: Caller) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{path}: Input should be a valid number")


def integer(minimum: int) -> Check:
    """An integer of at least `minimum`."""

    def check(value: Any, path: str, _caller: Caller) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(f"{path}: Input should be a valid integer")
        if value < minimum:
            raise invalid(f"{path}: Input should be greater than or equal to {minimum}")

    return check


def one_of(*allowed: str) -> Check:
    listed = ", ".join(f"'{name}'" for name in allowed[:-1])
    expected = f"{listed} or '{allowed[-1]}'" if listed else f"'{allowed[-1]}'"

    def check(value: Any, path: str, _caller: Caller) -> None:
        if value not in allowed:
            raise invalid(f"{path}: Input should be {expected}")

    return check


def matching(pattern: str) -> Check:
    compiled = re.compile(pattern)

    def check(value: Any, path: str, caller: Caller) -> None:
        string(value, path, caller)
        if not compiled.fullmatch(value):
            raise invalid(f"{path}: String should match pattern '{pattern}'")

    return check


def nullable(inner: Check) -> Check:
    def check(value: Any, path: str, caller: Caller) -> None:
        if value is not None:
            inner(value, path, caller)

    return check


def list_of(inner: Check) -> Check:
    def check(value: Any, path: str, caller: Caller) -> None:
        if not isinstance(value, list):
            raise invalid(f"{path}: Input should be a valid list")
        for index, item in enumerate(value):
            inner(item, f"{path}.{index}", caller)

    return check


def text_or(inner: Check) -> Check:
    """A string, or a list that the other check accepts."""

    def check(value: Any, path: str, caller: Caller) -> None:
        if not isinstance(value, str):
            inner(value, path, caller)

    return check


def tagged(kinds: Mapping[str, Shape], *, betas: Mapping[str, tuple[str, ...]] | None = None) -> Check:
    """One of several shapes, selected by `type`, which becomes part of the path."""
    needed = betas or {}

    def check(value: Any, path: str, caller: Caller) -> None:
        if not isinstance(value, dict):
            raise invalid(f"{path}: Input should be a valid dictionary")
        if "type" not in value:
            raise invalid(f"{path}.type: Field required")
        known = [name for name in kinds if name not in needed or caller.has_beta(*needed[name])]
        if value["type"] not in known:
            expected = ", ".join(f"'{name}'" for name in sorted(known))
            raise invalid(
                f"{path}: Input tag '{value['type']}' found using 'type' does not match any of the expected tags: "
                f"{expected}"
            )
        kinds[value["type"]](value, f"{path}.{value['type']}", caller)

    return check


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
