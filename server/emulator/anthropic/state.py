"""What one emulated Claude remembers between requests, which is little: the API is stateless but for its cache."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from server.emulator.anthropic.cache import PromptCache
from server.emulator.anthropic.diagnostics import Fingerprint
from server.emulator.state import EmulatorState

_KEPT: Final = 10_000
_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_ID_LETTERS: Final = 22
_CONTAINER_SECONDS: Final = 1800

T = TypeVar("T")


def read_container(body: Mapping[str, Any]) -> str | None:
    """The id of the container that a request names."""
    named = body.get("container")
    found = named.get("id") if isinstance(named, Mapping) else named
    return found if isinstance(found, str) else None


class Recent(OrderedDict[str, T], Generic[T]):
    """The last 10,000 of something."""

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        if len(self) > _KEPT:
            self.popitem(last=False)


class AnthropicState:
    def __init__(self, state: EmulatorState) -> None:
        self.state = state
        self.cache = PromptCache()
        self.issued: Recent[tuple[str, ...]] = Recent()
        """The thinking blocks that came with each tool call, by its id: what a client must send back with it."""
        self.paused: Recent[bool] = Recent()
        """Hashes of conversations that end in a turn the model has paused; only those may end in its words."""
        self.fingerprints: Recent[Fingerprint] = Recent()
        """Of requests that asked for diagnostics, by the id of the answer."""
        self.containers: Recent[str] = Recent()
        """The containers that there are, by id."""
        self._count = 0

    def container_of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The container that a request names, or a new one."""
        id_ = read_container(body) or self.new_id("container")
        expires_at = datetime.fromtimestamp(self.state.clock() + _CONTAINER_SECONDS, UTC)
        self.containers[id_] = expires_at.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"id": id_, "expires_at": self.containers[id_]}

    def new_id(self, kind: str) -> str:
        """`msg_01…`, `toolu_01…`, `req_01…`: unique, and the same in every run with this seed."""
        self._count += 1
        number = int.from_bytes(hashlib.sha256(f"{self.state.seed} {kind} {self._count}".encode()).digest(), "big")
        letters = []
        for _ in range(_ID_LETTERS):
            number, rest = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[rest])
        return f"{kind}_01{''.join(letters)}"
