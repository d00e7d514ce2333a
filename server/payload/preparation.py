"""Preparing the payload of a conversation's next call: load, determine the epoch, render, build."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from server.caching.explicit_policy import CachePlan
from server.conversation.assistant import Tool
from server.conversation.block import Blob
from server.conversation.epoch import NOTHING_REJECTED, Epoch, EpochReason, Rejected, Segment, inline_summary
from server.conversation.errors import EpochMoved, ProviderFailed, ProviderNotConfigured, SummaryRejected
from server.conversation.payload import LayerOrder
from server.conversation.store import PayloadSource, Store
from server.conversation.turn import TurnKind
from server.payload.arguments import build_static_arguments, collect_arguments, hash_arguments
from server.payload.builder import BuiltPayload, build_payload, hash_prefix
from server.payload.cache_plan import plan_caching
from server.payload.dynamic_clock import EXACT, DynamicClock, render_with_clock
from server.payload.renderer import RenderedDynamic, Renderer, TemplateFailure
from server.payload.settings import read_clock_seconds, read_order
from server.payload.shared_caches import BlobCache, HistoryCache, RequestHashes, StaticText, StaticTextCache
from server.providers.continuation import choose_container
from server.providers.model_profile import find_profile
from server.providers.provider import Provider

_log = logging.getLogger("strata.turn")
_MAX_TRIES: Final = 3
"""A compaction may begin an epoch between the load and the write; then the conversation is loaded again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPayload:
    """A payload that is ready to be sent, and what is recorded about it."""

    provider: Provider
    model: str
    assistant_id: str
    epoch: int
    built: BuiltPayload
    caching: CachePlan
    template_failures: tuple[TemplateFailure, ...]
    source: PayloadSource
    """What it was built from, with its epoch."""
    static: StaticText
    request_hashes: RequestHashes


