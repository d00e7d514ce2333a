"""The provider port: a vendor that answers payloads.

`open_stream` gives a stream that has not begun. What can be had from it in each state:

| state       | meaning                              | `events()`      | `answer`           | `record`         |
|-------------|--------------------------------------|-----------------|--------------------|------------------|
| `new`       | nothing was sent                     | begins the call | empty              | no bytes         |
| `waiting`   | the request has left                 | waits           | empty              | no bytes         |
| `streaming` | the answer is coming                 | gives events    | what has arrived   | the bytes so far |
| `complete`  | the model finished                   | has ended       | the whole answer   | all bytes        |
| `failed`    | see the error that `events()` raised | has raised      | what had arrived   | what had arrived |
| `cancelled` | somebody called `cancel`             | has ended       | what had arrived   | what had arrived |

Promises of every implementation, checked by `tests/contracts/provider_contract.py`:

- A stream is one request to the provider. Nothing is retried, continued or repeated inside it, except a request whose
  pooled connection the provider had closed before it arrived: it is sent again, once, on a fresh connection.
- A stream ends. A provider that sends nothing, or never stops sending, fails with `ProviderTimedOut`.
- `answer` and the events are folds of the recorded bytes: feeding `record.body` through `fold_body` gives the same
  answer, whatever pieces it came in.
- A partial answer never has a signature that did not arrive, and its `native` holds only what the provider would take
  back; thinking whose signature is missing is in the blocks, for people, and not in `native`.
- `cancel` closes the connection before it returns, may be called in any state and more than once, and never raises.
- Every failure is a `ProviderFailed`. An error in the middle leaves what had arrived.
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
    """Where a stream is."""

    NEW = "new"
    WAITING = "waiting"
    STREAMING = "streaming"
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({StreamState.COMPLETE, StreamState.FAILED, StreamState.CANCELLED})
"""A stream in one of these gives nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAnswer:
    """What the model said, as far as it has arrived."""

    blocks: tuple[Block, ...] = ()
    native: Native | None = None
    """None where there is nothing that could be sent back."""
    stop_reason: StopReason | None = None
    """None until the model has finished."""
    usage: Usage = field(default_factory=Usage)
    usage_reported: Mapping[str, JsonValue] | None = None
    long_write_tokens: int = 0
    """How many of the written cache tokens have the long lifetime."""
    response_id: str | None = None
    model_version: str | None = None
    """The model that the answer names: where an alias was asked for, the one that it stands for."""
    stop_details: Mapping[str, JsonValue] | None = None
    """What the provider says about the stop beyond its reason."""
    cache_miss_reason: str | None = None
    warnings: tuple[Mapping[str, JsonValue], ...] = ()
    """What was not taken as it came, such as a count that cannot be one; each has a `kind`."""
    container: Mapping[str, JsonValue] | None = None
    """Where the provider ran code, with its `id` and `expires_at`: later requests name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """The call on the wire."""

    started_at: datetime
    request_body: bytes
    status: int | None
    headers: Mapping[str, str]
    first_byte_at: datetime | None
    ended_at: datetime | None
    body: bytes


class ProviderStream(Protocol):
    """One call. See the module."""

    @property
    def state(self) -> StreamState:
        """Where it is."""
        ...

    @property
    def answer(self) -> ProviderAnswer:
        """What has arrived."""
        ...

    @property
    def record(self) -> CallRecord:
        """The bytes and times so far."""
        ...

    @property
    def warnings(self) -> Sequence[Mapping[str, JsonValue]]:
        """What was assumed for the call, to be stored with it: each has a `kind`."""
        ...

    def call_when_sent(self, callback: Callable[[], None]) -> None:
        """Calls back when the request goes out: `record` has its body and time then. At most one callback is kept."""
        ...

    def events(self) -> AsyncGenerator[ProviderEvent, None]:
        """Makes the call and gives what it means as it comes. May be used once. Raises `ProviderFailed`."""
        ...

    async def cancel(self) -> None:
        """Ends the call now."""
        ...


class Fold(Protocol):
    """The meaning of a body so far. Pure: the same bytes in any pieces give the same events and the same answer."""

    @property
    def answer(self) -> ProviderAnswer:
        """What has arrived. Built anew on each read."""
        ...

    def feed(self, piece: bytes) -> Iterable[ProviderEvent]:
        """The events that a piece completes. Raises `ProviderFailed` for an error within the stream."""
        ...

    def finish(self) -> None:
        """The body has ended properly. Raises `ProviderFailed` unless the model had finished."""
        ...

    def continue_answer(self) -> None:
        """What is fed from now on is the body of another call, which continues the answer of the one before.

        The answer has the content of both, and the usage of both as one sum.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitCache:
    """A cache at a provider, as the provider tells of it."""

    name: str
    expires_at: datetime
    token_count: int


