"""Build Gemini requests from payloads. Pure."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from google.genai import types

from server.conversation.assistant import Tool
from server.conversation.block import Blob, Block, ImageBlock, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import Internal, ValidationFailed
from server.conversation.exact_json import dumps_exact, dumps_sendable, loads_exact, make_sendable
from server.conversation.payload import CallSettings, Layer, Payload, PayloadMessage, split_static
from server.providers.model_profile import ModelProfile, ThinkingControl

_SIGNATURE: Final = "thoughtSignature"
_OFF: Final = "off"
_SPLICED: Final = "x"
_SPLICED_TOOL: Final = Tool(name=_SPLICED, description=_SPLICED, parameters={})
_SPLICED_SUMMARY: Final = PayloadMessage(layer=Layer.BUFFERED, data=b"{}", is_signed_summary=True)
_OWN_MEMBERS: Final = frozenset({"contents", "systeminstruction", "tools", "cachedcontent"})


def user_message(blocks: Sequence[Block], blobs: Mapping[str, Blob], dynamic: str | None = None) -> bytes:
    """Build a user task as one content. Gemini accepts empty text, but no content without parts."""
    parts: list[dict[str, Any]] = [{"text": dynamic}] if dynamic else []
    for block in blocks:
        match block:
            case TextBlock():
                parts.append({"text": block.text})
            case ImageBlock():
                data = base64.b64encode(blobs[block.sha256].data).decode()
                parts.append({"inlineData": {"mimeType": block.media_type, "data": data}})
            case _:
                raise ValidationFailed(f"A user task cannot hold a {type(block).__name__}.")
    return dumps_sendable({"role": "user", "parts": parts or [{"text": ""}]})


def tool_message(blocks: Sequence[Block], calls: Sequence[Block], dynamic: str | None = None) -> bytes:
    """Build all results of a step as one content, in the order of the calls and with their names."""
    results = {block.tool_call_id: block for block in blocks if isinstance(block, ToolResultBlock)}
    parts: list[dict[str, Any]] = []
    for call in calls:
        if isinstance(call, ToolCallBlock) and call.id in results:
            result = results[call.id]
            response = {"error" if result.is_error else "output": result.output}
            parts.append({"functionResponse": {**_id_of(call), "name": call.name, "response": response}})
    return dumps_sendable({"role": "user", "parts": [*parts, *([{"text": dynamic}] if dynamic else ())]})


def _id_of(call: ToolCallBlock) -> dict[str, str]:
    """Return the id for Gemini: a call that came without an id, and its result, are sent back without one."""
    return {} if call.is_id_ours else {"id": call.id}


def dynamic_message(dynamic: str) -> bytes:
    """Build the dynamic layer as a content of its own."""
    return dumps_sendable({"role": "user", "parts": [{"text": dynamic}]})


def foreign_message(blocks: Sequence[Block]) -> bytes | None:
    """Build another vendor's answer: text and calls, with the documented mark for calls that Gemini did not make."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock() if block.text:
                parts.append({"text": block.text})
            case ToolCallBlock():
                call = {**_id_of(block), "name": block.name, "args": dict(block.arguments)}
                first = not any("functionCall" in part for part in parts)
                mark = {_SIGNATURE: UNSIGNED_CALL} if first else {}
                parts.append({"functionCall": call} | mark)
            case _:
                continue
    return dumps_sendable({"role": "model", "parts": parts}) if parts else None


def unsigned_message(native: bytes, *, documented_only: bool = False) -> bytes | None:
    """Build an answer of Gemini without thoughts and signatures. Its calls get the mark of unsigned calls.

    A part with empty text existed only for its signature and is dropped.
    """
    content = loads_exact(native)
    parts: list[dict[str, Any]] = []
    marked = False
    for part in content["parts"]:
        bare = {name: value for name, value in part.items() if name != _SIGNATURE}
        if documented_only:
            bare = {name: value for name, value in bare.items() if name in _PART_MEMBERS}
            bare = bare if bare.keys() & _CONTENT_MEMBERS else {"text": ""}
        if "functionCall" in bare:
            bare |= {} if marked else {_SIGNATURE: UNSIGNED_CALL}
            marked = True
        elif part.get("thought") or bare == {"text": ""}:
            continue
        parts.append(bare)
    return dumps_exact(content | {"parts": parts}) if parts else None


_CONTENT_MEMBERS: Final = frozenset(
    {
        "text",
        "functionCall",
        "inlineData",
        "fileData",
        "executableCode",
        "codeExecutionResult",
        "toolCall",
        "toolResponse",
    }
)
"""A part of an answer has exactly one of these members."""
_PART_MEMBERS: Final = _CONTENT_MEMBERS | {"thought", "videoMetadata", "mediaResolution", "partMetadata"}
"""All members that a part may have, except the signature."""
UNSIGNED_CALL: Final = base64.b64encode(b"skip_thought_signature_validator").decode()
"""The documented mark of a call that Gemini did not make, encoded as its clients send it."""


def reduce_payload(payload: Payload) -> Payload:
    """Return the shape of the request: the payload with constants for all that is spliced in, see
    `server.providers.wire.request_template`.

    Gemini has no cache markers, no diagnosis, no containers and no continuation, so the request contains nothing of
    those members.
    """
    return Payload(
        model=payload.model,
        settings=payload.settings,
        static_text=_SPLICED if payload.static_text else "",
        tools=(_SPLICED_TOOL,) if payload.tools else (),
        messages=() if payload.signed_summary is None else (_SPLICED_SUMMARY,),
        cached_content=payload.cached_content,
        requests_summary=payload.requests_summary,
    )


