"""From turns to a payload: the four layers in their order, as a value.

Same values in, same bytes out: `rebuild_payload` makes the request of a past call again from what was stored.

| order         | messages                                                                                       |
|---------------|------------------------------------------------------------------------------------------------|
| `layered`     | the dynamic layer, the buffered turns, the trigger                                             |
| `append_only` | the buffered turns, each input with the dynamic block that it was sent with; the trigger with  |
|               | its own                                                                                        |

The trigger is always last. Tools and the static text stand before all messages, wherever a vendor puts them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from server.assistant import Tool
from server.block import Blob, Block, JsonValue, TextBlock, ToolCallBlock
from server.cache_policy import WIDE_BLOCKS, Markers, apply_caching, place_markers
from server.call_settings import read_order, read_settings
from server.errors import HistoryRuleBroken, Internal
from server.history import Step, read_steps, repair
from server.manifest import build_manifest, decode_manifest, encode_tools, find_prefix_break
from server.model_profile import ModelProfile, find_profile
from server.payload import CallSettings, Layer, LayerOrder, ManifestEntry, Payload, PayloadMessage
from server.provider import Provider
from server.static_pieces import split_static
from server.store import BufferedTurn, PayloadSource, RebuildSource
from server.turn import TurnKind
from server.withholding import Signer, Withheld, find_withheld, note_withheld

NO_TASK: Final = "(no message)"
"""What the user is taken to have said where an imported history has an answer to nothing."""
_CLOCK: Final = "current_datetime"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPayload:
    """A payload, and what has to be recorded of how it came about."""

    payload: Payload
    order: LayerOrder
    manifest: tuple[ManifestEntry, ...]
    repairs: tuple[Mapping[str, JsonValue], ...]
    """What had to be done to the history, see `server.history`."""
    warnings: tuple[Mapping[str, JsonValue], ...]
    """Signatures that were withheld, and where the prefix differs from that of the call before."""
    dynamic_sent: str | None
    """The dynamic layer as far as it is in this payload for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What a payload is made with, beside its turns."""

    provider: Provider
    signer: Signer
    order: LayerOrder
    settings: CallSettings
    tools: tuple[Tool, ...]
    static_text: str
    dynamic: str | None
    blobs: Mapping[str, Blob]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """The answers of the model as they go back: without the ones of which nothing is left."""

    answers: Mapping[int, bytes]
    withheld: Mapping[int, Withheld]
    repairs: tuple[Mapping[str, JsonValue], ...]


def build_payload(
    source: PayloadSource,
    *,
    provider: Provider,
    profile: ModelProfile,
    static_text: str,
    prefix_hash: bytes,
    dynamic: str | None,
    blobs: Mapping[str, Blob],
) -> BuiltPayload:
    """The request that answers the newest turn.

    `dynamic` as it is now; whether it is sent is decided here. Raises `ValidationFailed` for settings that cannot be
    read, and `HistoryRuleBroken` where the newest turn answers no call.
    """
    definition = source.assistant.definition
    recipe = _Recipe(
        provider=provider,
        signer=Signer(provider=provider.name, account=provider.account, profile=profile, prefix_hash=prefix_hash),
        order=read_order(definition.settings, profile),
        settings=read_settings(definition.settings),
        tools=definition.tools,
        static_text=static_text,
        dynamic=dynamic,
        blobs=blobs,
    )
    return _build(source, recipe)


def rebuild_payload(rebuild: RebuildSource, *, provider: Provider) -> BuiltPayload:
    """The payload of a past call. `provider` speaks for the vendor; its account does not matter."""
    source, start = rebuild.source, rebuild.call.start
    if source.epoch is None or source.static_text is None:
        raise Internal("A past call has no epoch.")
    profile = find_profile(start.provider, start.model)
    signer = Signer(
        provider=start.provider, account=start.account, profile=profile, prefix_hash=source.epoch.prefix_hash
    )
    recipe = _Recipe(
        provider=provider,
        signer=signer,
        order=start.layer_order,
        settings=read_settings(source.assistant.definition.settings),
        tools=source.assistant.definition.tools,
        static_text=source.static_text,
        dynamic=start.dynamic.decode("utf-8", "surrogatepass"),
        blobs=source.blobs,
    )
    built = _build(source, recipe)
    return replace(built, payload=apply_caching(built.payload, start.caching))


def hash_prefix(static_text: str, tools: Sequence[Tool]) -> bytes:
    """What stands before all messages, as one hash: an epoch's `prefix_hash`."""
    text = static_text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"%d:%s%s" % (len(text), text, encode_tools(tools))).digest()


