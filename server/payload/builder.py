"""From turns to a payload: the four layers in their order, as a value.

Same values in, same bytes out: `rebuild_payload` makes the request of a past call again from what was stored.

| order         | messages                                                                                       |
|---------------|------------------------------------------------------------------------------------------------|
| `layered`     | the dynamic layer, the buffered turns, the trigger                                             |
| `append_only` | the buffered turns, each input with the dynamic block that it was sent with; the trigger with  |
|               | its own                                                                                        |

The trigger is always last. Tools and the static text stand before all messages, wherever a vendor puts them. In the
append-only order a signed block may stand for the turns before the buffer, and is the first message then.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from server.caching.policy import WIDE_BLOCKS, Markers, apply_caching, place_markers
from server.conversation.assistant import Tool
from server.conversation.block import Blob, JsonValue
from server.conversation.epoch import Epoch, EpochReason
from server.conversation.errors import HistoryRuleBroken, Internal, RawBytesRemoved
from server.conversation.manifest import (
    build_manifest,
    decode_manifest,
    encode_tools,
    extend_manifest,
    find_prefix_break,
    share_signed_summary,
    without_continuation,
)
from server.conversation.payload import Layer, LayerOrder, ManifestEntry, Payload, PayloadMessage, split_static
from server.conversation.store import BufferedTurn, PayloadSource, RebuildSource
from server.conversation.turn import TurnKind
from server.payload.messages import PayloadSpec, dynamic_text, render_history
from server.payload.settings import read_order, read_settings
from server.payload.signatures import build_signature_scope, note_withheld
from server.providers.continuation import continue_payload, continued_attempts, fold_earlier
from server.providers.model_profile import ModelProfile, find_profile
from server.providers.provider import Provider

_CLOCK: Final = "current_datetime"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPayload:
    """A payload, and what has to be recorded of how it came about."""

    payload: Payload
    order: LayerOrder
    manifest: tuple[ManifestEntry, ...]
    repairs: tuple[Mapping[str, JsonValue], ...]
    """What had to be done to the history, see `server.payload.history`."""
    warnings: tuple[Mapping[str, JsonValue], ...]
    """Signatures that were withheld, a dynamic layer that waits, and where the prefix differs from the call before."""
    dynamic_sent: str | None
    """The dynamic layer as far as it is in this payload for the first time."""


def build_payload(
    source: PayloadSource,
    *,
    provider: Provider,
    profile: ModelProfile,
    static_text: str,
    epoch: Epoch,
    dynamic: str | None,
    blobs: Mapping[str, Blob],
) -> BuiltPayload:
    """The request that answers the newest turn.

    `epoch` as settled for it. `dynamic` as it is now; whether it is sent is decided here. Raises `ValidationFailed` for
    settings that cannot be read, and `HistoryRuleBroken` where the newest turn answers no call.
    """
    definition = source.assistant.definition
    spec = PayloadSpec(
        provider=provider,
        scope=build_signature_scope(provider.name, provider.account, profile, epoch),
        order=read_order(definition.settings, profile),
        settings=read_settings(definition.settings),
        tools=definition.tools,
        static_text=static_text,
        dynamic=dynamic,
        blobs=blobs,
        signed_summary=None if epoch.signed_summary is None else epoch.signed_summary.data,
    )
    return _build(source, spec, epoch)


def rebuild_payload(rebuild: RebuildSource, *, provider: Provider) -> BuiltPayload:
    """The payload of a past call. `provider` speaks for the vendor; its account does not matter."""
    source, start = rebuild.source, rebuild.call.start
    if source.epoch is None or source.static_text is None:
        raise Internal("A past call has no epoch.")
    profile = find_profile(start.provider, start.model)
    spec = PayloadSpec(
        provider=provider,
        scope=build_signature_scope(start.provider, start.account, profile, source.epoch),
        order=start.layer_order,
        settings=read_settings(source.assistant.definition.settings),
        tools=source.assistant.definition.tools,
        static_text=source.static_text,
        dynamic=start.dynamic.decode("utf-8", "surrogatepass"),
        blobs=source.blobs,
        signed_summary=None if source.epoch.signed_summary is None else source.epoch.signed_summary.data,
    )
    built = _build(source, spec, source.epoch)
    built = replace(built, payload=apply_caching(built.payload, start.caching))
    return _continue_past(built, rebuild, provider) if continued_attempts(start) else built


def _continue_past(built: BuiltPayload, rebuild: RebuildSource, provider: Provider) -> BuiltPayload:
    """The request of a past call that continued a paused answer, given that of the call which was paused.

    Raises `RawBytesRemoved`.
    """
    bodies = [body for body in rebuild.continued if body is not None]
    if not bodies or len(bodies) != len(rebuild.continued):
        raise RawBytesRemoved
    fold = provider.open_fold()
    fold_earlier(fold, bodies)
    native = fold.answer.native
    if native is None:
        raise Internal("A call continues an answer that had nothing to go on from.")
    payload = continue_payload(built.payload, native.data, continued_attempts(rebuild.call.start))
    return replace(built, payload=payload, manifest=extend_manifest(built.manifest, payload))


def hash_prefix(static_text: str, tools: Sequence[Tool]) -> bytes:
    """What stands before all messages, as one hash: an epoch's `prefix_hash`."""
    text = static_text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"%d:%s%s" % (len(text), text, encode_tools(tools))).digest()


