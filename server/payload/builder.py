"""Building a payload: the four layers of a request, in order, as a value.

A request consists of tools and static text, followed by messages. Its parts belong to four layers, from the most stable
to the most volatile: static (instructions and compacted history), dynamic (the state of the application now), buffered
(recent turns) and trigger (the turn to be answered). There are two orders of the messages:

| order         | messages                                                                                       |
|---------------|------------------------------------------------------------------------------------------------|
| `layered`     | the dynamic block, the buffered turns, the trigger; each user task with the time at which it   |
|               | was sent                                                                                       |
| `append_only` | the buffered turns, each input with the dynamic block that it was sent with; the trigger with  |
|               | its own                                                                                        |

In the layered order each request begins with all of the previous one until the dynamic block changes, and that stays
the same as long as only the clock moves (`server.payload.dynamic_clock`). In the append-only order each request begins
with all of the previous one, so the provider can cache everything, and thinking stays valid on models that bind it to
its prefix; a dynamic block is kept in its input from then on. With a signed summary, that is the first message.

A payload is built in this order: choose the dynamic block, repair the history and render it as messages (`messages`),
place the cache breakpoints, and list all blocks with their hashes in a manifest. The manifest is compared with that of
the previous call: a block that changed although it should not have is recorded as a warning (`prefix_break`), because
it invalidates the cache.

Building is pure: the same values give the same bytes. `rebuild_payload` builds the request of a past call from the
stored turns and the call's stored dynamic block, times, order and caching, and verification compares its hash with the
stored one.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from server.caching.policy import WIDE_BLOCKS, Breakpoints, apply_caching, place_breakpoints
from server.conversation.assistant import Tool
from server.conversation.block import Blob, JsonValue
from server.conversation.epoch import Epoch, EpochReason
from server.conversation.errors import HistoryRuleBroken, Internal, RawBytesRemoved
from server.conversation.manifest import (
    build_manifest,
    encode_tools,
    extend_manifest,
    find_prefix_break,
    share_signed_summary,
    without_continuation,
)
from server.conversation.payload import (
    JoinedMessages,
    Layer,
    LayerOrder,
    ManifestEntry,
    Payload,
    PayloadMessage,
    split_static,
)
from server.conversation.store import BufferedTurn, PayloadSource, RebuildSource
from server.conversation.turn import TurnKind
from server.payload.dynamic_clock import CLOCK, EXACT, DynamicClock, decode_clock
from server.payload.messages import PayloadSpec, SealedHistory, dynamic_text, render_history
from server.payload.settings import read_order, read_settings
from server.payload.signatures import build_signature_scope, record_withheld
from server.providers.continuation import continue_payload, continued_attempts, fold_earlier
from server.providers.model_profile import find_profile
from server.providers.provider import Provider


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPayload:
    """A payload, and what is recorded about it."""

    payload: Payload
    order: LayerOrder
    manifest: tuple[ManifestEntry, ...]
    repairs: tuple[Mapping[str, JsonValue], ...]
    """Repairs of the history, see `server.payload.history`."""
    warnings: tuple[Mapping[str, JsonValue], ...]
    """Withheld signatures, a postponed dynamic layer, and a prefix that differs from the previous call's."""
    dynamic_sent: str | None
    """The dynamic block of this payload; in the append-only order only a new one."""
    clock: DynamicClock
    """The times in it."""
    sealed: SealedHistory
    """The part of the history that later payloads of the epoch repeat."""


def build_payload(
    source: PayloadSource,
    *,
    provider: Provider,
    static_text: str,
    epoch: Epoch,
    dynamic: str | None,
    blobs: Mapping[str, Blob],
    clock: DynamicClock = EXACT,
    sealed: SealedHistory | None = None,
) -> BuiltPayload:
    """Build the request that answers the newest turn.

    `epoch` is the epoch of the call. `dynamic` is the present dynamic layer; whether it is sent is decided here.
    `clock` has the times of the dynamic layer, in the layered order only.
    `sealed` is that of an earlier payload of the conversation, which saves rendering its turns again. Raises
    `ValidationFailed` for invalid settings, and `HistoryRuleBroken` if the newest turn is a tool response to no call.
    """
    definition = source.assistant.definition
    profile = find_profile(provider.name, definition.model)
    spec = PayloadSpec(
        provider=provider,
        epoch=epoch.number,
        scope=build_signature_scope(provider.name, provider.account, profile, epoch),
        order=read_order(definition.settings, profile),
        settings=read_settings(definition.settings),
        tools=definition.tools,
        static_text=static_text,
        dynamic=dynamic,
        blobs=blobs,
        signed_summary=None if epoch.signed_summary is None else epoch.signed_summary.data,
    )
    return _build(source, spec, epoch, clock, sealed)


