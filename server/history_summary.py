"""Summing up the oldest segments, when the history has outgrown the model's window.

The model is asked behind the very prefix that it has just been talking behind, so the provider reads it from its cache,
and only the request itself is new. The call is kept like any other, with its bytes, usage and cost. It belongs to no
turn: its number is the epoch's that it was made in, below zero. A process that dies over it finds its answer again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from server.block import Block, TextBlock, ToolCallBlock
from server.call import Call, CallEnd, CallStart
from server.call_records import cost_of
from server.call_settings import read_order, read_settings
from server.epoch import Segment
from server.errors import Internal, ProviderEmpty, ProviderNotConfigured
from server.manifest import build_manifest, encode_manifest
from server.model_profile import find_profile
from server.payload import Layer, ManifestEntry, Payload, PayloadMessage
from server.provider import Provider, ProviderAnswer, ProviderStream
from server.provider_calls import PatientCall
from server.renderer import Renderer
from server.retry_policy import RetryPolicy
from server.store import History, Store
from server.turn import StopReason

_WORDS_PER_TOKEN: Final = 0.5
"""Asked for rather too few, since a summary that is cut off is of no use."""
_OK: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRequest:
    """What is to be summed up."""

    history: History
    """With its texts."""
    static_text: str
    count: int
    """How many of the oldest segments."""

    @property
    def segments(self) -> Sequence[Segment]:
        return self.history.segments[: self.count]

    @property
    def epoch(self) -> int:
        """The one that it is made in."""
        return 0 if self.history.source.epoch is None else self.history.source.epoch.number


class Summariser:
    """Asks the assistant's own model."""

    def __init__(
        self,
        store: Store,
        renderer: Renderer,
        providers: Mapping[str, Provider],
        *,
        retry_policy: RetryPolicy | None = None,
        limit_tokens: int = 4_000,
    ) -> None:
        self._store = store
        self._renderer = renderer
        self._providers = providers
        self._retry_policy = retry_policy or RetryPolicy()
        self._limit_tokens = limit_tokens

    def choose(self, segments: Sequence[Segment]) -> int:
        """How many of the oldest segments are worth a summary."""
        return choose_summarised(segments, self._limit_tokens)

    async def summarise(self, tenant_id: str, request: SummaryRequest) -> str:
        """The summary. Raises `ProviderFailed`, also where the model said something that is no summary."""
        definition = request.history.source.assistant.definition
        provider = self._providers.get(definition.provider)
        if provider is None:
            raise ProviderNotConfigured(f"This process has no key for {definition.provider}.")
        payload = self._build(provider, request)
        conversation_id = request.history.source.conversation.id
        earlier = await self._store.list_calls(tenant_id, conversation_id, -request.epoch)
        known = _find_summary(provider, earlier, payload)
        if known is not None:
            return known
        call = PatientCall(provider, payload, self._retry_policy)
        try:
            async with aclosing(call.events()) as events:
                async for _ in events:
                    pass
        finally:
            await self._record(tenant_id, request, payload, call, earlier_count=len(earlier))
        return _read_summary(call.stream.answer)

    def _build(self, provider: Provider, request: SummaryRequest) -> Payload:
        definition = request.history.source.assistant.definition
        words = round(self._limit_tokens * _WORDS_PER_TOKEN)
        task = self._renderer.render_summary_request(
            request.segments[0].first_seq, request.segments[-1].last_seq, words
        )
        data = provider.user_message((TextBlock(text=task),), {})
        return Payload(
            model=definition.model,
            static_text=request.static_text,
            tools=definition.tools,
            messages=(PayloadMessage(layer=Layer.TRIGGER, data=data, role="user"),),
            settings=replace(
                read_settings(definition.settings), max_output_tokens=2 * self._limit_tokens, stop_sequences=()
            ),
        )

    async def _record(
        self, tenant_id: str, request: SummaryRequest, payload: Payload, call: PatientCall, *, earlier_count: int
    ) -> None:
        """Every attempt. Those of a process that died before keep their numbers."""
        codes = [*call.failure_codes, None]
        for place, stream in enumerate(call.attempts):
            start = _start_of(request, payload, stream, self._account_of(request), earlier_count + place + 1)
            end = _end_of(payload, stream, codes[place] if place < len(codes) else None)
            await self._store.record_call(
                tenant_id,
                request.history.source.conversation.id,
                Call(turn_seq=-request.epoch, start=start, end=end),
            )

    def _account_of(self, request: SummaryRequest) -> str:
        return self._providers[request.history.source.assistant.definition.provider].account


