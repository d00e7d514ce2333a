"""From turns to messages: what was said, repaired where it has to be, in the words of the vendor that is asked.

In the append-only order each input holds the dynamic block that it was sent with. A signed block that stands for the
turns before them, where an epoch has one, is the first message.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.assistant import Tool
from server.conversation.block import Blob, Block, JsonValue, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import Internal
from server.conversation.exact_json import dumps_exact
from server.conversation.payload import CallSettings, Layer, LayerOrder, PayloadMessage
from server.conversation.store import BufferedTurn
from server.conversation.turn import TurnKind
from server.payload.history import Step, read_steps, repair
from server.payload.signatures import SignatureScope, WithheldReason, find_withheld
from server.providers.provider import Provider

NO_TASK: Final = "(no message)"
"""What the user is taken to have said where an imported history has an answer to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """What a payload is made with, beside its turns."""

    provider: Provider
    scope: SignatureScope
    order: LayerOrder
    settings: CallSettings
    tools: tuple[Tool, ...]
    static_text: str
    dynamic: str | None
    blobs: Mapping[str, Blob]
    signed_summary: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedHistory:
    """Turns as they go to the provider."""

    messages: tuple[PayloadMessage, ...]
    steps: tuple[Step, ...]
    """What the messages tell, without the signed summary."""
    repairs: tuple[Mapping[str, JsonValue], ...]
    withheld: Mapping[int, WithheldReason]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """The answers of the model as they go back: without the ones of which nothing is left."""

    answers: Mapping[int, bytes]
    withheld: Mapping[int, WithheldReason]
    repairs: tuple[Mapping[str, JsonValue], ...]


def render_history(turns: Sequence[BufferedTurn], spec: PayloadSpec, *, dynamic: str | None = None) -> RenderedHistory:
    """The messages of the turns. Where the last one is an input it is the trigger, and `dynamic` goes with it."""
    past = _render_answers(turns, spec)
    repaired = repair(read_steps(_said(turns, past)))
    return RenderedHistory(
        messages=tuple(_render(repaired.steps, turns, past, spec, dynamic)),
        steps=repaired.steps,
        repairs=(*past.repairs, *repaired.repairs, *_note_text_calls(repaired.steps, spec)),
        withheld=past.withheld,
    )


def outline_history(turns: Sequence[BufferedTurn], spec: PayloadSpec) -> tuple[tuple[Step, bytes | None], ...]:
    """What the messages of the turns tell, each step of the model's with what goes back of it. Needs no blobs."""
    past = _render_answers(turns, spec)
    steps = repair(read_steps(_said(turns, past))).steps
    return tuple((step, None if step.seq is None else past.answers.get(step.seq)) for step in steps)


def dynamic_text(turn: BufferedTurn | None) -> str | None:
    """The dynamic block that an answer was given to."""
    return None if turn is None or not turn.dynamic else turn.dynamic.decode("utf-8", "surrogatepass")


def _render_answers(turns: Sequence[BufferedTurn], spec: PayloadSpec) -> _Past:
    """All answers in the words of the vendor that is asked. What is withheld counts where it made a difference."""
    reasons = find_withheld(turns, spec.scope)
    answers: dict[int, bytes] = {}
    withheld: dict[int, WithheldReason] = {}
    repairs: list[Mapping[str, JsonValue]] = []
    for index, turn in enumerate(turns):
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
    return _Past(answers=answers, withheld=withheld, repairs=tuple(repairs))


def _said(turns: Sequence[BufferedTurn], past: _Past) -> list[BufferedTurn]:
    return [turn for turn in turns if turn.kind is not TurnKind.MODEL_RESPONSE or turn.seq in past.answers]


def _render_answer(turn: BufferedTurn, reason: WithheldReason | None, provider: Provider) -> bytes | None:
    match reason:
        case None:
            return turn.native.data
        case WithheldReason.PROVIDER:
            # What its own provider would not take back (a refusal's partial output) goes to no other either.
            return provider.foreign_message(_blocks_of(turn)) if turn.native.data else None
        case _ if not turn.native.data:
            return None
        case _:
            # What was rejected need not be the signature: see `server.conversation.errors.AnswerRejected`.
            return provider.unsigned_message(turn.native.data, documented_only=reason is WithheldReason.REJECTED)