def rebuild_payload(rebuild: RebuildSource, *, provider: Provider) -> BuiltPayload:
    """Build the payload of a past call. Only the vendor of `provider` matters, not its account."""
    source, start = rebuild.source, rebuild.call.start
    if source.epoch is None or source.static_text is None:
        raise Internal("A past call has no epoch.")
    profile = find_profile(start.provider, start.model)
    spec = PayloadSpec(
        provider=provider,
        epoch=source.epoch.number,
        scope=build_signature_scope(start.provider, start.account, profile, source.epoch),
        order=start.layer_order,
        settings=read_settings(source.assistant.definition.settings),
        tools=source.assistant.definition.tools,
        static_text=source.static_text,
        dynamic=start.dynamic.decode("utf-8", "surrogatepass"),
        blobs=source.blobs,
        signed_summary=None if source.epoch.signed_summary is None else source.epoch.signed_summary.data,
    )
    built = _build(source, spec, source.epoch, decode_clock(start.caching))
    built = replace(built, payload=apply_caching(built.payload, start.caching))
    return _continue_past(built, rebuild, provider) if continued_attempts(start) else built


def _continue_past(built: BuiltPayload, rebuild: RebuildSource, provider: Provider) -> BuiltPayload:
    """Extend the request of a paused call to that of the call that continued it. Raises `RawBytesRemoved`."""
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
    """Hash everything before the messages: the `prefix_hash` of an epoch."""
    text = static_text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"%d:%s%s" % (len(text), text, encode_tools(tools))).digest()


def hash_chain(prefix_hash: bytes, epoch_number: int) -> bytes:
    """Return the `prefix_hash` of an epoch that introduces a signed summary. It is unique to that epoch and those that
    keep the summary.
    """
    return hashlib.sha256(b"%d:%s" % (epoch_number, prefix_hash)).digest()


def needs_dynamic(sent: str | None, now: str) -> bool:
    """Return whether the dynamic layer has to be sent again within an exchange: not if only the clock has changed.

    Text after tool results makes models end their turn without output, so it is sent only if it has news.
    """
    return sent is None or _without_clock(sent) != _without_clock(now)


def _build(
    source: PayloadSource,
    spec: PayloadSpec,
    epoch: Epoch,
    clock: DynamicClock,
    sealed: SealedHistory | None = None,
) -> BuiltPayload:
    turns = source.buffered
    if not turns or turns[-1].kind is TurnKind.MODEL_RESPONSE:
        raise Internal("There is nothing to answer.")
    trigger = turns[-1]
    dynamic = _choose_dynamic(turns, spec)
    is_layered = spec.order is LayerOrder.LAYERED
    rendered = render_history(turns, spec, dynamic=clock.input_time if is_layered else dynamic, sealed=sealed)
    if rendered.last_seq != trigger.seq:
        raise HistoryRuleBroken("The newest turn answers no call.", rule="result_orphaned", seq=trigger.seq)
    messages = rendered.messages
    first = 0 if spec.signed_summary is None else 1
    if is_layered and dynamic is not None:
        message = PayloadMessage(layer=Layer.DYNAMIC, data=spec.provider.dynamic_message(dynamic), role="user")
        messages = (*messages[:first], message, *messages[first:])
        first += 1
    profile = spec.scope.profile
    breakpoints = _place_breakpoints(messages, turns, spec, clock)
    payload = Payload(
        model=profile.model,
        static_text=spec.static_text,
        tools=spec.tools,
        messages=messages,
        joined=_joined(rendered.sealed, first),
        settings=spec.settings,
        breakpoints=breakpoints.messages,
        marks_tools=breakpoints.tools,
    )
    manifest = build_manifest(payload, marks_static=profile.breakpoints > 0)
    return BuiltPayload(
        payload=payload,
        order=spec.order,
        manifest=manifest,
        repairs=rendered.repairs,
        warnings=(
            *record_withheld(rendered.withheld),
            *_record_postponed(turns, spec, dynamic),
            *_record_prefix_break(source, spec, manifest, epoch),
        ),
        dynamic_sent=dynamic,
        clock=clock,
        sealed=rendered.sealed,
    )


