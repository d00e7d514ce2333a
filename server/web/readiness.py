"""Whether this process can serve now: the answer behind `/readyz`."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.errors import CheckTimedOut, ShuttingDown, StrataError
from server.conversation.readiness import Probe
from server.turns.running import RunningTurns

_log = logging.getLogger("strata.web")

_CHECK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How one probe went."""

    name: str
    error: StrataError | None


class Readiness:
    """Runs the probes, all at once, each within a limit of time.

    Callers that ask while a round is running share its result: `/readyz` needs no key, and a flood of requests to it
    must not become a flood of connections to the database.
    """

    def __init__(self, probes: Sequence[Probe], running_turns: RunningTurns) -> None:
        self._probes = tuple(probes)
        self._running_turns = running_turns
        self._round: asyncio.Task[tuple[Check, ...]] | None = None
        self._was_ready = True

    async def check(self) -> tuple[Check, ...]:
        """One check per probe, in their order; while the process shuts down, only that."""
        if self._running_turns.draining:
            return (Check(name="process", error=ShuttingDown()),)
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._run_probes(), name="readiness")
        return await asyncio.shield(self._round)

    async def _run_probes(self) -> tuple[Check, ...]:
        checks = tuple(await asyncio.gather(*map(_run_probe, self._probes)))
        ready = all(check.error is None for check in checks)
        if ready != self._was_ready:
            self._was_ready = ready
            _log_change(checks)
        return checks


async def _run_probe(probe: Probe) -> Check:
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            await probe.check()
    except StrataError as error:
        return Check(name=probe.name, error=error)
    except TimeoutError:
        return Check(name=probe.name, error=CheckTimedOut(f"The check did not end within {_CHECK_SECONDS:g} s."))
    return Check(name=probe.name, error=None)


def _log_change(checks: Sequence[Check]) -> None:
    failing = {check.name: check.error.code for check in checks if check.error}
    if failing:
        _log.warning("readiness.lost", extra={"failing": failing})
    else:
        _log.info("readiness.regained")
