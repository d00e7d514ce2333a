"""Signed summaries: a block that the provider creates and signs, and that replaces the oldest turns from then on.

The block is the first of the messages. Static text, tools and all later messages stay the same, so the thinking of the
turns that stay in the buffer remains valid; after a segment it would not. An epoch with a signed summary therefore
differs from the one before it only in its first message.

The provider signs the messages that it was shown. So the request consists of the very messages of the conversation up
to the cut, including thinking, after the same static text and tools, and the messages after the cut must be the same
afterwards. The call is stored, see `background_call`: a process that crashes during the call finds the answer again.

A signed summary also has a text, which becomes a segment when the block can no longer be used (`inline_summary`). For
that, the next position of the generation is kept free.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from server.caching.policy import SHORT_SECONDS, apply_caching
from server.compaction.background_call import BackgroundCalls
from server.compaction.epoch_writer import EpochWriter, Rewrite
from server.compaction.plan import policy_of
from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.block import Blob, ImageBlock
from server.conversation.call import Call
from server.conversation.epoch import Epoch, EpochReason, SignedSummary, inline_summary
from server.conversation.errors import CompactionNotFound, Internal, ProviderEmpty
from server.conversation.payload import LayerOrder, Payload
from server.conversation.store import BufferedTurn, CopiedSegments, History, PayloadSource, Store
from server.conversation.turn import TurnKind
from server.payload.builder import hash_chain, hash_prefix
from server.payload.messages import PayloadSpec, outline_history, render_history
from server.payload.renderer import Renderer
from server.payload.settings import read_order, read_settings
from server.payload.shared_caches import StaticText
from server.payload.signatures import build_signature_scope
from server.payload.transcript import build_summary
from server.providers.model_profile import find_profile
from server.providers.provider import Provider, ProviderAnswer

SIGNED_COMPACTION: Final = "signed_compaction"
"""The `kind` of the note that is stored with the call."""


def find_cut(source: PayloadSource, *, provider: Provider, account: str, last_seq: int) -> int | None:
    """Return the last turn to summarise: `last_seq`, or an earlier end of an exchange.

    The summarised messages have to end with the model, and the kept messages must not depend on them: otherwise the
    provider would find other messages after the block than it was shown. None if there is no such place.
    """
    spec, turns = _spec(source, provider, account, "", {}), source.buffered
    whole = outline_history(turns, spec)
    for cut in _ends_before(turns, last_seq):
        moved = outline_history([turn for turn in turns if turn.seq <= cut], spec)
        kept = outline_history([turn for turn in turns if turn.seq > cut], spec)
        if moved and moved[-1][0].kind is TurnKind.MODEL_RESPONSE and whole[len(moved) :] == kept:
            return cut
    return None


def build_compaction_payload(
    source: PayloadSource,
    *,
    provider: Provider,
    account: str,
    static_text: str,
    last_seq: int,
    blobs: Mapping[str, Blob],
) -> Payload:
    """Build the request, without cache markers. The same values give the same bytes."""
    spec = _spec(source, provider, account, static_text, blobs)
    rendered = render_history([turn for turn in source.buffered if turn.seq <= last_seq], spec)
    return Payload(
        model=source.assistant.definition.model,
        static_text=static_text,
        tools=spec.tools,
        messages=rendered.messages,
        settings=spec.settings,
        requests_summary=True,
    )


def request_caching(payload: Payload, source: PayloadSource, account: str, now: datetime) -> Payload:
    """Add a marker after the last message if the provider may still have the messages in its cache.

    Otherwise a marker would only make the provider write a cache that is never read.
    """
    previous = source.previous_call
    if previous is None or (previous.model, previous.account) != (payload.model, account):
        return payload
    seconds = int(previous.caching.get("cache_seconds", SHORT_SECONDS))
    if (now - previous.started_at).total_seconds() > seconds:
        return payload
    return replace(
        payload,
        breakpoints=(len(payload.messages) - 1,),
        cache_seconds=seconds,
        static_cache_seconds=int(previous.caching.get("static_cache_seconds", seconds)),
    )


def _ends_before(turns: Sequence[BufferedTurn], last_seq: int) -> Iterator[int]:
    """Yield the ends of exchanges from `last_seq` backwards."""
    tasks = [turn.seq for turn in turns if turn.kind is TurnKind.USER_TASK and turn.seq <= last_seq]
    yield last_seq
    for seq in reversed(tasks[1:]):
        yield seq - 1


def _spec(
    source: PayloadSource, provider: Provider, account: str, static_text: str, blobs: Mapping[str, Blob]
) -> PayloadSpec:
    definition, epoch = source.assistant.definition, source.epoch
    if epoch is None:
        raise Internal("There is nothing to summarise before the first payload.")
    return PayloadSpec(
        provider=provider,
        epoch=epoch.number,
        scope=build_signature_scope(provider.name, account, find_profile(provider.name, definition.model), epoch),
        order=LayerOrder.APPEND_ONLY,
        # The limit applies to answers, and a truncated summary is useless.
        settings=replace(read_settings(definition.settings), max_output_tokens=None, stop_sequences=()),
        tools=definition.tools,
        static_text=static_text,
        dynamic=None,
        blobs=blobs,
        signed_summary=None if epoch.signed_summary is None else epoch.signed_summary.data,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedBlock:
    """The provider's signed summary."""

    message: bytes
    """As it is sent back."""
    text: str
    """What it says."""
    last_seq: int
    """The last turn that it replaces."""


