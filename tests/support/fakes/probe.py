"""A probe whose answer is set by the test."""

import asyncio
from dataclasses import dataclass, field

from server.conversation.errors import StrataError


@dataclass(slots=True)
class SwitchableProbe:
    """Raises `error` if it is set; with a `gate` it first waits for the gate to open."""

    name: str = "database"
    error: StrataError | None = None
    gate: asyncio.Event | None = None
    check_count: int = field(default=0, init=False)

    async def check(self) -> None:
        self.check_count += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