def _settle(
    data: bytes | None, following: Sequence[BufferedTurn], reason: WithheldReason | None, provider: Provider
) -> bytes | None:
    """An answer without calls of the provider's own tools that got no result, unless they wait for it now.

    Beside a call of the client's such a call waits until the client's results have come; its result opens the next
    answer then.
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
    steps: Sequence[Step], turns: Sequence[BufferedTurn], past: _Past, spec: PayloadSpec, dynamic: str | None
) -> Iterator[PayloadMessage]:
    """The messages in order. A repaired history ends with the trigger, so they do."""
    provider = spec.provider
    trigger = turns[-1] if turns and turns[-1].kind is not TurnKind.MODEL_RESPONSE else None
    by_seq = {turn.seq: turn for turn in turns}
    blocks_sent = _blocks_sent(turns, trigger, spec, dynamic)
    if spec.signed_summary is not None:
        yield PayloadMessage(layer=Layer.BUFFERED, data=spec.signed_summary, role="model", is_signed_summary=True)
    if spec.order is LayerOrder.LAYERED and dynamic is not None:
        yield PayloadMessage(layer=Layer.DYNAMIC, data=provider.dynamic_message(dynamic), role="user")
    calls: tuple[ToolCallBlock, ...] = ()
    as_text = False
    for step in steps:
        turn = None if step.seq is None else by_seq[step.seq]
        inside = None if step.seq is None else blocks_sent.get(step.seq)
        match step.kind:
            case TurnKind.MODEL_RESPONSE:
                calls, inside = step.calls, None
                as_text = _goes_as_text(step, spec)
                data, role = _render_model(step, turn, past, spec), "model"
            case TurnKind.TOOL_RESPONSE if as_text:
                data, role = provider.user_message(_results_as_text(step.results, calls), {}, inside), "user"
            case TurnKind.TOOL_RESPONSE:
                inside = inside if spec.scope.profile.takes_text_beside_results else None
                data, role = provider.tool_message(step.results, calls, inside), "tool"
            case TurnKind.USER_TASK:
                said = (TextBlock(text=NO_TASK),) if turn is None else _blocks_of(turn)
                data, role = provider.user_message(said, spec.blobs, inside), "user"
        layer = Layer.TRIGGER if turn is not None and turn is trigger else Layer.BUFFERED
        yield PayloadMessage(layer=layer, data=data, role=role, seq=step.seq, dynamic=inside)


def _blocks_sent(
    turns: Sequence[BufferedTurn], trigger: BufferedTurn | None, spec: PayloadSpec, dynamic: str | None
) -> dict[int, str | None]:
    """The dynamic blocks inside inputs, by their numbers."""
    if spec.order is LayerOrder.LAYERED:
        return {}
    pairs = zip(turns, [*turns[1:], None], strict=True)
    sent = {turn.seq: dynamic_text(following) for turn, following in pairs}
    return sent if trigger is None else sent | {trigger.seq: dynamic}


def _goes_as_text(step: Step, spec: PayloadSpec) -> bool:
    """Whether the calls of an answer are sent as text: see `server.conversation.epoch.Rejected`."""
    return bool(step.calls) and step.seq is not None and step.seq <= spec.scope.rejected.calls_through_seq


def _note_text_calls(steps: Sequence[Step], spec: PayloadSpec) -> Iterator[Mapping[str, JsonValue]]:
    for step in steps:
        if _goes_as_text(step, spec):
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


def _render_model(step: Step, turn: BufferedTurn | None, past: _Past, spec: PayloadSpec) -> bytes:
    if turn is None:
        raise Internal("A repair never makes an answer.")
    as_text = _goes_as_text(step, spec)
    if not step.renamed and not as_text:
        return past.answers[turn.seq]
    calls = iter(step.calls)
    blocks: list[Block] = [next(calls) if isinstance(block, ToolCallBlock) else block for block in _blocks_of(turn)]
    if as_text:
        blocks = [_call_as_text(block) if isinstance(block, ToolCallBlock) else block for block in blocks]
    renamed = spec.provider.foreign_message(blocks)
    if renamed is None:
        raise Internal("An answer with calls cannot be empty.")
    return renamed