class PayloadPreparation:
    """Prepares payloads, and caches static texts and images for the turns of this process."""

    def __init__(
        self,
        store: Store,
        renderer: Renderer,
        providers: Mapping[str, Provider],
        *,
        texts: StaticTextCache | None = None,
    ) -> None:
        """`texts`: a cache that is shared with the compactor of this process."""
        self._store = store
        self._renderer = renderer
        self._providers = providers
        self._texts = texts or StaticTextCache()
        self._blobs = BlobCache()
        self._histories = HistoryCache()
        self._request_hashes = RequestHashes()

    async def load(self, tenant_id: str, conversation_id: str) -> PayloadSource:
        """Load everything that the payload for the newest turn is built from, in one round trip. Raises the errors of
        the store.
        """
        cached = self._blobs.blobs_of(conversation_id)
        history = self._histories.find(conversation_id)
        source = await self._store.load_payload_source(
            tenant_id,
            conversation_id,
            cached_static_hashes=self._texts.hashes_for(conversation_id),
            cached_blobs=[blob.sha256 for blob in cached.values()],
            cached_turns=() if history is None else history.turns,
            cached_provider=None if history is None else history.provider,
        )
        # The blobs may have been evicted during the load.
        if cached:
            self._blobs.put(conversation_id, cached)
        if source.epoch is not None and self._current_static(source) is None:
            return await self._store.load_payload_source(tenant_id, conversation_id)
        return source

    async def prepare(self, tenant_id: str, source: PayloadSource) -> PreparedPayload:
        """Build the payload. Needs no round trip, except one if an epoch begins.

        Raises `ProviderNotConfigured`, `ValidationFailed` for settings that the model does not support, and the errors
        of the store.
        """
        for _ in range(_MAX_TRIES):
            try:
                return await self._build(tenant_id, source)
            except EpochMoved:
                source = await self.load(tenant_id, source.conversation.id)
        raise EpochMoved

    async def _build(self, tenant_id: str, source: PayloadSource) -> PreparedPayload:
        definition = source.assistant.definition
        provider = self._providers.get(definition.provider)
        if provider is None:
            raise ProviderNotConfigured(f"This server has no key for {definition.provider}.")
        epoch, static, failures = await self._settle_epoch(tenant_id, source)
        return await self._assemble(tenant_id, replace(source, epoch=epoch), provider, epoch, static, failures)

    async def _assemble(
        self,
        tenant_id: str,
        source: PayloadSource,
        provider: Provider,
        epoch: Epoch,
        static: StaticText,
        failures: tuple[TemplateFailure, ...],
    ) -> PreparedPayload:
        definition = source.assistant.definition
        profile = find_profile(provider.name, definition.model)
        order = read_order(definition.settings, profile)
        rendered, clock = await self._render_dynamic(tenant_id, source, provider, order)
        history = self._histories.find(source.conversation.id)
        built = build_payload(
            source,
            provider=provider,
            static_text=static.text,
            epoch=epoch,
            dynamic=rendered.text,
            clock=clock,
            blobs=self._gather_blobs(source),
            sealed=None if history is None else history.sealed,
        )
        self._histories.put(source.conversation.id, source.buffered, provider.name, built.sealed)
        caching = plan_caching(
            source, built, provider=provider, profile=profile, prefix_hash=epoch.prefix_hash, now=datetime.now(UTC)
        )
        return PreparedPayload(
            provider=provider,
            model=definition.model,
            assistant_id=source.assistant.id,
            epoch=epoch.number,
            built=_name_container(source, replace(built, payload=caching.payload), provider),
            caching=caching,
            template_failures=(*failures, *rendered.failures),
            source=source,
            static=static,
            request_hashes=self._request_hashes,
        )

    async def _render_dynamic(
        self, tenant_id: str, source: PayloadSource, provider: Provider, order: LayerOrder
    ) -> tuple[RenderedDynamic, DynamicClock]:
        """Render the dynamic layer, in the layered order with the time of the previous block if that is still cached
        and nothing else has changed.
        """

        async def render(at: datetime) -> RenderedDynamic:
            arguments = collect_arguments(source, at)
            return await self._renderer.render_dynamic(tenant_id, provider.name, source.conversation.context, arguments)

        now = datetime.now(UTC)
        if order is LayerOrder.APPEND_ONLY:
            return await render(now), EXACT
        clock_seconds = read_clock_seconds(source.assistant.definition.settings)
        return await render_with_clock(render, source, provider, now, clock_seconds)

    async def leave_out_rejected(
        self, tenant_id: str, sent: PreparedPayload, failure: ProviderFailed
    ) -> PreparedPayload | None:
        """Build the same payload without what the provider has rejected: signatures, or the signed summary.

        A new epoch records what is left out, so no later payload sends it. First all signatures of the history are left
        out. If a request without them was rejected too, its calls and results become text. None if the payload has
        nothing that could be left out. Raises the errors of the store.
        """
        for _ in range(_MAX_TRIES):
            try:
                return await self._leave_out(tenant_id, sent, failure)
            except EpochMoved:
                # A compaction has made room in the window meanwhile.
                sent = await self.prepare(tenant_id, await self.load(tenant_id, sent.source.conversation.id))
        raise EpochMoved

    async def _leave_out(
        self, tenant_id: str, sent: PreparedPayload, failure: ProviderFailed
    ) -> PreparedPayload | None:
        conversation_id = sent.source.conversation.id
        for epoch, static, segment in _plan_recovery(sent, failure):
            source = replace(sent.source, epoch=epoch)
            prepared = await self._assemble(tenant_id, source, sent.provider, epoch, static, sent.template_failures)
            if _answers_of(prepared) == _answers_of(sent):
                continue
            await self._store.begin_epoch(tenant_id, conversation_id, epoch, segment=segment)
            self._texts.put(conversation_id, epoch.static_hash, static)
            _log.warning(
                f"turn.{epoch.reason.value}",
                extra={
                    "conversation_id": conversation_id,
                    "epoch": epoch.number,
                    "provider": sent.provider.name,
                    "model": sent.model,
                    "code": failure.code,
                },
            )
            note = {"kind": "signatures_rejected", "code": failure.code, "epoch": epoch.number}
            return replace(prepared, built=replace(prepared.built, warnings=(note, *prepared.built.warnings)))
        return None

    async def _settle_epoch(
        self, tenant_id: str, source: PayloadSource
    ) -> tuple[Epoch, StaticText, tuple[TemplateFailure, ...]]:
        """Return the epoch of the call: the current one, or a new one if a static part has changed."""
        reason = plan_epoch(source)
        current = self._current_static(source)
        if reason is None and source.epoch is not None and current is not None:
            self._texts.put(source.conversation.id, source.epoch.static_hash, current)
            return source.epoch, current, ()
        epoch, static, failures = await self._begin_epoch(tenant_id, source, reason or EpochReason.STARTED, current)
        self._texts.put(source.conversation.id, epoch.static_hash, static)
        return epoch, static, failures

    def _current_static(self, source: PayloadSource) -> StaticText | None:
        if source.epoch is None:
            return None
        if source.static_text is not None:
            return StaticText(text=source.static_text, base_length=len(source.epoch.base_text))
        return self._texts.find(source.epoch.static_hash)

    async def _begin_epoch(
        self, tenant_id: str, source: PayloadSource, reason: EpochReason, current: StaticText | None
    ) -> tuple[Epoch, StaticText, tuple[TemplateFailure, ...]]:
        conversation, assistant = source.conversation, source.assistant
        rendered = await self._renderer.render_static(
            tenant_id,
            assistant.definition.provider,
            assistant.definition,
            build_static_arguments(assistant=assistant, conversation=conversation),
        )
        history = "" if current is None else current.history
        static = StaticText(text=rendered.text + history, base_length=len(rendered.text))
        epoch = Epoch(
            number=conversation.epoch + 1,
            reason=reason,
            assistant_version=assistant.version,
            generation=0 if source.epoch is None else source.epoch.generation,
            segment_count=0 if source.epoch is None else source.epoch.segment_count,
            base_text=rendered.text,
            static_hash=_hash_text(static.text),
            prefix_hash=hash_prefix(static.text, assistant.definition.tools),
            arguments_hash=hash_arguments(conversation.args),
            args=conversation.args,
            template_hash=rendered.template_hash,
            buffer_start_seq=conversation.buffer_start_seq,
            rejected={} if source.epoch is None else source.epoch.rejected,
        )
        segment = None
        if source.epoch is not None and source.epoch.signed_summary is not None:
            epoch = replace(epoch, signed_summary=source.epoch.signed_summary, prefix_hash=source.epoch.prefix_hash)
            if not await self._summary_stays_valid(tenant_id, source, source.epoch, epoch):
                epoch, static, segment = _inline_summary(epoch, static, assistant.definition.tools)
        await self._store.begin_epoch(
            tenant_id,
            conversation.id,
            epoch,
            segment=segment,
            template_source=rendered.template_source,
        )
        return epoch, static, rendered.failures

    async def _summary_stays_valid(self, tenant_id: str, source: PayloadSource, old: Epoch, new: Epoch) -> bool:
        """Return whether the signed summary is valid in the new epoch: same model, static text and tools."""
        if old.static_hash != new.static_hash:
            return False
        now = source.assistant.definition
        if old.assistant_version == source.assistant.version:
            return True
        old_definition = (
            await self._store.load_assistant(tenant_id, source.assistant.id, old.assistant_version)
        ).definition
        is_append_only = read_order(now.settings, find_profile(now.provider, now.model)) is LayerOrder.APPEND_ONLY
        return is_append_only and (old_definition.provider, old_definition.model, old_definition.tools) == (
            now.provider,
            now.model,
            now.tools,
        )

    def _gather_blobs(self, source: PayloadSource) -> Mapping[str, Blob]:
        blobs = {**self._blobs.blobs_of(source.conversation.id), **source.blobs}
        if blobs:
            self._blobs.put(source.conversation.id, blobs)
        return blobs


