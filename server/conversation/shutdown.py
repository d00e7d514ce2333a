"""A sign for work that takes long: come to an end at the next good place."""

import asyncio
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Down until the process wants to stop. Work that takes long looks at it between its steps."""

    requested: asyncio.Event = field(default_factory=asyncio.Event)
