"""Build Claude requests from payloads. Pure."""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from server.conversation.assistant import Tool
from server.conversation.block import Blob, Block, ImageBlock, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import ValidationFailed
from server.conversation.exact_json import dumps_exact, dumps_sendable, loads_exact
from server.conversation.payload import (
    CallSettings,
    Layer,
    Payload,
    PayloadMessage,
    count_static_breakpoints,
    split_static,
)
from server.providers.model_profile import ModelProfile, ThinkingControl

COMPACTION_BETA: Final = "compact-2026-09-04"
"""The beta of Claude's API that signs summaries and accepts them."""
NOTHING_SAID: Final = "(no text)"
"""Replaces a user task that has only empty text."""
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})
_MARKER: Final = "cache_control"
_DOCUMENTED: Final = frozenset(
    {
        "text",
        "image",
        "document",
        "search_result",
        "tool_use",
        "tool_result",
        "server_tool_use",
        "container_upload",
        "compaction",
    }
)
"""Documented block types besides thinking and the results of server tools. They accept a cache marker."""
_TEXT_MEMBERS: Final = frozenset({"type", "text", "citations"})
_CALL_ID: Final = re.compile(r"[a-zA-Z0-9_-]+")
_OFF: Final = "off"
_DEFAULT_OUTPUT_TOKENS: Final = 16_384
_LONG_CACHE_SECONDS: Final = 3600
_SPLICED: Final = "x"
_SPLICED_TOOL: Final = Tool(name=_SPLICED, description=_SPLICED, parameters={})
_SPLICED_SUMMARY: Final = PayloadMessage(layer=Layer.BUFFERED, data=b"{}", is_signed_summary=True)


def user_message(blocks: Sequence[Block], blobs: Mapping[str, Blob], dynamic: str | None = None) -> bytes:
    """Build a user task as one message. Claude accepts neither blank text nor a message without blocks."""
    content: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock():
                if block.text.strip():
                    content.append(_text(block.text))
            case ImageBlock():
                data = base64.b64encode(blobs[block.sha256].data).decode()
                source = {"type": "base64", "media_type": block.media_type, "data": data}
                content.append({"type": "image", "source": source})
            case _:
                raise ValidationFailed(f"A user task cannot hold a {type(block).__name__}.")
    before = [_text(dynamic)] if dynamic else []
    return dumps_sendable({"role": "user", "content": [*before, *(content or [_text(NOTHING_SAID)])]})


def tool_message(blocks: Sequence[Block], calls: Sequence[Block], dynamic: str | None = None) -> bytes:
    """Build all results of a step as one message, in the order of the calls."""
    results = {block.tool_call_id: block for block in blocks if isinstance(block, ToolResultBlock)}
    content: list[dict[str, Any]] = []
    for call in calls:
        if isinstance(call, ToolCallBlock) and call.id in results:
            result = results[call.id]
            output = result.output if isinstance(result.output, str) else dumps_exact(result.output).decode()
            entry: dict[str, Any] = {"type": "tool_result", "tool_use_id": name_call(call.id), "content": output}
            entry |= {"toolset_name": call.toolset_name} if call.toolset_name is not None else {}
            content.append(entry | ({"is_error": True} if result.is_error else {}))
    return dumps_sendable({"role": "user", "content": [*content, *([_text(dynamic)] if dynamic else ())]})


def dynamic_message(dynamic: str) -> bytes:
    """Build the dynamic layer as a message of its own."""
    return dumps_sendable({"role": "user", "content": [_text(dynamic)]})


def foreign_message(blocks: Sequence[Block]) -> bytes | None:
    """Build another vendor's answer: text and calls."""
    content: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock() if block.text.strip():
                content.append(_text(block.text))
            case ToolCallBlock():
                call = {"id": name_call(block.id), "name": block.name, "input": dict(block.arguments)}
                content.append({"type": "tool_use", **call})
            case _:
                continue
    return dumps_sendable({"role": "assistant", "content": content}) if content else None


