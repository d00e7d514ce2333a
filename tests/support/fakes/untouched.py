"""A dependency that a test must not reach: a refused request uses nothing."""

from typing import Any


def untouched(name: str) -> Any:
    """Any use of it is an internal error, and so a 500."""
    return _Untouched(name)


class _Untouched:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        message = f"{self._name} was reached for {attribute}"
        raise AssertionError(message)
