"""The provider port: a vendor that answers payloads.

`open_stream` returns a stream that has not begun. What it gives in each state:

| state       | meaning                              | `events()`      | `answer`           | `record`         |
|-------------|--------------------------------------|-----------------|--------------------|------------------|
| `new`       | nothing was sent                     | begins the call | empty              | no bytes         |
| `waiting`   | the request was sent                 | waits           | empty              | no bytes         |
| `streaming` | the answer is arriving               | yields events   | what has arrived   | the bytes so far |
| `complete`  | the model finished                   | has ended       | the whole answer   | all bytes        |
| `failed`    | see the error that `events()` raised | has raised      | what had arrived   | what had arrived |
| `cancelled` | `cancel` was called                  | has ended       | what had arrived   | what had arrived |

Every implementation guarantees, checked by `tests/contracts/provider_contract.py`:

- A stream is one request to the provider. Nothing is retried, continued or repeated inside it, except a request whose
  pooled connection the provider had closed before it arrived: it is sent again, once, on a fresh connection.
- A stream ends. A provider that sends nothing, or never stops sending, fails with `ProviderTimedOut`.
- `answer` and the events are folds of the recorded bytes: feeding `record.body` through `fold_body` gives the same
  answer, whatever pieces it came in.
- A partial answer has no signature that did not arrive, and its `native` contains only what the provider would accept;
  thinking whose signature is missing is in the blocks, for readers, and not in `native`.
- `cancel` closes the connection before it returns, may be called in any state and more than once, and never raises.
- Every failure is a `ProviderFailed`. After an error within the stream, `answer` has what had arrived.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.block import Blob, Block, JsonValue
from server.conversation.event import ProviderEvent
from server.conversation.payload import Payload
from server.conversation.turn import Native, StopReason
from server.conversation.usage import Usage


class StreamState(StrEnum):
    """The state of a stream."""

    NEW = "new"
    WAITING = "waiting"
    STREAMING = "streaming"
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({StreamState.COMPLETE, StreamState.FAILED, StreamState.CANCELLED})
"""The final states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAnswer:
    """The answer of the model, as far as it has arrived."""

    blocks: tuple[Block, ...] = ()
    native: Native | None = None
    """None if there is nothing that could be sent back."""
    stop_reason: StopReason | None = None
    """None until the model has finished."""
    usage: Usage = field(default_factory=Usage)
    usage_reported: Mapping[str, JsonValue] | None = None
    long_write_tokens: int = 0
    """How many of the written cache tokens have the long lifetime."""
    response_id: str | None = None
    model_version: str | None = None
    """The model that the answer names: for an alias, the model that it refers to."""
    stop_details: Mapping[str, JsonValue] | None = None
    """Further details of the provider about the stop."""
    cache_miss_reason: str | None = None
    warnings: tuple[Mapping[str, JsonValue], ...] = ()
    """Values that were not accepted as they came, such as an impossible count; each has a `kind`."""
    container: Mapping[str, JsonValue] | None = None
    """The container in which the provider ran code, with `id` and `expires_at`; later requests name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """The request and response of a call, as recorded."""

    started_at: datetime
    request_body: bytes
    status: int | None
    headers: Mapping[str, str]
    first_byte_at: datetime | None
    ended_at: datetime | None
    body: bytes


class ProviderStream(Protocol):
    """One call. See the module for its states."""

    @property
    def state(self) -> StreamState:
        """The state."""
        ...

    @property
    def answer(self) -> ProviderAnswer:
        """The answer so far."""
        ...

    @property
    def record(self) -> CallRecord:
        """The bytes and times so far."""
        ...

    @property
    def warnings(self) -> Sequence[Mapping[str, JsonValue]]:
        """Assumptions that were made for the call, to be stored with it; each has a `kind`."""
        ...

    def call_when_sent(self, callback: Callable[[], None]) -> None:
        """Set the callback for when the request is sent; `record` has its body and time then. Replaces an earlier
        one.
        """
        ...

    def events(self) -> AsyncGenerator[ProviderEvent, None]:
        """Make the call and yield its events as they arrive. May be used once. Raises `ProviderFailed`."""
        ...

    def event_batches(self) -> AsyncGenerator[Sequence[ProviderEvent], None]:
        """Like `events`, and used instead of it: yield the events of each read from the connection together."""
        ...

    async def cancel(self) -> None:
        """End the call now."""
        ...


class Fold(Protocol):
    """Turns the bytes of a response into events and an answer. Pure: the division into pieces does not matter."""

    @property
    def answer(self) -> ProviderAnswer:
        """The answer so far. Built on each read."""
        ...

    def feed(self, piece: bytes) -> Iterable[ProviderEvent]:
        """Return the events that a piece completes. Raises `ProviderFailed` for an error within the stream."""
        ...

    def finish(self) -> None:
        """End the body. Raises `ProviderFailed` if the model has not finished."""
        ...

    def continue_answer(self) -> None:
        """Begin the body of another call, which continues the answer.

        The answer then has the content of both calls, and the sum of their usage.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitCache:
    """An explicit cache, as the provider describes it."""

    name: str
    expires_at: datetime
    token_count: int


