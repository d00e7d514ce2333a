"""A sign for work that takes long: come to an end at the next good place."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Down until the process wants to stop. Work that takes long looks at it between its steps."""

    requested: asyncio.Event = field(default_factory=asyncio.Event)


async def run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Does the work to its end, also where the caller is cancelled meanwhile, which is passed on afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