def _name_container(source: PayloadSource, built: BuiltPayload, provider: Provider) -> BuiltPayload:
    """Add the container of the previous call's code execution, if it belongs to the same account."""
    previous, noted = source.previous_call, source.previous_container
    if previous is None or (previous.provider, previous.account) != (provider.name, provider.account):
        return built
    in_loop = source.buffered[-1].kind is TurnKind.TOOL_RESPONSE
    container = choose_container(noted, datetime.now(UTC), in_loop=in_loop)
    if noted is None or container is None:
        return built
    return replace(built, payload=replace(built.payload, container=container), warnings=(*built.warnings, dict(noted)))


def _inline_summary(
    epoch: Epoch, static: StaticText, tools: Sequence[Tool]
) -> tuple[Epoch, StaticText, Segment | None]:
    """The epoch with the text of its signed summary as the last segment of its history."""
    segment = inline_summary(epoch)
    if segment is None:
        return epoch, static, None
    grown = replace(static, text=static.text + segment.text)
    changed = replace(
        epoch,
        segment_count=segment.position + 1,
        static_hash=_hash_text(grown.text),
        prefix_hash=hash_prefix(grown.text, tools),
        signed_summary=None,
    )
    return changed, grown, segment


def _plan_recovery(
    sent: PreparedPayload, failure: ProviderFailed
) -> Iterator[tuple[Epoch, StaticText, Segment | None]]:
    """Yield the epochs that leave out what was rejected, the smallest omission first.

    A signed summary becomes text in any case, because the provider does not say whether it was the cause.
    """
    source, static, segment = sent.source, sent.static, None
    old = source.epoch
    if old is None:
        return
    epoch = replace(
        old,
        number=old.number + 1,
        reason=EpochReason.SIGNATURES_REJECTED,
        base_text=static.text[: static.base_length],
    )
    if old.signed_summary is not None:
        epoch = replace(epoch, reason=EpochReason.SUMMARY_INLINED)
        epoch, static, segment = _inline_summary(epoch, static, source.assistant.definition.tools)
    if isinstance(failure, SummaryRejected):
        if segment is not None:
            yield epoch, static, segment
        return
    name = sent.provider.name
    newest = max((turn.seq for turn in source.buffered if turn.kind is TurnKind.MODEL_RESPONSE), default=0)
    before = old.rejected.get(name, NOTHING_REJECTED)
    for calls_through_seq in (before.calls_through_seq, newest):
        rejected = Rejected(signatures_through_seq=newest, calls_through_seq=calls_through_seq)
        yield replace(epoch, rejected={**old.rejected, name: rejected}), static, segment


def _answers_of(prepared: PreparedPayload) -> list[bytes]:
    return [message.data for message in prepared.built.payload.messages if message.role == "model"]


def _hash_text(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def plan_epoch(source: PayloadSource) -> EpochReason | None:
    """Return why a new epoch has to begin, or None if the current one continues.

    An open tool loop is finished in the epoch that it began in: its thinking and calls belong to that epoch's tools and
    texts, and a provider would reject them with others.
    """
    if source.epoch is None:
        return EpochReason.STARTED
    if source.buffered[-1].kind is TurnKind.TOOL_RESPONSE:
        return None
    if source.epoch.assistant_version != source.conversation.assistant_version:
        return EpochReason.ASSISTANT_CHANGED
    if source.epoch.arguments_hash != hash_arguments(source.conversation.args):
        return EpochReason.ARGUMENTS_CHANGED
    return None
