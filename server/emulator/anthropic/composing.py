"""From a reply to the blocks of a response: signed, cut at stop sequences and at the token limit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from server.emulator.anthropic.binding import seal_thinking
from server.emulator.anthropic.blocks import (
    Block,
    build_redacted,
    build_server_call,
    build_server_result,
    build_text,
    build_thinking,
    build_tool_use,
    build_unknown,
)
from server.emulator.anthropic.model_rules import INTERLEAVED, thinking_type
from server.emulator.anthropic.prompt import find_open_server_calls
from server.emulator.anthropic.question import find_refusal, is_redaction_wanted, read_question
from server.emulator.anthropic.state import AnthropicState
from server.emulator.anthropic.validation import Admitted
from server.emulator.latency import pieces
from server.emulator.reply import Fault, FaultKind, Reply, ToolCall
from server.emulator.tokens import canonical_json, count_tokens

_REFUSAL_CATEGORIES: Final = frozenset({"cyber", "bio", "frontier_llm", "reasoning_extraction", "general_harms"})
_LETTERS_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """The blocks of a response and its stop reason."""

    blocks: tuple[Block, ...]
    stop_reason: str
    stop_sequence: str | None = None
    stop_details: dict[str, Any] | None = None
    is_novel: bool = False
    """Whether it contains undocumented fields and blocks."""
    container: dict[str, Any] | None = None
    """The container of code execution."""


def compose(admitted: Admitted, reply: Reply, anthropic_state: AnthropicState, fault: Fault | None) -> Composed:
    """Compose the response to a valid request, changed by a fault if there is one."""
    category = find_refusal(admitted.body)
    if category is not None:
        fault = Fault(kind=FaultKind.REFUSAL, message=category)
    kind = fault.kind if fault else None
    if kind is FaultKind.EMPTY_STOP:
        return Composed(blocks=(), stop_reason="end_turn")
    blocks = tuple(_write(admitted, _shorten(reply, fault), anthropic_state, kind))
    composed = _end(admitted, blocks, fault)
    runs_code = any(_runs_code(block.whole) for block in blocks)
    return replace(composed, container=anthropic_state.container_of(admitted.body)) if runs_code else composed


def _runs_code(block: dict[str, Any]) -> bool:
    return block["type"] == "server_tool_use" and "code_execution" in block["name"]


def _end(admitted: Admitted, blocks: tuple[Block, ...], fault: Fault | None) -> Composed:
    """The stop reason, changed by a fault if there is one."""
    kind = fault.kind if fault else None
    match kind:
        case FaultKind.REFUSAL | FaultKind.BLOCKED_PROMPT:
            return Composed(blocks=blocks, stop_reason="refusal", stop_details=_explain_refusal(fault))
        case FaultKind.PAUSE:
            return Composed(blocks=blocks, stop_reason="pause_turn")
        case FaultKind.MAX_TOKENS:
            return Composed(blocks=blocks, stop_reason="max_tokens")
        case FaultKind.CONTEXT_EXCEEDED:
            return Composed(blocks=blocks, stop_reason="model_context_window_exceeded")
        case FaultKind.UNKNOWN_PARTS:
            whole = _limit(admitted.body, blocks)
            return replace(whole, blocks=(*whole.blocks, build_unknown()), is_novel=True)
        case _:
            return _limit(admitted.body, blocks)


def _shorten(reply: Reply, fault: Fault | None) -> Reply:
    """The part of the reply before a pause."""
    words = pieces(reply.text)
    match fault.kind if fault else None:
        case FaultKind.REFUSAL | FaultKind.BLOCKED_PROMPT:
            return Reply(text="".join(words[: fault.after_chunks if fault else 0]))
        case FaultKind.PAUSE | FaultKind.CONTEXT_EXCEEDED:
            half = "".join(words[: max(1, len(words) // 2)]) or "Let me see."
            # The model pauses while one of the provider's own tools is at work.
            searches = (ToolCall(name="web_search", arguments={"query": half}),)
            paused = fault is not None and fault.kind is FaultKind.PAUSE
            calls = (reply.server_calls or searches) if paused else ()
            return Reply(thinking=reply.thinking, text=half, server_calls=calls)
        case FaultKind.MAX_TOKENS if not reply.tool_calls:
            return replace(reply, text="".join(words[: max(1, len(words) // 2)]).rstrip())
        case _:
            return reply


def _write(
    admitted: Admitted, reply: Reply, anthropic_state: AnthropicState, kind: FaultKind | None
) -> Iterator[Block]:
    is_cut = kind is FaultKind.MAX_TOKENS
    open_calls = find_open_server_calls(admitted.body["messages"])
    for waiting in open_calls:
        yield build_server_result(call_id=waiting["id"], name=waiting["name"])
    if reply.thinking and _may_think(admitted) and not open_calls:
        yield _build_thinking(admitted, reply.thinking, anthropic_state)
    if reply.text:
        yield build_text(reply.text)
    for server_call in reply.server_calls:
        id_ = anthropic_state.new_id("srvtoolu")
        yield build_server_call(id_=id_, name=server_call.name, arguments=server_call.arguments)
        if not reply.tool_calls and kind is not FaultKind.PAUSE:
            yield build_server_result(call_id=id_, name=server_call.name)
    for number, call in enumerate(reply.tool_calls, start=1):
        half = max(1, len(canonical_json(dict(call.arguments))) // 2)
        is_last = is_cut and number == len(reply.tool_calls)
        yield build_tool_use(
            id_=anthropic_state.new_id("toolu"),
            name=call.name,
            arguments=call.arguments,
            cut_at=half if is_last else None,
            toolset_name=call.toolset_name,
        )


def _build_thinking(admitted: Admitted, text: str, anthropic_state: AnthropicState) -> Block:
    is_redacted = is_redaction_wanted(text, admitted.body)
    shown = admitted.body.get("thinking", {}).get("display")
    is_shown = admitted.model.displays_thinking if shown is None else shown != "omitted"
    tokens = count_tokens(text)
    thinking_id = anthropic_state.new_id("thinking")
    sign_claims = seal_thinking(
        anthropic_state.state.signer,
        id_=thinking_id,
        model=admitted.model,
        caller=admitted.caller,
        opening=admitted.opening,
        prefix=admitted.end,
        previous_id=admitted.bound.last_thinking_id,
        text=text if is_shown and not is_redacted else None,
        tokens=tokens,
    )
    if is_redacted:
        return build_redacted(data=sign_claims, thinking_id=thinking_id, output_tokens=tokens)
    return build_thinking(
        text=text, signature=sign_claims, thinking_id=thinking_id, is_shown=is_shown, output_tokens=tokens
    )


def _may_think(admitted: Admitted) -> bool:
    kind = thinking_type(admitted.body, admitted.model)
    after_tools = read_question(admitted.body).after_tools
    if kind == "between_tools":
        return after_tools
    if kind == "enabled" and after_tools:  # by budget a turn thinks once, at its start
        return admitted.caller.has_beta(INTERLEAVED) and admitted.model.line != "haiku"
    return kind != "disabled"


def _limit(body: dict[str, Any], blocks: Sequence[Block]) -> Composed:
    """Cut the blocks at the first stop sequence or the token limit."""
    kept: list[Block] = []
    left = body["max_tokens"]
    for block in blocks:
        text = block.whole.get("text", "") if block.whole["type"] == "text" else ""
        stop = _find_stop(text, body.get("stop_sequences", []))
        if stop is not None:
            block = build_text(text[: text.index(stop)])  # noqa: PLW2901  reason: the rest was never said
        if block.output_tokens > left:
            kept.extend(_cut(block, left))
            return Composed(blocks=tuple(kept), stop_reason="max_tokens")
        left -= block.output_tokens
        kept.append(block)
        if stop is not None:
            said = tuple(one for one in kept if one.whole.get("text") != "")
            return Composed(blocks=said, stop_reason="stop_sequence", stop_sequence=stop)
    calls = any(block.whole["type"] == "tool_use" for block in kept)
    return Composed(blocks=tuple(kept), stop_reason="tool_use" if calls else "end_turn")


def _cut(block: Block, tokens: int) -> list[Block]:
    """The part of a block that fits. Thinking is signed as a whole, so it is never cut."""
    letters = tokens * _LETTERS_PER_TOKEN
    whole = block.whole
    if whole["type"] == "text":
        return [build_text(whole["text"][:letters])] if letters else []
    if whole["type"] == "tool_use":
        room = letters - len(whole["name"])
        return (
            [build_tool_use(id_=whole["id"], name=whole["name"], arguments=whole["input"], cut_at=room)]
            if room > 0
            else []
        )
    return [block] if tokens else []


def _find_stop(text: str, sequences: Sequence[str]) -> str | None:
    found = [sequence for sequence in sequences if sequence and sequence in text]
    return min(found, key=text.index) if found else None


def _explain_refusal(fault: Fault | None) -> dict[str, Any]:
    said = fault.message if fault else ""
    category = said if said in _REFUSAL_CATEGORIES else None
    explanation = said if said and category is None else "The request was declined by the model's safety policy."
    return {"type": "refusal", "category": category, "explanation": explanation}
