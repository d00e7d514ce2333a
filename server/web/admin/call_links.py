"""Where the page of a call links to: into its conversation, or into the item of a replay that made it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from server.replay.rerun.replay import Replay

TURNS_ON_PAGE: Final = 20
"""Of an item of a replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crumb:
    """A step of the way to a page."""

    url: str
    name: str
    is_id: bool = False


class CallLinks(Protocol):
    """What a call's page has to know of where it stands."""

    @property
    def home(self) -> str:
        """The page of the whole."""
        ...

    @property
    def base(self) -> str:
        """What the addresses of all its calls begin with."""
        ...

    @property
    def trail(self) -> Sequence[Crumb]:
        """The way here."""
        ...

    def turn(self, seq: int) -> str:
        """Where a turn is shown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLinks:
    """Of a live conversation."""

    conversation_id: str

    @property
    def home(self) -> str:
        return f"/admin/conversations/{self.conversation_id}"

    @property
    def base(self) -> str:
        return f"{self.home}/calls"

    @property
    def trail(self) -> Sequence[Crumb]:
        return (
            Crumb(url="/admin/conversations", name="Conversations"),
            Crumb(url=self.home, name=self.conversation_id, is_id=True),
        )

    def turn(self, seq: int) -> str:
        return f"{self.home}?around={seq}#turn-{seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLinks:
    """Of an item of a replay."""

    replay: Replay
    number: int

    @property
    def home(self) -> str:
        return f"/admin/replays/{self.replay.id}/items/{self.number}"

    @property
    def base(self) -> str:
        return f"{self.home}/calls"

    @property
    def trail(self) -> Sequence[Crumb]:
        return (
            Crumb(url="/admin/replays", name="Replays"),
            Crumb(url=f"/admin/replays/{self.replay.id}", name=self.replay.draft.name),
            Crumb(url=self.home, name=f"Item {self.number}"),
        )

    def turn(self, seq: int) -> str:
        """An input stands with its answer: turns 1 and 2 are the first place."""
        return self.place((seq + 1) // 2)

    def place(self, place: int) -> str:
        """Where an answer is shown, on whichever of the item's pages."""
        page = (place - 1) // TURNS_ON_PAGE + 1
        return f"{self.home}{'' if page == 1 else f'?page={page}'}#place-{place}"