def needs_dynamic(sent: str | None, now: str) -> bool:
    """Whether the dynamic layer has to be sent again within an exchange: not where only the clock has moved on.

    Text behind tool results makes models end their turn without a word, so it is sent only where it says something.
    """
    return sent is None or _without_clock(sent) != _without_clock(now)


def _build(source: PayloadSource, recipe: _Recipe) -> BuiltPayload:
    turns = source.buffered
    if not turns or turns[-1].kind is TurnKind.MODEL_RESPONSE:
        raise Internal("There is nothing to answer.")
    trigger = turns[-1]
    past = _render_answers(turns, recipe)
    said = [turn for turn in turns if turn.kind is not TurnKind.MODEL_RESPONSE or turn.seq in past.answers]
    repaired = repair(read_steps(said))
    if not repaired.steps or repaired.steps[-1].seq != trigger.seq:
        raise HistoryRuleBroken("The newest turn answers no call.", rule="result_orphaned", seq=trigger.seq)
    dynamic = _choose_dynamic(turns, recipe)
    messages = tuple(_render(repaired.steps, turns, past, recipe, dynamic))
    profile = recipe.signer.profile
    markers = _place_markers(messages, turns, recipe)
    payload = Payload(
        model=profile.model,
        static_text=recipe.static_text,
        tools=recipe.tools,
        messages=messages,
        settings=recipe.settings,
        breakpoints=markers.messages,
        marks_tools=markers.tools,
    )
    manifest = build_manifest(payload, marks_static=profile.breakpoints > 0)
    return BuiltPayload(
        payload=payload,
        order=recipe.order,
        manifest=manifest,
        repairs=(*past.repairs, *repaired.repairs),
        warnings=(*note_withheld(past.withheld), *_find_break(source, recipe, manifest)),
        dynamic_sent=dynamic,
    )


def _render_answers(turns: Sequence[BufferedTurn], recipe: _Recipe) -> _Past:
    """All answers in the words of the vendor that is asked. What is withheld counts where it made a difference."""
    reasons = find_withheld(turns, recipe.signer)
    answers: dict[int, bytes] = {}
    withheld: dict[int, Withheld] = {}
    repairs: list[Mapping[str, JsonValue]] = []
    for turn in turns:
        if turn.kind is not TurnKind.MODEL_RESPONSE:
            continue
        reason = reasons.get(turn.seq)
        data = _render_answer(turn, reason, recipe.provider)
        if not data:
            repairs.append({"kind": "answer_left_out", "seq": turn.seq, "ids": []})
        else:
            answers[turn.seq] = data
        if reason is not None and _lost_signatures(turn, data, reason):
            withheld[turn.seq] = reason
    return _Past(answers=answers, withheld=withheld, repairs=tuple(repairs))


def _render_answer(turn: BufferedTurn, reason: Withheld | None, provider: Provider) -> bytes | None:
    match reason:
        case None:
            return turn.native.data
        case Withheld.PROVIDER:
            return provider.foreign_message(_blocks_of(turn))
        case _:
            return provider.unsigned_message(turn.native.data) if turn.native.data else None


def _lost_signatures(turn: BufferedTurn, data: bytes | None, reason: Withheld) -> bool:
    if reason is Withheld.PROVIDER:
        return any(getattr(block, "signature", None) is not None for block in _blocks_of(turn))
    return bool(turn.native.data) and data != turn.native.data


def _blocks_of(turn: BufferedTurn) -> tuple[Block, ...]:
    if turn.blocks is None:
        raise Internal("A turn of another provider came without its blocks.")
    return turn.blocks


def _choose_dynamic(turns: Sequence[BufferedTurn], recipe: _Recipe) -> str | None:
    """The dynamic block that this payload brings; none where there is nothing in it."""
    dynamic = recipe.dynamic
    if not dynamic or not dynamic.strip():
        return None
    if recipe.order is LayerOrder.LAYERED or turns[-1].kind is TurnKind.USER_TASK:
        return dynamic
    return dynamic if needs_dynamic(_last_sent(turns), dynamic) else None


