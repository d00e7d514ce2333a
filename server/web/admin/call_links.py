"""Links of the page of a call: into its conversation, or into the replay item that made it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from server.replay.rerun.replay import Replay

TURNS_ON_PAGE: Final = 20
"""Results on one page of a replay item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crumb:
    """An entry of the breadcrumb."""

    url: str
    name: str
    is_id: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLinks:
    """Links of a call of a conversation."""

    conversation_id: str

    @property
    def home(self) -> str:
        """The page of the conversation."""
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
    """Links of a call of a replay item."""

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
        """Return the URL of the result that has the turn: turns 1 and 2, an input and its answer, are result 1."""
        return self.position((seq + 1) // 2)

    def position(self, position: int) -> str:
        """Return the URL of a result, on its page of the item."""
        page = (position - 1) // TURNS_ON_PAGE + 1
        return f"{self.home}{'' if page == 1 else f'?page={page}'}#position-{position}"


CallLinks: TypeAlias = ConversationLinks | ItemLinks
