"""Work that survives an outage of the database: writes that are repeated, leases that are renewed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from server.conversation.errors import DatabaseUnavailable, LeaseLost

RETRY_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.5
_log = logging.getLogger("strata.lease")

T = TypeVar("T")


async def retry_while_unavailable(write: Callable[[], Awaitable[T]], *, limit_seconds: float = RETRY_SECONDS) -> T:
    """Repeat a write until the database answers: an answer that was paid for is not given up over a restart.

    Raises `DatabaseUnavailable` if the database does not answer within the limit, `TimeoutError` if a write takes
    longer than the limit, and what the write raises.
    """
    unavailable: DatabaseUnavailable | None = None
    try:
        async with asyncio.timeout(limit_seconds):
            while True:
                try:
                    return await write()
                except DatabaseUnavailable as error:
                    unavailable = error
                    await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        if unavailable is None:
            raise
        raise unavailable from None


async def keep_lease(beat: Callable[[], Awaitable[bool]], facts: Mapping[str, object]) -> None:
    """Renew a lease with `beat`, again and again, until `beat` returns False or the lease is lost.

    `beat` waits until the renewal is due, and then renews. An outage is logged and does not end the heartbeat: the
    database may be back before the lease expires. `facts` are the fields of the log events.
    """
    while True:
        try:
            if not await beat():
                return
        except LeaseLost:
            _log.warning("lease.lost", extra=dict(facts))
            return
        except DatabaseUnavailable as error:
            _log.warning("lease.heartbeat_failed", extra={**facts, "code": error.code})
        # If the heartbeat ended here, another process would take a living holder for dead.
        except Exception:  # noqa: BLE001  reason: logged with its traceback, and the next beat comes
            _log.exception("lease.heartbeat_crashed", extra=dict(facts))