def unsigned_message(native: bytes, *, documented_only: bool = False) -> bytes | None:
    """Build an answer of Claude without thinking, which is all that Claude signs."""
    message = loads_exact(native)
    content = [block for block in message["content"] if block.get("type") not in _THINKING]
    if documented_only:
        content = [
            {name: value for name, value in block.items() if name in _TEXT_MEMBERS or block["type"] != "text"}
            for block in content
            if _is_documented(block)
        ]
    return dumps_exact(message | {"content": content}) if content else None


def _is_documented(block: Mapping[str, Any]) -> bool:
    """Whether the block has a documented type and is not thinking."""
    kind = block.get("type")
    return isinstance(kind, str) and (kind in _DOCUMENTED or kind.endswith("_tool_result"))


def settle_message(native: bytes, following: bytes = b"") -> bytes | None:
    """Build an answer without calls of server tools that have a result neither in it nor in the following answer.

    Claude rejects such calls, except in an answer that it is to continue. Returns None if only thinking is left.
    """
    if b'"server_tool_use"' not in native:
        return native
    message = loads_exact(native)
    later = loads_exact(following)["content"] if following else []
    answered = {block.get("tool_use_id") for block in (*message["content"], *later)}
    content = [
        block for block in message["content"] if block.get("type") != "server_tool_use" or block.get("id") in answered
    ]
    if len(content) == len(message["content"]):
        return native
    is_left = any(block.get("type") not in _THINKING for block in content)
    return dumps_exact(message | {"content": content}) if is_left else None


def name_call(call_id: str) -> str:
    """Return the id for Claude: unchanged if it is valid, else a hash of it."""
    if _CALL_ID.fullmatch(call_id):
        return call_id
    return f"call_{hashlib.sha256(call_id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def reduce_payload(payload: Payload, *, thinks: bool) -> Payload:
    """Return the shape of the request: the payload with constants for all that is spliced in, see
    `server.providers.wire.request_template`.

    `thinks`: whether thinking stays as the settings have it, see `find_thoughtless`. The lifetimes and places of cache
    markers are in the spliced parts, and the request does not contain `continues`.
    """
    compares = payload.requests_diagnosis and payload.previous_response_id is not None
    return Payload(
        model=payload.model,
        settings=payload.settings if thinks else replace(payload.settings, thinking=_OFF),
        static_text=_SPLICED if payload.static_text else "",
        tools=(_SPLICED_TOOL,) if payload.tools else (),
        messages=() if payload.signed_summary is None else (_SPLICED_SUMMARY,),
        requests_diagnosis=payload.requests_diagnosis,
        previous_response_id=_SPLICED if compares else None,
        container=None if payload.container is None else _SPLICED,
        requests_summary=payload.requests_summary,
    )


def name_ids(shape: Payload, placeholder: Callable[[str], str]) -> Payload:
    """Return the shape with placeholders for the ids that are spliced in."""
    if shape.previous_response_id is not None:
        shape = replace(shape, previous_response_id=placeholder("previous_response_id"))
    if shape.container is not None:
        shape = replace(shape, container=placeholder("container"))
    return shape


def encode_ids(payload: Payload) -> dict[str, bytes]:
    """Encode the ids that are spliced in, by name."""
    ids = {"previous_response_id": payload.previous_response_id, "container": payload.container}
    return {name: dumps_sendable(value) for name, value in ids.items() if value is not None}


def build_layers(payload: Payload, placeholder: Callable[[str], str]) -> dict[str, Any]:
    """Build the large members as placeholders."""
    body: dict[str, Any] = {"messages": [placeholder("messages")]}
    if payload.static_text:
        body["system"] = placeholder("system")
    if payload.tools:
        body["tools"] = placeholder("tools")
    return body