class ExplicitCaches(Protocol):
    """Named caches of a provider. Every method raises `ProviderFailed`, and `CacheGone` for a missing cache."""

    def may_stand_for(self, payload: Payload) -> bool:
        """Whether the provider accepts this request with a cache in place of its static text and tools."""
        ...

    async def create(self, payload: Payload, *, lifetime_seconds: int, label: str) -> ExplicitCache:
        """Create a cache of the payload's static text and tools."""
        ...

    async def find(self, label: str) -> Sequence[str]:
        """Return the names of the caches with this label."""
        ...

    async def prolong(self, name: str, *, lifetime_seconds: int) -> ExplicitCache:
        """Set the lifetime of a cache, from now."""
        ...

    async def delete(self, name: str) -> None:
        """Delete a cache at the provider."""
        ...


class Provider(Protocol):
    """A vendor. One per process and account.

    The methods that build messages are pure and must give the same bytes for the same values in every release: later
    requests repeat earlier messages, and caches and signatures depend on their bytes.
    """

    @property
    def name(self) -> str:
        """`gemini` or `anthropic`; also the dialect of its native messages."""
        ...

    @property
    def account(self) -> str:
        """Fingerprint of the credentials."""
        ...

    @property
    def continues_pauses(self) -> bool:
        """Whether a paused answer is continued if it is sent back as the last message of the same request."""
        ...

    @property
    def caches(self) -> ExplicitCaches | None:
        """The explicit caches; None if the vendor has none."""
        ...

    def open_stream(self, payload: Payload) -> ProviderStream:
        """Return a call that has not begun."""
        ...

    def fold_body(self, body: bytes) -> ProviderAnswer:
        """Fold stored bytes into the answer, up to the first error. Never raises."""
        ...

    async def encode_request(self, payload: Payload) -> bytes:
        """Return the body that `open_stream` would send for the payload, byte for byte. Nothing is sent."""
        ...

    def open_fold(self) -> Fold:
        """Return a fold for a body that is read elsewhere."""
        ...

    def user_message(self, blocks: Sequence[Block], blobs: Mapping[str, Blob], dynamic: str | None = None) -> bytes:
        """Build a user task in the vendor's format. `blobs` by the hex of their hash. `dynamic` goes before the
        task.
        """
        ...

    def tool_message(self, blocks: Sequence[Block], calls: Sequence[Block], dynamic: str | None = None) -> bytes:
        """Build tool results in the vendor's format, in the order of their calls. `dynamic` goes after them."""
        ...

    def dynamic_message(self, dynamic: str) -> bytes:
        """Build the dynamic layer as a message of its own, as in the layered order."""
        ...

    def foreign_message(self, blocks: Sequence[Block]) -> bytes | None:
        """Build another vendor's answer as this one accepts it: text and calls, without thinking and signatures.

        Returns None if nothing is left.
        """
        ...

    def unsigned_message(self, native: bytes, *, documented_only: bool = False) -> bytes | None:
        """Build an answer of this vendor without its signatures, which are no longer valid, and its thinking.

        Everything else is kept, including unknown fields; with `documented_only`, undocumented parts and fields are
        dropped too. Returns None if nothing is left.
        """
        ...

    def settle_message(self, native: bytes, following: bytes = b"") -> bytes | None:
        """Build an answer of this vendor without calls of the vendor's own tools that got no result.

        `following`: the next answer, which may begin with the results. Returns None if nothing is left.
        """
        ...

    def signed_summary_text(self, message: bytes) -> str | None:
        """Return the text of the signed summary in the answer to a payload with `requests_summary`.

        Returns None if the answer is anything else.
        """
        ...

    async def count_tokens(self, payload: Payload) -> int:
        """Return the provider's own count of a request's input. Raises `ProviderFailed`."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
