"""The state of one emulated API between requests; the API itself is stateless except for its cache."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from server.emulator.anthropic.cache import Fingerprint, PromptCache
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
    """A mapping that keeps the last 10,000 entries."""

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        if len(self) > _KEPT:
            self.popitem(last=False)


class AnthropicState:
    def __init__(self, state: EmulatorState) -> None:
        self.state = state
        self.cache = PromptCache()
        self.issued: Recent[tuple[str, ...]] = Recent()
        """The thinking blocks that were returned with each tool call, by call id: a client must send them back with
        it."""
        self.paused: Recent[bool] = Recent()
        """Hashes of conversations that end with a paused turn; only those may end with an assistant message."""
        self.fingerprints: Recent[Fingerprint] = Recent()
        """Fingerprints of requests with diagnostics, by response id."""
        self.containers: Recent[str] = Recent()
        """The existing containers, by id."""
        self._count = 0

    def container_of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The container that a request names, or a new container."""
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
