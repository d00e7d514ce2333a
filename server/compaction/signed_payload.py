"""The request for a signed summary: the messages of a conversation up to a cut, as they go out in a turn.

The provider signs what it was shown. So the messages are the very ones that were sent, thinking and all, behind the
same static text and tools, and those that stay behind the cut must be the same afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from server.caching.policy import SHORT_SECONDS
from server.conversation.block import Blob
from server.conversation.errors import Internal
from server.conversation.payload import LayerOrder, Payload
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import TurnKind
from server.payload.messages import PayloadSpec, outline_history, render_history
from server.payload.settings import read_settings
from server.payload.withholding import build_signature_scope
from server.providers.model_profile import find_profile
from server.providers.provider import Provider

SIGNED_COMPACTION: Final = "signed_compaction"
"""The `kind` of the note that is kept with the call."""


def find_cut(source: PayloadSource, *, provider: Provider, account: str, last_seq: int) -> int | None:
    """The last turn to be summed up: `last_seq`, or an earlier end of an exchange where it cannot be that one.

    What is summed up has to end with the model, and what stays must not depend on it: the provider would find other
    messages behind the block than there were before. None where there is no such place.
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
    """The request, without any wish for the cache. The same values give the same bytes."""
    spec = _spec(source, provider, account, static_text, blobs)
    told = render_history([turn for turn in source.buffered if turn.seq <= last_seq], spec)
    return Payload(
        model=source.assistant.definition.model,
        static_text=static_text,
        tools=spec.tools,
        messages=told.messages,
        settings=spec.settings,
        sums_up=True,
    )


def ask_for_cached(payload: Payload, source: PayloadSource, account: str, now: datetime) -> Payload:
    """With a marker behind the last message, where the provider may still have it in its cache. Elsewhere a marker
    would only make it write what nobody reads again.
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
    """The ends of exchanges, from this one back."""
    tasks = [turn.seq for turn in turns if turn.kind is TurnKind.USER_TASK and turn.seq <= last_seq]
    yield last_seq
    for seq in reversed(tasks[1:]):
        yield seq - 1


def _spec(
    source: PayloadSource, provider: Provider, account: str, static_text: str, blobs: Mapping[str, Blob]
) -> PayloadSpec:
    definition, epoch = source.assistant.definition, source.epoch
    if epoch is None:
        raise Internal("Before the first payload there is nothing to sum up.")
    return PayloadSpec(
        provider=provider,
        scope=build_signature_scope(provider.name, account, find_profile(provider.name, definition.model), epoch),
        order=LayerOrder.APPEND_ONLY,
        # The limit is that of an answer, and a summary that is cut off is of no use.
        settings=replace(read_settings(definition.settings), max_output_tokens=None, stop_sequences=()),
        tools=definition.tools,
        static_text=static_text,
        dynamic=None,
        blobs=blobs,
        signed_summary=None if epoch.signed_summary is None else epoch.signed_summary.data,
    )