def build_parameters(payload: Payload, profile: ModelProfile) -> dict[str, Any]:
    """Build the parameters of the request, without its layers."""
    settings = payload.settings
    if find_thoughtless(payload, profile):
        settings = replace(settings, thinking=_OFF)
    parameters: dict[str, Any] = {
        "model": payload.model,
        "max_tokens": settings.max_output_tokens or min(_DEFAULT_OUTPUT_TOKENS, profile.output_limit_tokens),
        **build_thinking(settings, profile),
    }
    if payload.requests_diagnosis:
        parameters["diagnostics"] = {"previous_message_id": payload.previous_response_id}
    if settings.stop_sequences:
        parameters["stop_sequences"] = list(settings.stop_sequences)
    if payload.container is not None:
        asked = settings.extra.get("container")
        parameters["container"] = {**asked, "id": payload.container} if isinstance(asked, dict) else payload.container
    return parameters


def find_thoughtless(payload: Payload, profile: ModelProfile) -> tuple[PayloadMessage, ...]:
    """Return the answers because of which a request must be sent without thinking, although a budget is set.

    With a budget, Claude requires that the open tool loop begins with thinking. A loop that another provider began, or
    that began without thinking, does not. The documented way is to switch thinking off.
    """
    if profile.thinking is not ThinkingControl.BUDGET or payload.settings.thinking in {None, _OFF}:
        return ()
    starts = _find_loop_starts(payload.messages)
    return tuple(message for message in reversed(starts) if not _begins_with_thinking(message.data))


def _find_loop_starts(messages: Sequence[PayloadMessage]) -> list[PayloadMessage]:
    """Return the answers that may count as the beginning of the open tool loop, the newest first.

    It is not documented whether text next to tool results, such as a dynamic block, ends a loop. There may therefore be
    two: the first answer after such text, and the first of all answers that are linked by results.
    """
    starts: list[PayloadMessage] = []
    first: PayloadMessage | None = None
    has_results = has_text = False
    for message in reversed(messages):
        if message.role != "model":
            has_results |= message.role == "tool"
            has_text |= message.role != "tool" or message.dynamic is not None
            continue
        if not has_results:
            break
        if has_text and first is not None and not starts:
            starts.append(first)
        first, has_results, has_text = message, False, False
    if first is not None and first not in starts:
        starts.append(first)
    return starts


def _begins_with_thinking(data: bytes) -> bool:
    content = loads_exact(data).get("content")
    return isinstance(content, list) and bool(content) and content[0].get("type") in _THINKING


def thinking_warnings(thoughtless: Sequence[PayloadMessage]) -> tuple[dict[str, Any], ...]:
    """Return the warnings of a call whose thinking was switched off because of these answers."""
    return tuple({"kind": "thinking_switched_off", "seq": message.seq} for message in thoughtless)


def encode_system(payload: Payload, profile: ModelProfile) -> bytes:
    """Encode the static text with its cache markers; a long one is split."""
    pieces = [_text(piece) for piece in split_static(payload.static_text)]
    plain = len(pieces) - count_static_breakpoints(len(pieces), profile.breakpoints)
    marker = _static_marker(payload, profile)
    return dumps_sendable([*pieces[:plain], *(piece | marker for piece in pieces[plain:])])


