"""The items of replays: claimed one after the other, run while their lease is renewed, and ended or released."""

import asyncio
import logging

from server.conversation.errors import DatabaseUnavailable, Internal, LeaseLost, StrataError
from server.conversation.outages import keep_lease
from server.conversation.shutdown import run_to_completion
from server.replay.rerun.admission import ItemHalted
from server.replay.rerun.observer import Departure
from server.replay.rerun.replay import ClaimedItem, ItemState
from server.replay.rerun.runner import ItemEnd, walk_item
from server.replay.rerun.tools import ReplayTools

_log = logging.getLogger("strata.replay")


class ReplayItems:
    """Runs the items of replays in this process."""

    def __init__(self, tools: ReplayTools) -> None:
        self._tools = tools

    async def run_all(self, replay_id: str) -> int:
        """Runs items until there is none left for this process, or it has to stop. Returns how many were run.

        Raises `DatabaseUnavailable`.
        """
        count = 0
        while not self._tools.shutdown.requested.is_set():
            claimed = await self._tools.replays.claim_item(
                replay_id, owner=self._tools.owner, lease_seconds=self._tools.lease_seconds
            )
            if claimed is None:
                return count
            await self.run(claimed)
            count += 1
        return count

    async def run(self, claimed: ClaimedItem) -> None:
        """Runs one item while this process holds its lease. Cancelling releases it."""
        work = asyncio.create_task(self._run(claimed), name="replay item")
        beat = asyncio.create_task(self._renew_lease(claimed), name="replay heartbeat")
        try:
            await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self._lose(claimed)
        except asyncio.CancelledError:
            await _end(work, beat)
            await run_to_completion(self._release_cancelled(claimed))
            raise
        finally:
            await _end(work, beat)

    async def _release_cancelled(self, claimed: ClaimedItem) -> None:
        try:
            await self._release(claimed)
        except StrataError as error:
            # Another process can claim it when its lease has expired.
            _log.warning("replay.item_not_released", extra=_facts(claimed, code=error.code))

    async def _run(self, claimed: ClaimedItem) -> None:
        try:
            end = await self._walk(claimed)
            if end is None:
                await self._release(claimed)
                return
            await self._tools.replays.end_item(claimed.lease, end.state, error_code=end.error_code)
        except LeaseLost:
            self._lose(claimed)
        else:
            departure = Departure.DONE if end.state is ItemState.DONE else Departure.FAILED
            self._tools.observer.item_left(departure, error_code=end.error_code)

    async def _release(self, claimed: ClaimedItem) -> None:
        await self._tools.replays.release_item(claimed.lease)
        self._tools.observer.item_left(Departure.GIVEN_BACK)

    def _lose(self, claimed: ClaimedItem) -> None:
        _log.warning("replay.item_lost", extra=_facts(claimed))
        self._tools.observer.item_left(Departure.LOST)

    async def _walk(self, claimed: ClaimedItem) -> ItemEnd | None:
        """How the item ended; None if it has to be continued later."""
        try:
            return await walk_item(self._tools, claimed)
        except ItemHalted:
            return None
        except (LeaseLost, DatabaseUnavailable):
            raise
        except StrataError as error:
            _log.warning("replay.item_failed", extra=_facts(claimed, code=error.code))
            return ItemEnd(state=ItemState.FAILED, error_code=error.code)
        # A bug must end the item too: the next process would meet it again, for ever.
        except Exception:  # noqa: BLE001  reason: logged with its traceback, and the item says `internal`
            _log.exception("replay.item_crashed", extra=_facts(claimed))
            return ItemEnd(state=ItemState.FAILED, error_code=Internal.code)

    async def _renew_lease(self, claimed: ClaimedItem) -> None:
        """Renews the lease of the item until another process has claimed it."""
        seconds = self._tools.lease_seconds

        async def beat() -> bool:
            await asyncio.sleep(seconds / 3)
            await self._tools.replays.renew_lease(claimed.lease, lease_seconds=seconds)
            return True

        await keep_lease(beat, _facts(claimed))


async def _end(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _facts(claimed: ClaimedItem, **more: object) -> dict[str, object]:
    return {"replay_id": claimed.lease.replay_id, "item": claimed.lease.number, **more}