def build_layers(payload: Payload, placeholder: Callable[[str], str]) -> dict[str, Any]:
    """Build the large members as placeholders."""
    body: dict[str, Any] = {"contents": [placeholder("contents")]}
    if payload.cached_content is not None:
        # The cache contains the other members; a request with both is rejected.
        return body
    if payload.static_text:
        body["systemInstruction"] = placeholder("systemInstruction")
    if payload.tools:
        body["tools"] = placeholder("tools")
    return body


def build_config(payload: Payload, profile: ModelProfile, layers: Mapping[str, Any]) -> types.GenerateContentConfig:
    """Build the whole request, with `layers` as placeholders. Automatic features of the SDK are switched off."""
    settings = payload.settings
    if payload.requests_summary or payload.signed_summary is not None:
        raise Internal("Gemini does not support signed summaries.")
    config: dict[str, Any] = {
        "automatic_function_calling": types.AutomaticFunctionCallingConfig(disable=True),
        "automatic_continuation": False,
        "max_output_tokens": settings.max_output_tokens,
        "stop_sequences": list(settings.stop_sequences) or None,
        "thinking_config": build_thinking(settings, profile),
    }
    if settings.safety:
        config["safety_settings"] = build_safety(settings)
    if profile.accepts_sampling and settings.temperature is not None:
        config["temperature"] = settings.temperature
    if payload.cached_content is not None:
        config["cached_content"] = payload.cached_content
    config["http_options"] = types.HttpOptions(extra_body={**build_extra(settings, config), **layers})
    return types.GenerateContentConfig(**config)


def build_safety(settings: CallSettings) -> list[types.SafetySetting]:
    """Build the thresholds by category. Raises `ValidationFailed` for an unknown name."""
    for word, known in (
        *((category, types.HarmCategory) for category in settings.safety),
        *((threshold, types.HarmBlockThreshold) for threshold in settings.safety.values()),
    ):
        if word not in known.__members__:
            raise ValidationFailed(f"{word} is not a {known.__name__} of Gemini.")
    return [
        types.SafetySetting(category=types.HarmCategory[category], threshold=types.HarmBlockThreshold[threshold])
        for category, threshold in settings.safety.items()
    ]


def build_extra(settings: CallSettings, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that an assistant adds, without those that are set here, which they would override."""
    own_names = _OWN_MEMBERS | {_bare(name) for name, value in own.items() if value is not None}

    def added(members: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in members.items() if _bare(name) not in own_names}

    return {
        name: added(value) if _bare(name) == "generationconfig" and isinstance(value, Mapping) else value
        for name, value in added(settings.extra).items()
    }


def adds_tool_config(settings: CallSettings) -> bool:
    """Whether the members that an assistant adds include a tool config."""
    return any(_bare(name) == "toolconfig" for name in settings.extra)


def _bare(name: str) -> str:
    """Normalise a member's name: Gemini accepts camel case and snake case."""
    return name.replace("_", "").lower()


def build_system(payload: Payload) -> types.ContentUnion | None:
    """Build the static text for the SDK; a long one is split."""
    pieces = [make_sendable(piece) for piece in split_static(payload.static_text)]
    return pieces if len(pieces) > 1 else make_sendable(payload.static_text) or None


def build_tools(payload: Payload) -> list[types.Tool] | None:
    """Build one `Tool` with all functions, in their order, for the SDK."""
    if not payload.tools:
        return None
    declarations = [
        types.FunctionDeclaration(
            name=tool.name,
            description=make_sendable(tool.description),
            parameters_json_schema=make_sendable(json.loads(json.dumps(tool.parameters))),
        )
        for tool in payload.tools
    ]
    return [types.Tool(function_declarations=declarations)]


def encode_system(static_text: str) -> bytes:
    """Encode the static text as the SDK would."""
    return dumps_sendable({"parts": [{"text": piece} for piece in split_static(static_text)], "role": "user"})


def encode_tools(tools: Sequence[Tool]) -> bytes:
    """Encode the tools as the SDK would."""
    declarations = [
        {"description": tool.description, "name": tool.name, "parameters_json_schema": dict(tool.parameters)}
        for tool in tools
    ]
    return dumps_sendable([{"functionDeclarations": declarations}])


def build_thinking(settings: CallSettings, profile: ModelProfile) -> types.ThinkingConfig:
    """Build the level or the budget of thinking. Raises `ValidationFailed` if the model does not support it."""
    asked = settings.thinking
    if asked is None:
        return types.ThinkingConfig(include_thoughts=settings.show_thinking)
    if profile.thinking is ThinkingControl.BUDGET:
        if asked == _OFF and not profile.thinking_optional:
            raise ValidationFailed(f"{profile.model} always thinks.")
        budget = 0 if asked == _OFF else _budget(asked)
        return types.ThinkingConfig(include_thoughts=settings.show_thinking and budget != 0, thinking_budget=budget)
    if asked not in profile.thinking_levels:
        raise ValidationFailed(f"{profile.model} takes thinking as one of {', '.join(profile.thinking_levels)}.")
    return types.ThinkingConfig(
        include_thoughts=settings.show_thinking, thinking_level=types.ThinkingLevel(asked.upper())
    )


def _budget(asked: str) -> int:
    try:
        return int(asked)
    except ValueError:
        raise ValidationFailed("This model takes thinking as a number of tokens, or off.") from None


def join_messages(payload: Payload) -> bytes:
    """Join the contents with commas."""
    return payload.join_messages()