def choose_summarised(segments: Sequence[Segment], limit_tokens: int) -> int:
    """How many of the oldest segments to sum up: half of the history, so that it is not soon to do again.

    None of them where they are so short that a summary would hardly be shorter: what is in the window then is something
    else, and summing up again and again would only cost.
    """
    least = max(sum(segment.token_count for segment in segments) / 2, 2 * limit_tokens)
    total = 0
    for count, segment in enumerate(segments, start=1):
        total += segment.token_count
        if total >= least:
            return count
    return 0


def _find_summary(provider: Provider, earlier: Sequence[Call], payload: Payload) -> str | None:
    """What a call for the same payload has given before: it is paid for."""
    manifest = list(encode_manifest(_manifest_of(payload, provider.name)))
    for call in reversed(earlier):
        end = call.end
        if end is None or end.status != _OK or not end.raw_response or list(call.start.manifest) != manifest:
            continue
        answer = provider.fold_body(end.raw_response)
        if _is_summary(answer):
            return _text_of(answer.blocks)
    return None


def _read_summary(answer: ProviderAnswer) -> str:
    """Raises `ProviderEmpty` for an answer that is none."""
    if not _is_summary(answer):
        raise ProviderEmpty("The model gave no summary.", stop_reason=str(answer.stop_reason))
    return _text_of(answer.blocks)


def _is_summary(answer: ProviderAnswer) -> bool:
    """Not where it was cut off or refused, is a tool call, or nothing at all."""
    calls = any(isinstance(block, ToolCallBlock) for block in answer.blocks)
    return answer.stop_reason is StopReason.END_TURN and not calls and bool(_text_of(answer.blocks))


def _text_of(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock)).strip()


def _manifest_of(payload: Payload, provider: str) -> tuple[ManifestEntry, ...]:
    profile = find_profile(provider, payload.model)
    return build_manifest(payload, marks_static=profile.breakpoints > 0)


def _start_of(
    request: SummaryRequest, payload: Payload, stream: ProviderStream, account: str, attempt: int
) -> CallStart:
    definition = request.history.source.assistant.definition
    if request.history.source.epoch is None:
        raise Internal("There is no history to sum up.")
    return CallStart(
        attempt=attempt,
        provider=definition.provider,
        model=definition.model,
        account=account,
        epoch=request.epoch,
        started_at=stream.record.started_at,
        manifest=encode_manifest(_manifest_of(payload, definition.provider)),
        request_hash=hashlib.sha256(stream.record.request_body).digest(),
        layer_order=read_order(definition.settings, find_profile(definition.provider, definition.model)),
        warnings=(*stream.warnings, {"kind": "summary", "segments": request.count}),
    )


def _end_of(payload: Payload, stream: ProviderStream, error_code: str | None) -> CallEnd:
    record, answer = stream.record, stream.answer
    return CallEnd(
        ended_at=record.ended_at or datetime.now(UTC),
        first_byte_at=record.first_byte_at,
        status=record.status,
        headers=record.headers,
        raw_response=record.body,
        usage=answer.usage,
        usage_reported=answer.usage_reported,
        cost_usd=cost_of(payload.model, record.started_at, answer),
        error_code=error_code,
    )
