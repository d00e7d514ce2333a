"""Replay conversations and their calls, for operators.

They are inspected like live ones, with one exception: in a teacher-forced replay conversation the turns contain the
recorded answers, so a call is not compared with its turn.
"""

from dataclasses import dataclass, replace

from server.conversation.errors import ConversationNotFound
from server.inspection.calls import CallInspector, InspectedCall, RebuiltRequest
from server.inspection.port import Inspector
from server.inspection.timeline import Timeline
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import ReplayMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCallKey:
    """Identifies a call of an item."""

    tenant_id: str | None
    """As in `Replays`: None for all tenants."""
    replay_id: str
    number: int
    """The number of the item."""
    turn_seq: int
    attempt: int


class ReplayCalls:
    """Inspects replay conversations.

    Every method raises `ReplayNotFound`, also if the item does not exist, and `ConversationNotFound` if the item has no
    replay conversation yet.
    """

    def __init__(self, replays: Replays, inspector: Inspector, calls: CallInspector) -> None:
        """`inspector` and `calls`: over the replay conversations."""
        self._replays = replays
        self._inspector = inspector
        self._calls = calls

    async def load_timeline(
        self, tenant_id: str | None, replay_id: str, number: int, *, after_seq: int | None = None, limit: int = 50
    ) -> Timeline:
        """Load the turns after `after_seq`, or the newest ones, with their calls."""
        conversation_id = await self._find_conversation(tenant_id, replay_id, number)
        return await self._inspector.load_timeline(tenant_id, conversation_id, after_seq=after_seq, limit=limit)

    async def inspect_call(self, key: ReplayCallKey) -> InspectedCall:
        """Inspect a call. Raises `CallNotFound`."""
        conversation_id = await self._find_conversation(key.tenant_id, key.replay_id, key.number)
        found = await self._calls.inspect_call(key.tenant_id, conversation_id, key.turn_seq, key.attempt)
        replay = await self._replays.load_replay(key.tenant_id, key.replay_id)
        return replace(found, turn=None) if replay.draft.mode is ReplayMode.TEACHER_FORCED else found

    async def rebuild_request(self, key: ReplayCallKey) -> RebuiltRequest:
        """Rebuild the request of a call. Raises `CallNotFound`."""
        conversation_id = await self._find_conversation(key.tenant_id, key.replay_id, key.number)
        return await self._calls.rebuild_request(key.tenant_id, conversation_id, key.turn_seq, key.attempt)

    async def load_response(self, key: ReplayCallKey) -> bytes:
        """Load the raw response. Empty if there was none, or if retention has removed it. Raises `CallNotFound`."""
        conversation_id = await self._find_conversation(key.tenant_id, key.replay_id, key.number)
        stored = await self._inspector.load_stored_call(key.tenant_id, conversation_id, key.turn_seq, key.attempt)
        end = stored.call.end
        return b"" if end is None or end.raw_response is None else end.raw_response

    async def _find_conversation(self, tenant_id: str | None, replay_id: str, number: int) -> str:
        item = await self._replays.load_item(tenant_id, replay_id, number)
        if item.replay_conversation_id is None:
            raise ConversationNotFound("Nothing was replayed of this item yet.")
        return item.replay_conversation_id
