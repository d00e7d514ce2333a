"""Decodes JSON into messages: keys in snake_case, values of the right types, and the API's error texts.

Both spellings of a key are accepted, a single value stands for a list of one, and null counts as absent. Free-form
values (arguments, responses, JSON schemas) stay as they are.

The messages are declared here with their fields, by snake_case name. A field is a scalar (`string`, `bool`, `int32`,
`number`, `bytes`, `enum`), `any` for free JSON, `struct` for a free object, or another message. The suffix `[]` means a
list, `{}` a mapping from names.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from server.emulator.gemini.errors import ApiError, unreadable
from server.emulator.signing import decode_base64

PART_DATA: Final = (
    "text",
    "inline_data",
    "function_call",
    "function_response",
    "file_data",
    "executable_code",
    "code_execution_result",
    "tool_call",
    "tool_response",
    "future_content",
)
"""The kinds of a part, of which it has one. The last kind is not part of the API: the fault `unknown_parts` returns it,
and a client that keeps unknown fields may send it back."""

ONE_OF: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "Part": {"data": PART_DATA},
    "CachedContent": {"expiration": ("expire_time", "ttl")},
}

_GENERATE: Final[Mapping[str, str]] = {
    "model": "string",
    "contents": "Content[]",
    "system_instruction": "Content",
    "tools": "Tool[]",
    "tool_config": "ToolConfig",
    "safety_settings": "SafetySetting[]",
    "generation_config": "GenerationConfig",
    "cached_content": "string",
    "service_tier": "enum",
    "store": "bool",
    "labels": "struct",
    "continuation_token": "bytes",
}

MESSAGES: Final[Mapping[str, Mapping[str, str]]] = {
    "GenerateContentRequest": _GENERATE,
    "CountTokensRequest": {
        "model": "string",
        "contents": "Content[]",
        "generate_content_request": "GenerateContentRequest",
    },
    "CachedContent": {
        "name": "string",
        "model": "string",
        "display_name": "string",
        "contents": "Content[]",
        "system_instruction": "Content",
        "tools": "Tool[]",
        "tool_config": "ToolConfig",
        "ttl": "string",
        "expire_time": "string",
        "create_time": "string",
        "update_time": "string",
        "usage_metadata": "any",
    },
    "Content": {"role": "string", "parts": "Part[]"},
    "Part": {
        "text": "string",
        "inline_data": "Blob",
        "function_call": "FunctionCall",
        "function_response": "FunctionResponse",
        "file_data": "FileData",
        "executable_code": "ExecutableCode",
        "code_execution_result": "CodeExecutionResult",
        "tool_call": "ToolCall",
        "tool_response": "ToolResponse",
        "thought": "bool",
        "thought_signature": "bytes",
        "video_metadata": "any",
        "media_resolution": "any",
        "media_processing": "any",
        "part_metadata": "struct",
        "audio_transcription": "any",
        "speech_metadata": "any",
        "future_content": "any",
        "future_hint": "any",
    },
    "Blob": {"mime_type": "string", "data": "bytes"},
    "FileData": {"mime_type": "string", "file_uri": "string"},
    "FunctionCall": {"id": "string", "name": "string", "args": "struct"},
    "FunctionResponse": {
        "id": "string",
        "name": "string",
        "response": "struct",
        "parts": "FunctionResponsePart[]",
        "will_continue": "bool",
        "scheduling": "enum",
    },
    "FunctionResponsePart": {"inline_data": "Blob", "file_data": "FileData", "media_processing": "any"},
    "ExecutableCode": {"id": "string", "language": "enum", "code": "string"},
    "CodeExecutionResult": {"id": "string", "outcome": "enum", "output": "string"},
    "ToolCall": {"id": "string", "tool_type": "enum", "args": "struct"},
    "ToolResponse": {"id": "string", "tool_type": "enum", "response": "struct"},
    "Tool": {
        "function_declarations": "FunctionDeclaration[]",
        "google_search": "any",
        "google_search_retrieval": "any",
        "google_maps": "any",
        "code_execution": "any",
        "computer_use": "any",
        "file_search": "any",
        "url_context": "any",
        "mcp_servers": "any[]",
    },
    "FunctionDeclaration": {
        "name": "string",
        "description": "string",
        "parameters": "Schema",
        "parameters_json_schema": "any",
        "response": "Schema",
        "response_json_schema": "any",
        "behavior": "enum",
    },
    "Schema": {
        "type": "enum",
        "format": "string",
        "title": "string",
        "description": "string",
        "nullable": "bool",
        "enum": "string[]",
        "items": "Schema",
        "max_items": "int32",
        "min_items": "int32",
        "properties": "Schema{}",
        "required": "string[]",
        "min_properties": "int32",
        "max_properties": "int32",
        "minimum": "number",
        "maximum": "number",
        "min_length": "int32",
        "max_length": "int32",
        "pattern": "string",
        "example": "any",
        "any_of": "Schema[]",
        "property_ordering": "string[]",
        "default": "any",
        "additional_properties": "any",
        "ref": "string",
        "defs": "Schema{}",
    },
    "ToolConfig": {
        "function_calling_config": "FunctionCallingConfig",
        "retrieval_config": "any",
        "include_server_side_tool_invocations": "bool",
    },
    "FunctionCallingConfig": {"mode": "enum", "allowed_function_names": "string[]"},
    "SafetySetting": {"category": "enum", "threshold": "enum"},
    "GenerationConfig": {
        "candidate_count": "int32",
        "stop_sequences": "string[]",
        "max_output_tokens": "int32",
        "temperature": "number",
        "top_p": "number",
        "top_k": "number",
        "seed": "int32",
        "response_mime_type": "string",
        "response_schema": "Schema",
        "response_json_schema": "any",
        "response_format": "any",
        "response_modalities": "enum[]",
        "response_logprobs": "bool",
        "logprobs": "int32",
        "presence_penalty": "number",
        "frequency_penalty": "number",
        "enable_enhanced_civic_answers": "bool",
        "speech_config": "any",
        "image_config": "any",
        "translation_config": "any",
        "audio_transcription_config": "any",
        "media_resolution": "enum",
        "thinking_config": "ThinkingConfig",
    },
    "ThinkingConfig": {"include_thoughts": "bool", "thinking_budget": "int32", "thinking_level": "enum"},
}


_UNDERSCORE: Final = re.compile(r"_([a-z0-9])")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_PACKAGE: Final = "type.googleapis.com/google.ai.generativelanguage.v1beta."


def decode(body: bytes, message: str) -> dict[str, Any]:
    """Decode the body as the named message. Raises `ApiError`."""
    try:
        value = json.loads(body or b"{}")
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not valid text
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"Invalid JSON payload received. {error}") from error
    decoder = _Decoder()
    decoded = decoder.read_message(value, message, "")
    if decoder.violations:
        raise unreadable(decoder.violations)
    return decoded


class _Decoder:
    """Continues after an error, because the API lists all of them."""

    def __init__(self) -> None:
        self.violations: list[tuple[str, str]] = []

    def read_message(self, value: Any, message: str, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse_value(path, f"{_PACKAGE}{message}", value)
            return {}
        known = _spellings(message)
        decoded: dict[str, Any] = {}
        for key, item in value.items():
            if key not in known:
                place = f" at '{path}'" if path else ""
                text = f'Invalid JSON payload received. Unknown name "{key}"{place}: Cannot find field.'
                self.violations.append((path, text))
            elif item is not None:
                name = known[key]
                self._refuse_second(message, name, decoded, path)
                below = f"{path}.{name}" if path else name
                decoded[name] = self._read_field(item, MESSAGES[message][name], below)
        return decoded

    def _refuse_second(self, message: str, name: str, decoded: Mapping[str, Any], path: str) -> None:
        for group, members in ONE_OF.get(message, {}).items():
            if name in members and any(other in decoded for other in members):
                text = f"oneof field '{group}' is already set. Cannot set '{camel_case(name)}'"
                place = f" at '{path}'" if path else ""
                self.violations.append((path, f"Invalid value{place} (oneof), {text}"))

    def _read_field(self, value: Any, kind: str, path: str) -> Any:
        if kind.endswith("[]"):
            items = value if isinstance(value, list) else [value]
            return [self._read_field(item, kind[:-2], f"{path}[{index}]") for index, item in enumerate(items)]
        if kind.endswith("{}"):
            if not isinstance(value, Mapping):
                self._refuse_value(path, "MAP", value)
                return {}
            return {name: self._read_field(item, kind[:-2], f"{path}[{name!r}]") for name, item in value.items()}
        if kind in MESSAGES:
            return self.read_message(value, kind, path)
        return self._read_scalar(value, kind, path)

    def _read_scalar(self, value: Any, kind: str, path: str) -> Any:
        if kind == "bytes" and isinstance(value, str) and decode_base64(value) is None:
            text = f"Invalid value at '{path}' (TYPE_BYTES), Base64 decoding failed for \"{value}\""
            self.violations.append((path, text))
        elif not _SCALARS[kind](value):
            self._refuse_value(path, _TYPE_NAMES[kind], value)
        elif kind in {"int32", "number"} and isinstance(value, str):
            return float(value)
        return value

    def _refuse_value(self, path: str, kind: str, value: Any) -> None:
        text = f"Invalid value at '{path}' ({kind}), {json.dumps(value, ensure_ascii=False)}"
        self.violations.append((path, text))


def camel_case(name: str) -> str:
    """`thought_signature` as `thoughtSignature`."""
    return _UNDERSCORE.sub(lambda match: match[1].upper(), name)


def _spellings(message: str) -> dict[str, str]:
    return {spelling: name for name in MESSAGES[message] for spelling in (name, camel_case(name))}


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return _NUMBER.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


_SCALARS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int32": lambda value: _is_number(value) and float(value).is_integer(),
    "number": _is_number,
    "enum": lambda value: isinstance(value, str | int) and not isinstance(value, bool),
    "struct": lambda value: isinstance(value, Mapping),
    "any": lambda _: True,
}
_TYPE_NAMES: Final[Mapping[str, str]] = {
    "string": "TYPE_STRING",
    "bytes": "TYPE_BYTES",
    "bool": "TYPE_BOOL",
    "int32": "TYPE_INT32",
    "number": "TYPE_FLOAT",
    "enum": "TYPE_ENUM",
    "struct": "type.googleapis.com/google.protobuf.Struct",
}