def hash_chain(prefix_hash: bytes, epoch_number: int) -> bytes:
    """The `prefix_hash` of an epoch that brings a signed summary, and of those that go on with it. Nothing else has
    it.
    """
    return hashlib.sha256(b"%d:%s" % (epoch_number, prefix_hash)).digest()


def needs_dynamic(sent: str | None, now: str) -> bool:
    """Whether the dynamic layer has to be sent again within an exchange: not where only the clock has moved on.

    Text behind tool results makes models end their turn without a word, so it is sent only where it says something.
    """
    return sent is None or _without_clock(sent) != _without_clock(now)


def _build(source: PayloadSource, spec: PayloadSpec, epoch: Epoch) -> BuiltPayload:
    turns = source.buffered
    if not turns or turns[-1].kind is TurnKind.MODEL_RESPONSE:
        raise Internal("There is nothing to answer.")
    trigger = turns[-1]
    dynamic = _choose_dynamic(turns, spec)
    told = render_history(turns, spec, dynamic=dynamic)
    if not told.steps or told.steps[-1].seq != trigger.seq:
        raise HistoryRuleBroken("The newest turn answers no call.", rule="result_orphaned", seq=trigger.seq)
    messages = told.messages
    profile = spec.scope.profile
    markers = _place_markers(messages, turns, spec)
    payload = Payload(
        model=profile.model,
        static_text=spec.static_text,
        tools=spec.tools,
        messages=messages,
        settings=spec.settings,
        breakpoints=markers.messages,
        marks_tools=markers.tools,
    )
    manifest = build_manifest(payload, marks_static=profile.breakpoints > 0)
    return BuiltPayload(
        payload=payload,
        order=spec.order,
        manifest=manifest,
        repairs=told.repairs,
        warnings=(
            *note_withheld(told.withheld),
            *_note_postponed(turns, spec, dynamic),
            *_find_break(source, spec, manifest, epoch),
        ),
        dynamic_sent=dynamic,
    )


def _choose_dynamic(turns: Sequence[BufferedTurn], spec: PayloadSpec) -> str | None:
    """The dynamic block that this payload brings; none where there is nothing in it."""
    dynamic = spec.dynamic
    if not dynamic or not dynamic.strip():
        return None
    if spec.order is LayerOrder.LAYERED or turns[-1].kind is TurnKind.USER_TASK:
        return dynamic
    if not spec.scope.profile.takes_text_beside_results or _waits_for_server_tool(turns, spec.provider):
        return None
    return dynamic if needs_dynamic(_last_sent(turns), dynamic) else None


def _waits_for_server_tool(turns: Sequence[BufferedTurn], provider: Provider) -> bool:
    """Whether a call of the provider's own tool goes on with these results: then they have to stand alone."""
    answer = turns[-2].native if len(turns) > 1 else None
    if answer is None or not answer.data or answer.dialect != provider.name:
        return False
    return provider.settle_message(answer.data) != answer.data


def _note_postponed(
    turns: Sequence[BufferedTurn], spec: PayloadSpec, sent: str | None
) -> Iterator[Mapping[str, JsonValue]]:
    """That the dynamic layer has something new and waits for the next user task: it has no place beside results."""
    now = spec.dynamic
    if sent is None and now and now.strip() and needs_dynamic(_last_sent(turns), now):
        yield {"kind": "dynamic_postponed", "seq": turns[-1].seq}


def _last_sent(turns: Sequence[BufferedTurn]) -> str | None:
    """The newest dynamic block of the exchange that is open."""
    for turn in reversed(turns):
        if turn.dynamic:
            return dynamic_text(turn)
        if turn.kind is TurnKind.USER_TASK:
            break
    return None


def _without_clock(dynamic: str) -> JsonValue:
    try:
        value = json.loads(dynamic)
    except ValueError:
        return dynamic
    return {name: item for name, item in value.items() if name != _CLOCK} if isinstance(value, dict) else value


def _place_markers(messages: Sequence[PayloadMessage], turns: Sequence[BufferedTurn], spec: PayloadSpec) -> Markers:
    """None behind messages where a dynamic message before them changes with every request: nobody would read them."""
    before = turns[-2] if len(turns) > 1 else None
    changes = messages[0].layer is Layer.DYNAMIC
    return place_markers(
        0 if changes else len(messages),
        has_tools=bool(spec.tools),
        static_pieces=len(split_static(spec.static_text)),
        limit=spec.scope.profile.breakpoints,
        is_wide=before is not None and len(before.blocks or ()) > WIDE_BLOCKS,
    )


def _find_break(
    source: PayloadSource, spec: PayloadSpec, manifest: tuple[ManifestEntry, ...], epoch: Epoch
) -> Iterator[Mapping[str, JsonValue]]:
    """Against the call before, where it was of the same provider and order, behind the same prefix. A new signed
    summary comes with a new epoch and is announced by it, and so are signatures that are left out because they were
    rejected; within one epoch nothing of that must change.
    """
    answers = [turn for turn in source.buffered if turn.kind is TurnKind.MODEL_RESPONSE]
    if (
        not answers
        or answers[-1].provider != spec.scope.provider
        or source.previous_order is not spec.order
        or source.previous_prefix_hash != spec.scope.prefix_hash
    ):
        return
    previous = without_continuation(decode_manifest(source.previous_manifest))
    is_announced = epoch.reason is EpochReason.SIGNATURES_REJECTED or not share_signed_summary(previous, manifest)
    if source.previous_epoch != epoch.number and is_announced:
        return
    broken = find_prefix_break(previous, manifest, spec.order)
    if broken is not None:
        yield broken