class SignedSummariser:
    """Requests signed summaries from the assistant's own model."""

    def __init__(self, store: Store, calls: BackgroundCalls) -> None:
        self._store = store
        self._calls = calls

    async def create(self, tenant_id: str, history: History, static_text: str, last_seq: int) -> SignedBlock | None:
        """Request a block that replaces the present signed summary, if any, and the turns up to `last_seq`.

        It may end at an earlier exchange, see `find_cut`. None if no cut is possible. Raises `ProviderFailed`, also if
        the answer is no signed block.
        """
        provider = self._calls.provider_of(history)
        cut = find_cut(history.source, provider=provider, account=provider.account, last_seq=last_seq)
        if cut is None:
            return None
        earlier = await self._find_earlier_call(tenant_id, history, cut)
        cut = cut if earlier is None else earlier.trigger_seq
        payload = await self._build(tenant_id, history, static_text, cut)
        if earlier is None:
            payload = request_caching(payload, history.source, provider.account, datetime.now(UTC))
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
            raise ProviderEmpty("The model returned no signed summary.", stop_reason=str(answer.stop_reason))
        return block

    async def _find_earlier_call(self, tenant_id: str, history: History, last_seq: int) -> Call | None:
        """Find a call of this epoch for at most these turns that has returned an answer, or may still do so.

        It is paid for. The same request finds its answer again, even if turns were added or the cache expired since.
        """
        epoch = 0 if history.source.epoch is None else history.source.epoch.number
        calls = await self._store.list_calls(tenant_id, history.source.conversation.id, -epoch)
        usable = [
            call
            for call in calls
            if any(note.get("kind") == SIGNED_COMPACTION for note in call.start.warnings)
            and call.trigger_seq <= last_seq
            and (call.end is None or call.end.error_code is None)
        ]
        return usable[-1] if usable else None

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
        """Load the images of the turns, which are sent once more."""
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


def uses_signed_summaries(source: PayloadSource) -> bool:
    """Return whether the assistant asks for signed summaries and its model supports them."""
    definition = source.assistant.definition
    profile = find_profile(definition.provider, definition.model)
    is_append_only = read_order(definition.settings, profile) is LayerOrder.APPEND_ONLY
    return policy_of(source).signed and profile.signs_compaction and is_append_only


def _read_block(provider: Provider, answer: ProviderAnswer, last_seq: int) -> SignedBlock | None:
    if answer.native is None:
        return None
    text = provider.signed_summary_text(answer.native.data)
    return None if text is None else SignedBlock(message=answer.native.data, text=text, last_seq=last_seq)


