"""From a reply to the blocks of a response: signed, cut at stop sequences and at the token limit.

Each block is built in both forms: whole, and as stream events.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from server.emulator.anthropic.binding import seal_thinking
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
_JSON_PIECE: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    whole: dict[str, Any]
    """The block inside a message."""
    start: dict[str, Any]
    """The block in `content_block_start`."""
    deltas: tuple[dict[str, Any], ...] = ()
    output_tokens: int = 0
    thinking_id: str = ""
    """Of thinking: the id that its signature records."""

    @property
    def is_thinking(self) -> bool:
        return self.whole["type"] in {"thinking", "redacted_thinking"}


def build_thinking(*, text: str, signature: str, thinking_id: str, is_shown: bool, output_tokens: int) -> Block:
    """A thinking block. If it is not displayed the text is empty and only one signature comes, at the end."""
    shown = text if is_shown else ""
    return Block(
        whole={"type": "thinking", "thinking": shown, "signature": signature},
        start={"type": "thinking", "thinking": "", "signature": ""},
        deltas=(
            *({"type": "thinking_delta", "thinking": piece} for piece in pieces(shown)),
            {"type": "signature_delta", "signature": signature},
        ),
        output_tokens=output_tokens,
        thinking_id=thinking_id,
    )


def build_redacted(*, data: str, thinking_id: str, output_tokens: int) -> Block:
    whole = {"type": "redacted_thinking", "data": data}
    return Block(whole=whole, start=whole, output_tokens=output_tokens, thinking_id=thinking_id)


def build_text(text: str) -> Block:
    return Block(
        whole={"type": "text", "text": text},
        start={"type": "text", "text": ""},
        deltas=tuple({"type": "text_delta", "text": piece} for piece in pieces(text)),
        output_tokens=count_tokens(text),
    )


def build_server_call(*, id_: str, name: str, arguments: Mapping[str, Any]) -> Block:
    """A call of a server tool."""
    shell = {"type": "server_tool_use", "id": id_, "name": name, "input": {}}
    written = json.dumps(dict(arguments), ensure_ascii=False)
    return Block(
        whole={**shell, "input": dict(arguments)},
        start=shell,
        deltas=({"type": "input_json_delta", "partial_json": written},),
        output_tokens=count_tokens(name + written),
    )


def build_server_result(*, call_id: str, name: str) -> Block:
    """The result of a server tool: complete in `content_block_start`."""
    found = [{"type": "web_search_result", "url": "https://example.org/", "title": "Example", "encrypted_content": "x"}]
    whole = {"type": f"{name}_tool_result", "tool_use_id": call_id, "content": found}
    return Block(whole=whole, start=whole)


def build_tool_use(
    *, id_: str, name: str, arguments: Mapping[str, Any], cut_at: int | None = None, toolset_name: str = ""
) -> Block:
    """A tool call. `cut_at` cuts the JSON of the arguments after this many characters, as the token limit does."""
    written = json.dumps(dict(arguments), ensure_ascii=False)
    sent = written if cut_at is None else written[:cut_at]
    shell = {"type": "tool_use", "id": id_, "name": name, "input": {}}
    if toolset_name:
        shell["toolset_name"] = toolset_name
    parts = [sent[at : at + _JSON_PIECE] for at in range(0, len(sent), _JSON_PIECE)]
    return Block(
        whole=shell if cut_at is not None else {**shell, "input": dict(arguments)},
        start=shell,
        deltas=tuple({"type": "input_json_delta", "partial_json": part} for part in ("", *parts)),
        output_tokens=count_tokens(name + sent),
    )


def build_compaction(whole: dict[str, Any]) -> Block:
    """A compaction block. The signature comes with the start; a delta carries only the text."""
    return Block(
        whole=whole,
        start={**whole, "content": None},
        deltas=({"type": "compaction_delta", "content": whole["content"], "encrypted_content": None},),
        output_tokens=count_tokens(whole["content"]),
    )


def build_unknown() -> Block:
    """A block of an undocumented type with an undocumented delta. Requests may contain it again."""
    shell = {"type": "emulated_novelty", "novelty": {"kept": True, "text": ""}}
    return Block(
        whole={**shell, "novelty": {"kept": True, "text": "new"}},
        start=shell,
        deltas=({"type": "novelty_delta", "novelty": "new"},),
        output_tokens=1,
    )


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
            block = build_text(text[: text.index(stop)])  # noqa: PLW2901  reason: the rest of the text is cut off
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
