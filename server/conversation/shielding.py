"""Work that is done to its end, whoever loses patience with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Does the work to its end, also where the caller is cancelled meanwhile, which is passed on afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
