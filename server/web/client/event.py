"""The events of a turn as a client hears them.

In this order: `TurnStarted` once, then those of `conversation.event` as the model writes, then `TurnEnded` once. What
this release does not know comes as `UnknownEvent`, in its place.
"""

from dataclasses import dataclass
from typing import TypeAlias

from server.conversation.block import JsonValue
from server.conversation.event import ProviderEvent, TurnStarted
from server.web.client.answers import TurnEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """An event of a kind that this release does not know."""

    name: str
    data: JsonValue
    """Its JSON, or its text where it is none."""


ClientEvent: TypeAlias = TurnStarted | ProviderEvent | TurnEnded | UnknownEvent
