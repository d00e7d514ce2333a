"""A few harmless tools that run beside the chat, for trying a tool loop out."""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from server.web.client import Tool, ToolFunction


def get_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def roll_dice(sides: int = 6) -> int:
    return secrets.randbelow(sides) + 1


DEMO_FUNCTIONS: Final[Mapping[str, ToolFunction]] = {"get_time": get_time, "roll_dice": roll_dice}

DEMO_TOOLS: Final = (
    Tool(
        name="get_time",
        description="The date and time now, in UTC.",
        parameters={"type": "object", "properties": {}},
    ),
    Tool(
        name="roll_dice",
        description="Rolls one die.",
        parameters={"type": "object", "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 1000}}},
    ),
)
