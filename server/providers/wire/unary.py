"""A call to a provider that is answered at once: counting, caches."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from server.conversation.errors import ProviderFailed, ProviderMalformed
from server.providers.wire.exchange import Recording
from server.providers.wire.stream import translate_wire
from server.providers.wire.transport import ResponseCapture

Answer = TypeVar("Answer")
_UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What an SDK raises over a response that is not what it expects: no JSON, no text, an object without its members."""


async def call_through(
    send: Callable[[], Awaitable[Answer]],
    *,
    placeholders: dict[str, bytes],
    translate: Callable[[Exception, Recording], ProviderFailed | None],
) -> Answer:
    """What the SDK makes of the answer. Raises `ProviderFailed`."""
    with ResponseCapture(placeholders, streamed=False) as capture:
        try:
            return await send()
        except Exception as error:
            failure = translate_wire(error) or translate(error, capture.recording)
            if failure is None and capture.recording.status is not None and isinstance(error, _UNREADABLE):
                failure = ProviderMalformed()
            if failure is None:
                raise
            raise failure from error