def _joined(sealed: SealedHistory, first: int) -> JoinedMessages | None:
    if not sealed.joined_count:
        return None
    return JoinedMessages(first=first, count=sealed.joined_count, data=sealed.joined, entries=sealed.entries)


def _choose_dynamic(turns: Sequence[BufferedTurn], spec: PayloadSpec) -> str | None:
    """Return the dynamic block that this payload adds; None if it is empty."""
    dynamic = spec.dynamic
    if not dynamic or not dynamic.strip():
        return None
    if spec.order is LayerOrder.LAYERED or turns[-1].kind is TurnKind.USER_TASK:
        return dynamic
    if not spec.scope.profile.takes_text_beside_results or _is_server_call_pending(turns, spec.provider):
        return None
    return dynamic if needs_dynamic(_last_sent(turns), dynamic) else None


def _is_server_call_pending(turns: Sequence[BufferedTurn], provider: Provider) -> bool:
    """Return whether a call of the provider's own tool continues with these results. Then no text may be
    beside them.
    """
    answer = turns[-2].native if len(turns) > 1 else None
    if answer is None or not answer.data or answer.dialect != provider.name:
        return False
    return provider.settle_message(answer.data) != answer.data


def _record_postponed(
    turns: Sequence[BufferedTurn], spec: PayloadSpec, sent: str | None
) -> Iterator[Mapping[str, JsonValue]]:
    """Record that a changed dynamic layer is postponed until the next user task, because it cannot be sent beside
    results.
    """
    now = spec.dynamic
    if sent is None and now and now.strip() and needs_dynamic(_last_sent(turns), now):
        yield {"kind": "dynamic_postponed", "seq": turns[-1].seq}


def _last_sent(turns: Sequence[BufferedTurn]) -> str | None:
    """The newest dynamic block of the open exchange."""
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
    return {name: item for name, item in value.items() if name != CLOCK} if isinstance(value, dict) else value


def _place_breakpoints(
    messages: Sequence[PayloadMessage], turns: Sequence[BufferedTurn], spec: PayloadSpec, clock: DynamicClock
) -> Breakpoints:
    """Place no breakpoints after messages that follow a dynamic message which changes with every request."""
    before = turns[-2] if len(turns) > 1 else None
    is_volatile = messages[0].layer is Layer.DYNAMIC and clock.is_volatile
    return place_breakpoints(
        0 if is_volatile else len(messages),
        has_tools=bool(spec.tools),
        static_piece_count=len(split_static(spec.static_text)),
        limit=spec.scope.profile.breakpoints,
        is_wide=before is not None and len(before.blocks or ()) > WIDE_BLOCKS,
    )


def _record_prefix_break(
    source: PayloadSource, spec: PayloadSpec, manifest: tuple[ManifestEntry, ...], epoch: Epoch
) -> Iterator[Mapping[str, JsonValue]]:
    """Compare with the previous call if it had the same provider, order and prefix.

    A new signed summary, and signatures that are left out after a rejection, begin a new epoch and are expected
    changes. Within one epoch no block may change.
    """
    answer = next((turn for turn in reversed(source.buffered) if turn.kind is TurnKind.MODEL_RESPONSE), None)
    if (
        answer is None
        or answer.provider != spec.scope.provider
        or source.previous_order is not spec.order
        or source.previous_prefix_hash != spec.scope.prefix_hash
    ):
        return
    previous = without_continuation(source.previous_manifest)
    is_expected = epoch.reason is EpochReason.SIGNATURES_REJECTED or not share_signed_summary(previous, manifest)
    if source.previous_epoch != epoch.number and is_expected:
        return
    broken = find_prefix_break(previous, manifest, spec.order)
    if broken is not None:
        yield broken
