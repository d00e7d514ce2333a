"""Ending work when a process stops."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Shutdown:
    """A request to stop. Long work checks it between its steps."""

    requested: asyncio.Event = field(default_factory=asyncio.Event)


async def run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Run the work to its end, even if the caller is cancelled meanwhile. The cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
