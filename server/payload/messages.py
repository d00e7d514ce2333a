"""From turns to messages: the repaired history in the format of the vendor.

In the append-only order each input contains the dynamic block that it was sent with. The signed summary of an epoch, if
any, is the first message.
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
"""The text of a user task that is inserted before a model response to nothing, in an imported history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSpec:
    """What a payload is built from, besides its turns."""

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
    """Turns as they are sent to the provider."""

    messages: tuple[PayloadMessage, ...]
    steps: tuple[Step, ...]
    """The steps of the messages, without the signed summary."""
    repairs: tuple[Mapping[str, JsonValue], ...]
    withheld: Mapping[int, WithheldReason]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedAnswers:
    """The model responses as they are sent back, without those of which nothing is left."""

    answers: Mapping[int, bytes]
    withheld: Mapping[int, WithheldReason]
    repairs: tuple[Mapping[str, JsonValue], ...]


def render_history(turns: Sequence[BufferedTurn], spec: PayloadSpec, *, dynamic: str | None = None) -> RenderedHistory:
    """Render the messages of the turns. If the last turn is an input, it is the trigger and `dynamic` is
    sent with it.
    """
    rendered = _render_answers(turns, spec)
    repaired = repair(read_steps(_without_omitted(turns, rendered)))
    return RenderedHistory(
        messages=tuple(_render(repaired.steps, turns, rendered, spec, dynamic)),
        steps=repaired.steps,
        repairs=(*rendered.repairs, *repaired.repairs, *_record_text_calls(repaired.steps, spec)),
        withheld=rendered.withheld,
    )


def outline_history(turns: Sequence[BufferedTurn], spec: PayloadSpec) -> tuple[tuple[Step, bytes | None], ...]:
    """Return the steps of the messages, each model step with the bytes that are sent back. Needs no blobs."""
    rendered = _render_answers(turns, spec)
    steps = repair(read_steps(_without_omitted(turns, rendered))).steps
    return tuple((step, None if step.seq is None else rendered.answers.get(step.seq)) for step in steps)


def dynamic_text(turn: BufferedTurn | None) -> str | None:
    """The dynamic block of the input that a model response answered."""
    return None if turn is None or not turn.dynamic else turn.dynamic.decode("utf-8", "surrogatepass")


def _render_answers(turns: Sequence[BufferedTurn], spec: PayloadSpec) -> _RenderedAnswers:
    """Render all model responses for the vendor. A reason to withhold is recorded only if it changed the bytes."""
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
    rendered: _RenderedAnswers,
    spec: PayloadSpec,
    dynamic: str | None,
) -> Iterator[PayloadMessage]:
    """Yield the messages in order. A repaired history ends with the trigger."""
    provider = spec.provider
    trigger = turns[-1] if turns and turns[-1].kind is not TurnKind.MODEL_RESPONSE else None
    by_seq = {turn.seq: turn for turn in turns}
    dynamic_blocks = _dynamic_blocks(turns, trigger, spec, dynamic)
    if spec.signed_summary is not None:
        yield PayloadMessage(layer=Layer.BUFFERED, data=spec.signed_summary, role="model", is_signed_summary=True)
    if spec.order is LayerOrder.LAYERED and dynamic is not None:
        yield PayloadMessage(layer=Layer.DYNAMIC, data=provider.dynamic_message(dynamic), role="user")
    calls: tuple[ToolCallBlock, ...] = ()
    as_text = False
    for step in steps:
        turn = None if step.seq is None else by_seq[step.seq]
        dynamic_block = None if step.seq is None else dynamic_blocks.get(step.seq)
        match step.kind:
            case TurnKind.MODEL_RESPONSE:
                calls, dynamic_block = step.calls, None
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
        layer = Layer.TRIGGER if turn is not None and turn is trigger else Layer.BUFFERED
        yield PayloadMessage(layer=layer, data=data, role=role, seq=step.seq, dynamic=dynamic_block)


def _dynamic_blocks(
    turns: Sequence[BufferedTurn], trigger: BufferedTurn | None, spec: PayloadSpec, dynamic: str | None
) -> dict[int, str | None]:
    """The dynamic blocks inside inputs, by the number of the turn."""
    if spec.order is LayerOrder.LAYERED:
        return {}
    pairs = zip(turns, [*turns[1:], None], strict=True)
    sent = {turn.seq: dynamic_text(following) for turn, following in pairs}
    return sent if trigger is None else sent | {trigger.seq: dynamic}


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
