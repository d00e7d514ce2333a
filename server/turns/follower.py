"""The port to whatever follows on a turn. Nothing here may raise or wait: the turn is over and was told so."""

from typing import Protocol

from server.conversation.store import PayloadSource
from server.conversation.turn import ModelResponseTurn


class TurnFollower(Protocol):
    """Told when the answer of a turn is durable."""

    def turn_followed(
        self, tenant_id: str, source: PayloadSource, static_length: int, turn: ModelResponseTurn, native_length: int
    ) -> None:
        """`source` is what the payload was made of, `static_length` the characters of its static text."""
        ...


class NoFollower:
    """For processes that leave it at turns."""

    def turn_followed(
        self, tenant_id: str, source: PayloadSource, static_length: int, turn: ModelResponseTurn, native_length: int
    ) -> None:
        """Nothing."""
