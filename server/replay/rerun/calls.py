"""The conversations that replays write, under the lens: how they went, and each of their calls.

A replay conversation is a conversation like any other, and so are its calls. One thing is special: the turns of a
teacher-forced one say what was recorded, whatever its calls were answered. So such a call is not compared with its
turn.
"""

from dataclasses import replace

from server.conversation.errors import ConversationNotFound
from server.inspection.calls import CallInspector, InspectedCall, RebuiltRequest
from server.inspection.port import Inspector
from server.inspection.timeline import Timeline
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import ReplayMode


class ReplayCalls:
    """Looks at replay conversations. Bound to a tenant as `Replays` is.

    Every method raises `ReplayNotFound`, also for an item that there is not, and `ConversationNotFound` for an item of
    which nothing was replayed yet.
    """

    def __init__(self, replays: Replays, inspector: Inspector, calls: CallInspector) -> None:
        """`inspector` and `calls`: over the replay conversations."""
        self._replays = replays
        self._inspector = inspector
        self._calls = calls

    async def load_timeline(
        self, tenant_id: str | None, replay_id: str, number: int, *, after_seq: int | None = None, limit: int = 50
    ) -> Timeline:
        """The turns behind `after_seq`, or the newest, with the calls that were made for them."""
        replay_conversation_id = await self._find_shadow(tenant_id, replay_id, number)
        return await self._inspector.load_timeline(tenant_id, replay_conversation_id, after_seq=after_seq, limit=limit)

    async def inspect_call(
        self, tenant_id: str | None, replay_id: str, number: int, turn_seq: int, attempt: int
    ) -> InspectedCall:
        """Raises `CallNotFound`."""
        replay_conversation_id = await self._find_shadow(tenant_id, replay_id, number)
        found = await self._calls.inspect_call(tenant_id, replay_conversation_id, turn_seq, attempt)
        replay = await self._replays.load_replay(tenant_id, replay_id)
        return replace(found, turn=None) if replay.draft.mode is ReplayMode.TEACHER_FORCED else found

    async def rebuild_request(
        self, tenant_id: str | None, replay_id: str, number: int, turn_seq: int, attempt: int
    ) -> RebuiltRequest:
        """The request alone. Raises `CallNotFound`."""
        replay_conversation_id = await self._find_shadow(tenant_id, replay_id, number)
        return await self._calls.rebuild_request(tenant_id, replay_conversation_id, turn_seq, attempt)

    async def load_response(
        self, tenant_id: str | None, replay_id: str, number: int, turn_seq: int, attempt: int
    ) -> bytes:
        """Every byte that came back; none where nothing came, or retention has removed it. Raises `CallNotFound`."""
        replay_conversation_id = await self._find_shadow(tenant_id, replay_id, number)
        stored = await self._inspector.load_stored_call(tenant_id, replay_conversation_id, turn_seq, attempt)
        end = stored.call.end
        return b"" if end is None or end.raw_response is None else end.raw_response

    async def _find_shadow(self, tenant_id: str | None, replay_id: str, number: int) -> str:
        item = await self._replays.load_item(tenant_id, replay_id, number)
        if item.replay_conversation_id is None:
            raise ConversationNotFound("Nothing was replayed of this item yet.")
        return item.replay_conversation_id