class SignedSummaries:
    """Begins the epochs that change a signed summary. Every method raises `EpochMoved` if another epoch has begun."""

    def __init__(
        self, store: Store, renderer: Renderer, writer: EpochWriter, summariser: SignedSummariser | None
    ) -> None:
        self._store = store
        self._renderer = renderer
        self._writer = writer
        self._summariser = summariser

    async def sign(self, tenant_id: str, history: History, static: StaticText, last_seq: int) -> Epoch | None:
        """Replace the present signed summary and turns up to `last_seq`, or as many as possible, by a new signed
        summary.

        None if that is not possible. Raises `ProviderFailed`.
        """
        epoch = _epoch_of(history)
        if self._summariser is None:
            return None
        block = await self._summariser.create(tenant_id, history, static.text, last_seq)
        if block is None:
            return None
        old, kept = epoch.signed_summary, len(history.segments)
        start_seq = epoch.buffer_start_seq if old is None else old.start_seq
        summary = build_summary(start_seq, block.last_seq, block.text)
        text = await self._renderer.render_segment(tenant_id, [summary])
        signed_summary = SignedSummary(
            data=block.message,
            start_seq=start_seq,
            text=text,
            token_count=self._writer.count_tokens(history, text),
            kept_prefix_hashes=(epoch.prefix_hash, *_still_needed(history, block.last_seq)),
        )
        rewrite = Rewrite(
            reason=EpochReason.SIGNED,
            static=static,
            generation=epoch.generation if history.can_append_segment else history.newest_generation + 1,
            segment_count=kept,
            buffer_start_seq=block.last_seq + 1,
            copies=None
            if history.can_append_segment
            else CopiedSegments(generation=epoch.generation, from_position=0, count=kept, to_position=0),
            signed_summary=signed_summary,
            prefix_hash=hash_chain(
                hash_prefix(static.text, history.source.assistant.definition.tools), epoch.number + 1
            ),
        )
        return await self._writer.begin(tenant_id, history, rewrite)

    async def undo(self, tenant_id: str, history: History, static: StaticText) -> CompactionReport:
        """Replace the signed summary by what it summarised: the signed summary before it, if any, and turns."""
        epoch, conversation_id = _epoch_of(history), history.source.conversation.id
        removed = epoch.signed_summary
        before = (
            None if removed is None else await self._store.find_epoch_before(tenant_id, conversation_id, removed.data)
        )
        if removed is None or before is None:
            raise CompactionNotFound
        prefix_hash = hash_prefix(static.text, history.source.assistant.definition.tools)
        # Thinking created after the removed block has not seen the restored turns, so it is not valid after them.
        # Thinking created after the restored block has.
        restored = (
            None
            if before.signed_summary is None
            else replace(
                before.signed_summary,
                kept_prefix_hashes=(before.prefix_hash, *before.signed_summary.kept_prefix_hashes),
            )
        )
        rewrite = Rewrite(
            reason=EpochReason.COMPACTION_UNDONE,
            static=static,
            generation=epoch.generation,
            segment_count=epoch.segment_count,
            buffer_start_seq=before.buffer_start_seq,
            signed_summary=restored,
            prefix_hash=None if restored is None else hash_chain(prefix_hash, epoch.number + 1),
        )
        begun = await self._writer.begin(tenant_id, history, rewrite)
        return CompactionReport(
            conversation_id=conversation_id,
            outcome=CompactionOutcome.UNDONE,
            reason="requested",
            epoch=begun.number,
            first_seq=before.buffer_start_seq,
            last_seq=epoch.buffer_start_seq - 1,
            segment_tokens=removed.token_count,
        )

    async def inline_summary(self, tenant_id: str, history: History, static: StaticText) -> None:
        """Write the text of the signed summary as a segment. Does nothing if there is no signed summary."""
        segment = inline_summary(_epoch_of(history))
        if segment is None:
            return
        rewrite = Rewrite(
            reason=EpochReason.SUMMARY_INLINED,
            static=replace(static, text=static.text + segment.text),
            generation=segment.generation,
            segment_count=segment.position + 1,
            buffer_start_seq=segment.last_seq + 1,
            segment=segment,
        )
        await self._writer.begin(tenant_id, history, rewrite)


def _still_needed(history: History, last_seq: int) -> Iterator[bytes]:
    """Yield the prefixes of the present signed summary that turns after `last_seq` were created with."""
    signed_summary = _epoch_of(history).signed_summary
    prefix_hashes = {turn.prefix_hash for turn in history.source.buffered if turn.seq > last_seq}
    yield from (
        kept for kept in (() if signed_summary is None else signed_summary.kept_prefix_hashes) if kept in prefix_hashes
    )


def _epoch_of(history: History) -> Epoch:
    if history.source.epoch is None:
        raise Internal("There is nothing to compact before the first payload.")
    return history.source.epoch
