"""From turns to messages: the repaired history in the format of the vendor.

In the append-only order each input contains the dynamic block that it was sent with, in the layered order each user
task the time at which it was sent. The signed summary of an epoch, if any, is the first message.

The message of a turn depends on the turns before it and on at most two turns after it. So the messages of all but the
newest turns are final: they are the same in every later request of the epoch. `render_history` returns them as a
`SealedHistory`, and continues one that is passed in. A request then costs as much as its new turns, and the result is
the same as that for the whole history.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from server.conversation.assistant import Tool
from server.conversation.block import Blob, Block, JsonValue, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import Internal
from server.conversation.exact_json import dumps_exact
from server.conversation.manifest import list_message_entries
from server.conversation.payload import CallSettings, Layer, LayerOrder, ManifestEntry, PayloadMessage
from server.conversation.store import BufferedTurn
from server.conversation.turn import TurnKind
from server.payload.history import START, RepairState, Step, read_steps, repair
from server.payload.signatures import (
    NOTHING_WITHHELD,
    SignatureScope,
    Withheld,
    WithheldReason,
    find_current_family,
    find_withheld,
)
from server.providers.provider import Provider

NO_TASK: Final = "(no message)"
"""The text of a user task that is inserted before a model response to nothing, in an imported history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """What a payload is built from, besides its turns."""

    provider: Provider
    epoch: int
    scope: SignatureScope
    order: LayerOrder
    settings: CallSettings
    tools: tuple[Tool, ...]
    static_text: str
    dynamic: str | None
    blobs: Mapping[str, Blob]
    signed_summary: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryKey:
    """What a history depends on besides its turns."""

    epoch: int
    scope: SignatureScope
    family: str
    order: LayerOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedHistory:
    """The rendered turns that no later turn changes. A request continues after them."""

    key: HistoryKey
    first_seq: int
    """The first turn of the buffer."""
    turn_count: int = 0
    messages: tuple[PayloadMessage, ...] = ()
    repairs: tuple[tuple[Mapping[str, JsonValue], ...], ...] = ((), (), ())
    """Of responses, of the order of turns, and calls that are sent as text."""
    withheld: Mapping[int, WithheldReason]
    """The responses that are sent without signatures that they have."""
    reasons: Withheld
    state: RepairState = START
    joined: bytes = b""
    """The first `joined_count` messages, separated by commas."""
    joined_count: int = 0
    entries: tuple[ManifestEntry, ...] = ()
    """The blocks of these messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedHistory:
    """Turns as they are sent to the provider."""

    messages: tuple[PayloadMessage, ...]
    """With the signed summary, without a separate dynamic message."""
    last_seq: int | None
    """The last turn of which something is sent."""
    repairs: tuple[Mapping[str, JsonValue], ...]
    withheld: Mapping[int, WithheldReason]
    sealed: SealedHistory


_MARKABLE: Final = 3
"""The newest messages, which may get cache markers; see `server.caching.policy.place_breakpoints`. They are not joined
in advance."""


def render_history(
    turns: Sequence[BufferedTurn],
    spec: PayloadSpec,
    *,
    dynamic: str | None = None,
    sealed: SealedHistory | None = None,
) -> RenderedHistory:
    """Render the messages of the turns. If the last turn is an input, it is the trigger, and `dynamic` is the text of
    the dynamic layer inside it.

    `sealed` is used if it belongs to the same epoch and buffer.
    """
    family = find_current_family(turns, spec.scope)
    key = HistoryKey(epoch=spec.epoch, scope=spec.scope, family=family, order=spec.order)
    first_seq = turns[0].seq if turns else 0
    empty = SealedHistory(key=key, first_seq=first_seq, withheld={}, reasons=NOTHING_WITHHELD)
    start = empty
    if sealed is not None and (sealed.key, sealed.first_seq) == (key, first_seq) and sealed.turn_count <= len(turns):
        start = sealed
    reasons = find_withheld(turns[start.turn_count :], spec.scope, family, start.reasons)
    if reasons.crossings[-1:] != start.reasons.crossings[-1:] and start.turn_count:
        start = empty
        reasons = find_withheld(turns, spec.scope, family)
    boundary = max(start.turn_count, _find_boundary(turns))
    sealed = _join(_extend(start, turns, boundary, spec, reasons, None))
    whole = _extend(sealed, turns, len(turns), spec, reasons, dynamic)
    summary: tuple[PayloadMessage, ...] = ()
    if spec.signed_summary is not None:
        summary = (
            PayloadMessage(layer=Layer.BUFFERED, data=spec.signed_summary, role="model", is_signed_summary=True),
        )
    return RenderedHistory(
        messages=(*summary, *whole.messages),
        last_seq=whole.messages[-1].seq if whole.messages else None,
        repairs=tuple(note for notes in whole.repairs for note in notes),
        withheld=whole.withheld,
        sealed=sealed,
    )


def outline_history(turns: Sequence[BufferedTurn], spec: PayloadSpec) -> tuple[tuple[Step, bytes | None], ...]:
    """Return the steps of the messages, each model step with the bytes that are sent back. Needs no blobs."""
    family = find_current_family(turns, spec.scope)
    rendered = _render_answers(turns, 0, len(turns), spec, find_withheld(turns, spec.scope, family).reasons)
    steps = repair(read_steps(_without_omitted(turns, rendered))).steps
    return tuple((step, None if step.seq is None else rendered.answers.get(step.seq)) for step in steps)


def _find_boundary(turns: Sequence[BufferedTurn]) -> int:
    """Return how many of the turns are final: those before the newest input and the response that it answers."""
    match turns:
        case [*_, BufferedTurn(kind=TurnKind.USER_TASK)]:
            return len(turns) - 1
        case [*_, BufferedTurn(kind=TurnKind.MODEL_RESPONSE) as answer, BufferedTurn(kind=TurnKind.TOOL_RESPONSE)] if (
            answer.native.data and any(isinstance(block, ToolCallBlock) for block in answer.blocks or ())
        ):
            return len(turns) - 2
        case _:
            return 0


def _extend(
    start: SealedHistory,
    turns: Sequence[BufferedTurn],
    end: int,
    spec: PayloadSpec,
    reasons: Withheld,
    dynamic: str | None,
) -> SealedHistory:
    """Render the turns from the end of `start` up to `end`. No group of a response and its results may cross either."""
    first = start.turn_count
    if first == end:
        return start
    part = turns[first:end]
    rendered = _render_answers(turns, first, end, spec, reasons.reasons)
    next_kind = turns[end].kind if end < len(turns) else None
    repaired = repair(read_steps(_without_omitted(part, rendered)), start.state, next_kind)
    notes = (rendered.repairs, repaired.repairs, tuple(_record_text_calls(repaired.steps, spec)))
    answered = [turn for turn in part if turn.kind is TurnKind.MODEL_RESPONSE and turn.native.data]
    last_answered = answered[-1] if answered else start.reasons.last_answered
    return replace(
        start,
        turn_count=end,
        messages=(*start.messages, *_render(repaired.steps, turns, first, end, rendered, spec, dynamic)),
        repairs=tuple((*old, *new) for old, new in zip(start.repairs, notes, strict=True)),
        withheld={**start.withheld, **rendered.withheld} if rendered.withheld else start.withheld,
        reasons=replace(reasons, last_answered=last_answered),
        state=repaired.state,
    )


def _join(sealed: SealedHistory) -> SealedHistory:
    """Join the messages that will have no cache marker."""
    count = len(sealed.messages) - _MARKABLE
    if count <= sealed.joined_count:
        return sealed
    added = sealed.messages[sealed.joined_count : count]
    before = [sealed.joined] if sealed.joined_count else []
    return replace(
        sealed,
        joined=b",".join([*before, *(message.data for message in added)]),
        joined_count=count,
        entries=(*sealed.entries, *list_message_entries(added)),
    )


def dynamic_text(turn: BufferedTurn | None) -> str | None:
    """The dynamic block of the input that a model response answered."""
    return None if turn is None or not turn.dynamic else turn.dynamic.decode("utf-8", "surrogatepass")


def text_inside_input(answer: BufferedTurn, order: LayerOrder) -> str | None:
    """The text of the dynamic layer inside the input that a model response answered: its block, or its time."""
    return answer.input_time if order is LayerOrder.LAYERED else dynamic_text(answer) or answer.input_time


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedAnswers:
    """The model responses as they are sent back, without those of which nothing is left."""

    answers: Mapping[int, bytes]
    withheld: Mapping[int, WithheldReason]
    repairs: tuple[Mapping[str, JsonValue], ...]


def _render_answers(
    turns: Sequence[BufferedTurn], first: int, end: int, spec: PayloadSpec, reasons: Mapping[int, WithheldReason]
) -> _RenderedAnswers:
    """Render the model responses of a part for the vendor. A reason to withhold is recorded only if it changed the
    bytes.
    """
    answers: dict[int, bytes] = {}
    withheld: dict[int, WithheldReason] = {}
    repairs: list[Mapping[str, JsonValue]] = []
    for index in range(first, end):
        turn = turns[index]
        if turn.kind is not TurnKind.MODEL_RESPONSE:
            continue
        reason = reasons.get(turn.seq)
        data = _render_answer(turn, reason, spec.provider)
        settled = _settle(data, turns[index + 1 : index + 3], reason, spec.provider)
        if data and settled != data:
            repairs.append({"kind": "server_call_dropped", "seq": turn.seq, "ids": []})
            data = settled
        if not data:
            repairs.append({"kind": "answer_left_out", "seq": turn.seq, "ids": []})
        else:
            answers[turn.seq] = data
        if reason is not None and _lost_signatures(turn, data, reason):
            withheld[turn.seq] = reason
    return _RenderedAnswers(answers=answers, withheld=withheld, repairs=tuple(repairs))


def _without_omitted(turns: Sequence[BufferedTurn], rendered: _RenderedAnswers) -> list[BufferedTurn]:
    return [turn for turn in turns if turn.kind is not TurnKind.MODEL_RESPONSE or turn.seq in rendered.answers]


def _render_answer(turn: BufferedTurn, reason: WithheldReason | None, provider: Provider) -> bytes | None:
    match reason:
        case None:
            return turn.native.data
        case WithheldReason.PROVIDER:
            # Output that its own provider does not accept back (of a refusal) is not sent to another one either.
            return provider.foreign_message(_blocks_of(turn)) if turn.native.data else None
        case _ if not turn.native.data:
            return None
        case _:
            # The rejected part need not be the signature, see `server.conversation.errors.AnswerRejected`.
            return provider.unsigned_message(turn.native.data, documented_only=reason is WithheldReason.REJECTED)


def _settle(
    data: bytes | None, following: Sequence[BufferedTurn], reason: WithheldReason | None, provider: Provider
) -> bytes | None:
    """Remove calls of the provider's own tools that have no result, unless they are still pending.

    Beside a call of a client's tool such a call is pending until the client's results are sent; its result then begins
    the next response.
    """
    if not data or reason is WithheldReason.PROVIDER:
        return data
    if not following or following[0].kind is not TurnKind.TOOL_RESPONSE:
        return provider.settle_message(data)
    if len(following) == 1:
        return data
    answer = following[1].native
    return provider.settle_message(data, answer.data if answer.dialect == provider.name else b"")


def _lost_signatures(turn: BufferedTurn, data: bytes | None, reason: WithheldReason) -> bool:
    if reason is WithheldReason.PROVIDER:
        return any(getattr(block, "signature", None) is not None for block in _blocks_of(turn))
    return bool(turn.native.data) and data != turn.native.data


def _blocks_of(turn: BufferedTurn) -> tuple[Block, ...]:
    if turn.blocks is None:
        raise Internal("A turn of another provider came without its blocks.")
    return turn.blocks


def _render(
    steps: Sequence[Step],
    turns: Sequence[BufferedTurn],
    first: int,
    end: int,
    rendered: _RenderedAnswers,
    spec: PayloadSpec,
    dynamic: str | None,
) -> Iterator[PayloadMessage]:
    """Yield the messages of a part in order. A repaired history ends with the trigger."""
    provider = spec.provider
    by_seq = {turns[index].seq: index for index in range(first, end)}
    calls: tuple[ToolCallBlock, ...] = ()
    as_text = False
    for step in steps:
        index = None if step.seq is None else by_seq[step.seq]
        turn = None if index is None else turns[index]
        is_trigger = index == len(turns) - 1
        dynamic_block = None
        if index is not None:
            dynamic_block = dynamic if is_trigger else text_inside_input(turns[index + 1], spec.order)
        match step.kind:
            case TurnKind.MODEL_RESPONSE:
                calls, dynamic_block, is_trigger = step.calls, None, False
                as_text = _is_sent_as_text(step, spec)
                data, role = _render_model(step, turn, rendered, spec), "model"
            case TurnKind.TOOL_RESPONSE if as_text:
                data, role = provider.user_message(_results_as_text(step.results, calls), {}, dynamic_block), "user"
            case TurnKind.TOOL_RESPONSE:
                dynamic_block = dynamic_block if spec.scope.profile.takes_text_beside_results else None
                data, role = provider.tool_message(step.results, calls, dynamic_block), "tool"
            case TurnKind.USER_TASK:
                blocks = (TextBlock(text=NO_TASK),) if turn is None else _blocks_of(turn)
                data, role = provider.user_message(blocks, spec.blobs, dynamic_block), "user"
        layer = Layer.TRIGGER if is_trigger else Layer.BUFFERED
        yield PayloadMessage(layer=layer, data=data, role=role, seq=step.seq, dynamic=dynamic_block)


def _is_sent_as_text(step: Step, spec: PayloadSpec) -> bool:
    """Return whether the calls of a response are sent as text, see `server.conversation.epoch.Rejected`."""
    return bool(step.calls) and step.seq is not None and step.seq <= spec.scope.rejected.calls_through_seq


def _record_text_calls(steps: Sequence[Step], spec: PayloadSpec) -> Iterator[Mapping[str, JsonValue]]:
    for step in steps:
        if _is_sent_as_text(step, spec):
            yield {"kind": "calls_as_text", "seq": step.seq, "ids": [call.id for call in step.calls]}


def _call_as_text(call: ToolCallBlock) -> TextBlock:
    return TextBlock(text=f"[Call of the tool {call.name}: {dumps_exact(dict(call.arguments)).decode()}]")


def _results_as_text(results: Sequence[ToolResultBlock], calls: Sequence[ToolCallBlock]) -> tuple[TextBlock, ...]:
    names = {call.id: call.name for call in calls}
    return tuple(
        TextBlock(
            text=f"[{'Error' if result.is_error else 'Result'} of the tool {names.get(result.tool_call_id, '')}: "
            f"{dumps_exact(result.output).decode()}]"
        )
        for result in results
    )


def _render_model(step: Step, turn: BufferedTurn | None, rendered: _RenderedAnswers, spec: PayloadSpec) -> bytes:
    if turn is None:
        raise Internal("A repair never makes an answer.")
    as_text = _is_sent_as_text(step, spec)
    if not step.renamed and not as_text:
        return rendered.answers[turn.seq]
    calls = iter(step.calls)
    blocks: list[Block] = [next(calls) if isinstance(block, ToolCallBlock) else block for block in _blocks_of(turn)]
    if as_text:
        blocks = [_call_as_text(block) if isinstance(block, ToolCallBlock) else block for block in blocks]
    renamed = spec.provider.foreign_message(blocks)
    if renamed is None:
        raise Internal("An answer with calls cannot be empty.")
    return renamed