class ExplicitCaches(Protocol):
    """Caches that a provider keeps by name. Every method raises `ProviderFailed`, `CacheGone` for one that is gone."""

    def may_stand_for(self, payload: Payload) -> bool:
        """Whether the provider would take this request with a cache in place of its static text and tools."""
        ...

    async def create(self, payload: Payload, *, lifetime_seconds: int, label: str) -> ExplicitCache:
        """A cache of the payload's static text and tools."""
        ...

    async def find(self, label: str) -> Sequence[str]:
        """The names of the caches with this label."""
        ...

    async def prolong(self, name: str, *, lifetime_seconds: int) -> ExplicitCache:
        """The cache lives so long from now."""
        ...

    async def delete(self, name: str) -> None:
        """Removes it at the provider."""
        ...


class Provider(Protocol):
    """A vendor. One per process and account.

    The methods that make messages are pure and give the same bytes for the same values for ever: what was sent once
    is sent again like this, and caches and signatures hang on it.
    """

    @property
    def name(self) -> str:
        """`gemini` or `anthropic`; the dialect of its natives."""
        ...

    @property
    def account(self) -> str:
        """Fingerprint of the credentials."""
        ...

    @property
    def continues_pauses(self) -> bool:
        """Whether a paused answer goes on when it is sent back as the last message of the same request."""
        ...

    @property
    def caches(self) -> ExplicitCaches | None:
        """Where the vendor keeps caches by name; None where it has no such thing."""
        ...

    def open_stream(self, payload: Payload) -> ProviderStream:
        """A call that has not begun."""
        ...

    def fold_body(self, body: bytes) -> ProviderAnswer:
        """The answer that stored bytes hold. Never raises: what cannot be read ends it."""
        ...

    async def encode_request(self, payload: Payload) -> bytes:
        """The body that `open_stream` would send for the payload, byte for byte. Nothing is sent."""
        ...

    def open_fold(self) -> Fold:
        """A fold for a body that comes in pieces from somewhere else."""
        ...

    def user_message(self, blocks: Sequence[Block], blobs: Mapping[str, Blob], dynamic: str | None = None) -> bytes:
        """A user task in the vendor's words. `blobs` by the hex of their hash. `dynamic` stands before the task."""
        ...

    def tool_message(self, blocks: Sequence[Block], calls: Sequence[Block], dynamic: str | None = None) -> bytes:
        """Tool results in the vendor's words, in the order of the calls they answer. `dynamic` stands behind them."""
        ...

    def dynamic_message(self, dynamic: str) -> bytes:
        """The dynamic layer as a message of its own, as the layered order has it."""
        ...

    def foreign_message(self, blocks: Sequence[Block]) -> bytes | None:
        """Another vendor's answer as this one would take it: text and calls, no thinking, no signatures.

        None where nothing is left of it.
        """
        ...

    def unsigned_message(self, native: bytes, *, documented_only: bool = False) -> bytes | None:
        """An answer of this vendor's own whose signatures are worth nothing any more: without them and the thinking.

        Everything else stays as it is, unknown fields included; with `documented_only` also without parts and fields
        that the vendor does not document. None where nothing is left of it.
        """
        ...

    def settle_message(self, native: bytes, following: bytes = b"") -> bytes | None:
        """An answer of this vendor's own without calls of the vendor's own tools that never got a result.

        `following`: the answer after it, which may open with the results. None where nothing is left of it.
        """
        ...

    def signed_summary_text(self, message: bytes) -> str | None:
        """The text of a signed summary of this vendor, given the answer to a payload with `requests_summary`.

        None if the answer is anything else.
        """
        ...

    async def count_tokens(self, payload: Payload) -> int:
        """The provider's own count of a request's input. Raises `ProviderFailed`."""
        ...

    async def close(self) -> None:
        """Lets go of all connections."""
        ...