def _last_sent(turns: Sequence[BufferedTurn]) -> str | None:
    """The newest dynamic block of the exchange that is open."""
    for turn in reversed(turns):
        if turn.dynamic:
            return _dynamic_text(turn)
        if turn.kind is TurnKind.USER_TASK:
            break
    return None


def _dynamic_text(turn: BufferedTurn | None) -> str | None:
    return None if turn is None or not turn.dynamic else turn.dynamic.decode("utf-8", "surrogatepass")


def _without_clock(dynamic: str) -> JsonValue:
    try:
        value = json.loads(dynamic)
    except ValueError:
        return dynamic
    return {name: item for name, item in value.items() if name != _CLOCK} if isinstance(value, dict) else value


def _render(
    steps: Sequence[Step], turns: Sequence[BufferedTurn], past: _Past, recipe: _Recipe, dynamic: str | None
) -> Iterator[PayloadMessage]:
    """The messages in order. A repaired history ends with the trigger, so they do."""
    provider, trigger = recipe.provider, turns[-1]
    by_seq = {turn.seq: turn for turn in turns}
    blocks_sent: dict[int, str | None] = {}
    if recipe.order is LayerOrder.APPEND_ONLY:
        pairs = zip(turns, [*turns[1:], None], strict=True)
        blocks_sent = {turn.seq: _dynamic_text(following) for turn, following in pairs}
        blocks_sent[trigger.seq] = dynamic
    elif dynamic is not None:
        yield PayloadMessage(layer=Layer.DYNAMIC, data=provider.dynamic_message(dynamic), role="user")
    calls: tuple[ToolCallBlock, ...] = ()
    for step in steps:
        turn = None if step.seq is None else by_seq[step.seq]
        inside = None if step.seq is None else blocks_sent.get(step.seq)
        match step.kind:
            case TurnKind.MODEL_RESPONSE:
                calls, inside = step.calls, None
                data, role = _render_model(step, turn, past, provider), "model"
            case TurnKind.TOOL_RESPONSE:
                data, role = provider.tool_message(step.results, calls, inside), "tool"
            case TurnKind.USER_TASK:
                said = (TextBlock(text=NO_TASK),) if turn is None else _blocks_of(turn)
                data, role = provider.user_message(said, recipe.blobs, inside), "user"
        layer = Layer.TRIGGER if turn is trigger else Layer.BUFFERED
        yield PayloadMessage(layer=layer, data=data, role=role, seq=step.seq, dynamic=inside)


def _render_model(step: Step, turn: BufferedTurn | None, past: _Past, provider: Provider) -> bytes:
    if turn is None:
        raise Internal("A repair never makes an answer.")
    if not step.renamed:
        return past.answers[turn.seq]
    calls = iter(step.calls)
    blocks = [next(calls) if isinstance(block, ToolCallBlock) else block for block in _blocks_of(turn)]
    renamed = provider.foreign_message(blocks)
    if renamed is None:
        raise Internal("An answer with calls cannot be empty.")
    return renamed


def _place_markers(messages: Sequence[PayloadMessage], turns: Sequence[BufferedTurn], recipe: _Recipe) -> Markers:
    """None behind messages where a dynamic message before them changes with every request: nobody would read them."""
    before = turns[-2] if len(turns) > 1 else None
    changes = messages[0].layer is Layer.DYNAMIC
    return place_markers(
        0 if changes else len(messages),
        has_tools=bool(recipe.tools),
        static_pieces=len(split_static(recipe.static_text)),
        limit=recipe.signer.profile.breakpoints,
        is_wide=before is not None and len(before.blocks or ()) > WIDE_BLOCKS,
    )


def _find_break(
    source: PayloadSource, recipe: _Recipe, manifest: tuple[ManifestEntry, ...]
) -> Iterator[Mapping[str, JsonValue]]:
    """Against the call before, where it was of the same provider and order, behind the same prefix."""
    answers = [turn for turn in source.buffered if turn.kind is TurnKind.MODEL_RESPONSE]
    if (
        not answers
        or answers[-1].provider != recipe.signer.provider
        or source.previous_order is not recipe.order
        or source.previous_prefix_hash != recipe.signer.prefix_hash
    ):
        return
    broken = find_prefix_break(decode_manifest(source.previous_manifest), manifest, recipe.order)
    if broken is not None:
        yield broken
