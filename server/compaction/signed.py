"""Signed summaries: the provider sums up turns itself, in a block that it takes for them from then on.

The block stands first in the messages. What follows it is unchanged, static text and tools too, so the thinking of the
turns that stay is still valid. That is what it is for: behind a segment it would not be.

The call is kept like any other of no turn, see `background_call`. A process that dies over it finds its answer again.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from server.caching.policy import apply_caching
from server.compaction.background_call import BackgroundCalls
from server.compaction.signed_payload import SIGNED_COMPACTION, ask_for_cached, build_compaction_payload, find_cut
from server.compaction.source import policy_of
from server.conversation.block import Blob, ImageBlock
from server.conversation.call import Call
from server.conversation.errors import ProviderEmpty
from server.conversation.payload import LayerOrder, Payload
from server.conversation.store import BufferedTurn, History, PayloadSource, Store
from server.payload.settings import read_order
from server.providers.model_profile import find_profile
from server.providers.provider import Provider, ProviderAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedBlock:
    """What the provider gave."""

    message: bytes
    """As it is sent back."""
    text: str
    """What it says."""
    last_seq: int
    """The last turn that it stands for."""


class SignedSummariser:
    """Asks the assistant's own model for signed blocks."""

    def __init__(self, store: Store, calls: BackgroundCalls) -> None:
        self._store = store
        self._calls = calls

    async def sum_up(self, tenant_id: str, history: History, static_text: str, last_seq: int) -> SignedBlock | None:
        """A block for the signed summary, if there is one, and the turns up to `last_seq`, or to an earlier end of an
        exchange where it cannot be that one. None where it cannot be any.

        Raises `ProviderFailed`, also where what came is no signed block.
        """
        provider = self._calls.provider_of(history)
        cut = find_cut(history.source, provider=provider, account=provider.account, last_seq=last_seq)
        if cut is None:
            return None
        earlier = await self._recall(tenant_id, history, cut)
        cut = cut if earlier is None else earlier.trigger_seq
        payload = await self._build(tenant_id, history, static_text, cut)
        if earlier is None:
            payload = ask_for_cached(payload, history.source, provider.account, datetime.now(UTC))
        else:
            payload = apply_caching(payload, earlier.start.caching)
        answer = await self._calls.ask(
            tenant_id,
            history,
            payload,
            note={"kind": SIGNED_COMPACTION, "last_seq": cut},
            accepts=lambda answer: _read_block(provider, answer, cut) is not None,
        )
        block = _read_block(provider, answer, cut)
        if block is None:
            raise ProviderEmpty("The model gave no signed summary.", stop_reason=str(answer.stop_reason))
        return block

    async def _recall(self, tenant_id: str, history: History, last_seq: int) -> Call | None:
        """A call of this epoch for no more than these turns that has brought an answer, or may still do so. It is paid
        for, and asking the very same again finds it, whatever was said meanwhile and however cold the cache has gone.
        """
        epoch = 0 if history.source.epoch is None else history.source.epoch.number
        calls = await self._store.list_calls(tenant_id, history.source.conversation.id, -epoch)
        fitting = [
            call
            for call in calls
            if any(note.get("kind") == SIGNED_COMPACTION for note in call.start.warnings)
            and call.trigger_seq <= last_seq
            and (call.end is None or call.end.error_code is None)
        ]
        return fitting[-1] if fitting else None

    async def _build(self, tenant_id: str, history: History, static_text: str, last_seq: int) -> Payload:
        source, provider = history.source, self._calls.provider_of(history)
        moved = [turn for turn in source.buffered if turn.seq <= last_seq]
        return build_compaction_payload(
            source,
            provider=provider,
            account=provider.account,
            static_text=static_text,
            last_seq=last_seq,
            blobs=await self._load_blobs(tenant_id, history, moved),
        )

    async def _load_blobs(self, tenant_id: str, history: History, turns: list[BufferedTurn]) -> dict[str, Blob]:
        """The images of the turns: they are shown once more."""
        conversation_id, blobs = history.source.conversation.id, dict[str, Blob]()
        for turn in turns:
            for block in turn.blocks or ():
                if isinstance(block, ImageBlock) and block.sha256 not in blobs:
                    found = await self._store.load_blob(
                        tenant_id, bytes.fromhex(block.sha256), conversation_id=conversation_id
                    )
                    if found is not None:
                        blobs[block.sha256] = found
        return blobs


def wants_signed(source: PayloadSource) -> bool:
    """Whether the assistant asks for signed blocks, and its model gives them."""
    definition = source.assistant.definition
    profile = find_profile(definition.provider, definition.model)
    is_append_only = read_order(definition.settings, profile) is LayerOrder.APPEND_ONLY
    return policy_of(source).signed and profile.signs_compaction and is_append_only


def _read_block(provider: Provider, answer: ProviderAnswer, last_seq: int) -> SignedBlock | None:
    if answer.native is None:
        return None
    text = provider.signed_summary_text(answer.native.data)
    return None if text is None else SignedBlock(message=answer.native.data, text=text, last_seq=last_seq)