def encode_tools(payload: Payload, profile: ModelProfile) -> bytes:
    """Encode the tools in their order, the last one with its cache marker."""
    tools = [
        {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
        for tool in payload.tools
    ]
    marker = _static_marker(payload, profile) if payload.marks_tools else {}
    return dumps_sendable([*tools[:-1], tools[-1] | marker])


def is_long_lived(payload: Payload) -> bool:
    """Whether the static layer is cached for an hour: earlier blocks must not expire before later ones."""
    return max(payload.static_cache_seconds, payload.cache_seconds) >= _LONG_CACHE_SECONDS


def build_extra(payload: Payload, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that an assistant adds, without those that are set here, which they would override.

    Also adds the request for a signed summary, which the SDK supports only in its beta. Cache markers are removed:
    Claude accepts four, and all of them are set here.
    """
    layers = {"messages": True, "system": bool(payload.static_text), "tools": bool(payload.tools)}
    written = {name for name, is_there in layers.items() if is_there}
    taken = {*own, *written, "stream", "compaction", _MARKER}
    if payload.settings.thinking is not None:
        taken.add("thinking")
    extra = {name: _unmarked(value) for name, value in payload.settings.extra.items() if name not in taken}
    return extra | ({"compaction": {"type": "summarize"}} if payload.requests_summary else {})


def _unmarked(value: Any) -> Any:
    """Return a list of blocks or tools without cache markers; other values unchanged."""
    if not isinstance(value, list):
        return value
    return [
        {name: item for name, item in block.items() if name != _MARKER} if isinstance(block, dict) else block
        for block in value
    ]


def build_headers(payload: Payload) -> dict[str, str]:
    """Build the headers: the beta, if the request contains or requests a signed summary."""
    return {"anthropic-beta": COMPACTION_BETA} if payload.requests_summary or payload.signed_summary is not None else {}


def signed_summary_text(message: bytes) -> str | None:
    """Return the text of the signed summary in an answer; None if the answer is anything else."""
    content = loads_exact(message).get("content")
    block = content[0] if isinstance(content, list) and len(content) == 1 else None
    if not isinstance(block, dict) or block.get("type") != "compaction" or not block.get("signature"):
        return None
    text = block.get("content")
    return text if isinstance(text, str) and text.strip() else None


def build_marker(lifetime_seconds: int) -> dict[str, Any]:
    """Build a cache marker for the lifetime: five minutes or an hour."""
    if lifetime_seconds >= _LONG_CACHE_SECONDS:
        return {"type": "ephemeral", "ttl": "1h"}
    return {"type": "ephemeral"}


def build_thinking(settings: CallSettings, profile: ModelProfile) -> dict[str, Any]:
    """Build adaptive thinking with an effort, or a budget. Raises `ValidationFailed` if the model lacks it."""
    asked = settings.thinking
    display = {"display": "summarized" if settings.show_thinking else "omitted"}
    if profile.thinking is ThinkingControl.BUDGET:
        if asked is None or asked == _OFF:
            return {}
        return {"thinking": {"type": "enabled", "budget_tokens": _budget(asked)}}
    if asked == _OFF:
        if not profile.thinking_optional:
            raise ValidationFailed(f"{profile.model} always thinks.")
        return {"thinking": {"type": "disabled"}}
    if asked is not None and asked not in profile.thinking_levels:
        raise ValidationFailed(f"{profile.model} takes thinking as one of {', '.join(profile.thinking_levels)}.")
    adaptive: dict[str, Any] = {"thinking": {"type": "adaptive", **display}}
    return adaptive | ({} if asked is None else {"output_config": {"effort": asked}})


def mark_last_block(data: bytes, lifetime_seconds: int) -> bytes:
    """Add a cache marker to the last block that accepts one: not thinking, empty text or an unknown type."""
    message = loads_exact(data)
    content = message.get("content")
    for block in reversed(content if isinstance(content, list) else []):
        if _takes_marker(block):
            block[_MARKER] = build_marker(lifetime_seconds)
            return dumps_exact(message)
    return data


def join_messages(
    payload: Payload, profile: ModelProfile, mark: Callable[[bytes, int], bytes] = mark_last_block
) -> bytes:
    """Join the messages with commas, with cache markers at the breakpoints of the payload. `mark` adds one."""
    marked: dict[int, bytes] = {}
    if payload.breakpoints:
        static_marks = count_static_breakpoints(len(split_static(payload.static_text)), profile.breakpoints)
        allowed = profile.breakpoints - static_marks - payload.marks_tools
        for index in payload.breakpoints[-allowed:] if allowed > 0 else ():
            if index < len(payload.messages):
                marked[index] = mark(payload.messages[index].data, payload.cache_seconds)
    return payload.join_messages(marked)


def _takes_marker(block: dict[str, Any]) -> bool:
    return _is_documented(block) and block.get("text") != ""


def _static_marker(payload: Payload, profile: ModelProfile) -> dict[str, Any]:
    lifetime_seconds = max(payload.static_cache_seconds, payload.cache_seconds)
    return {_MARKER: build_marker(lifetime_seconds)} if profile.breakpoints else {}


def _budget(asked: str) -> int:
    try:
        return int(asked)
    except ValueError:
        raise ValidationFailed("This model takes thinking as a number of tokens, or off.") from None
