"""The fields of a request: an unknown field, or one whose beta is off, is a 400 that names it."""

from typing import Any, Final

from server.emulator.anthropic.caller import (
    BINDING_CONTROLS,
    CLEAR_AT,
    COMPACT_AT_THRESHOLD,
    COMPACT_ON_DEMAND,
    CONTEXT_MANAGEMENT,
    DISPLAY_UPDATES,
    FALLBACK_CREDIT,
    FALLBACKS,
    MCP,
    MESSAGE_EFFORT,
    THREADS,
    TOOL_CHANGES,
    VERSION_2023,
    Caller,
)
from server.emulator.anthropic.errors import extra_input, invalid
from server.emulator.anthropic.shapes import (
    Check,
    Shape,
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    matching,
    nullable,
    number,
    one_of,
    string,
    tagged,
    text_or,
)

_MAX_MESSAGES: Final = 100_000
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_COMPACTION_BETAS: Final = (COMPACT_ON_DEMAND, COMPACT_AT_THRESHOLD)

_CACHE_CONTROL: Final = nullable(
    Shape(fields={"type": one_of("ephemeral"), "ttl": one_of("5m", "1h")}, required=("type",))
)


def _block(*required: str, **fields: Check) -> Shape:
    return Shape(fields={"type": string, **fields}, required=required)


_TEXT: Final = _block(
    "text",
    text=string,
    cache_control=_CACHE_CONTROL,
    citations=nullable(list_of(mapping)),
    emulated_note=string,  # a client may send back what the fault `unknown_parts` returned
)
_IMAGE: Final = _block("source", source=mapping, cache_control=_CACHE_CONTROL, transformations=nullable(mapping))
_DOCUMENT: Final = _block(
    "source",
    source=mapping,
    cache_control=_CACHE_CONTROL,
    citations=nullable(mapping),
    context=nullable(string),
    title=nullable(string),
)
_SEARCH_RESULT: Final = _block(
    "content",
    "source",
    "title",
    content=list_of(mapping),
    source=string,
    title=string,
    cache_control=_CACHE_CONTROL,
    citations=nullable(mapping),
)
_RESULT_CONTENT: Final = tagged(
    {
        "text": _TEXT,
        "image": _IMAGE,
        "document": _DOCUMENT,
        "search_result": _SEARCH_RESULT,
        "tool_reference": _block("tool_name", tool_name=string, cache_control=_CACHE_CONTROL),
    }
)
_SERVER_RESULT: Final = _block(
    "tool_use_id",
    "content",
    tool_use_id=string,
    content=anything,
    cache_control=_CACHE_CONTROL,
    caller=nullable(mapping),
)
_TOOL_CHANGE: Final = Shape(
    fields={"type": string, "tool": mapping, "cache_control": _CACHE_CONTROL}, required=("tool",)
)

_BLOCKS: Final = {
    "text": _TEXT,
    "image": _IMAGE,
    "document": _DOCUMENT,
    "search_result": _SEARCH_RESULT,
    "thinking": _block("signature", "thinking", signature=string, thinking=string),
    "redacted_thinking": _block("data", data=string),
    "tool_use": _block(
        "id",
        "input",
        "name",
        id=matching("^[a-zA-Z0-9_-]+$"),
        input=mapping,
        name=string,
        cache_control=_CACHE_CONTROL,
        caller=nullable(mapping),
        toolset_name=nullable(string),
    ),
    "tool_result": _block(
        "tool_use_id",
        tool_use_id=matching("^[a-zA-Z0-9_-]+$"),
        content=text_or(list_of(_RESULT_CONTENT)),
        is_error=boolean,
        cache_control=_CACHE_CONTROL,
        toolset_name=nullable(string),
    ),
    "server_tool_use": _block(
        "id", "input", "name", id=string, input=mapping, name=string, cache_control=_CACHE_CONTROL, caller=mapping
    ),
    "web_search_tool_result": _SERVER_RESULT,
    "web_fetch_tool_result": _SERVER_RESULT,
    "code_execution_tool_result": _SERVER_RESULT,
    "bash_code_execution_tool_result": _SERVER_RESULT,
    "text_editor_code_execution_tool_result": _SERVER_RESULT,
    "tool_search_tool_result": _SERVER_RESULT,
    "container_upload": _block("file_id", file_id=string, cache_control=_CACHE_CONTROL),
    "compaction": _block(
        content=nullable(string),
        signature=nullable(string),
        encrypted_content=nullable(string),
        tool_changes=nullable(list_of(mapping)),
        cache_control=_CACHE_CONTROL,
    ),
    "tool_addition": _TOOL_CHANGE,
    "tool_removal": _TOOL_CHANGE,
    "emulated_novelty": _block(novelty=mapping),  # a client may send back what the fault `unknown_parts` returned
}
_CONTENT: Final = text_or(
    list_of(
        tagged(
            _BLOCKS,
            betas={"compaction": _COMPACTION_BETAS, "tool_addition": TOOL_CHANGES, "tool_removal": TOOL_CHANGES},
        )
    )
)
_MESSAGE: Final = Shape(
    fields={
        "role": one_of("user", "assistant", "system"),
        "content": _CONTENT,
        "clear_at": nullable(one_of("next_user_message", "never")),
        "output_config": nullable(Shape(fields={"effort": nullable(one_of(*_EFFORTS))})),
    },
    required=("role", "content"),
    betas={"clear_at": (CLEAR_AT,), "output_config": (MESSAGE_EFFORT,)},
)

_TOOL_NAME: Final = matching("^[a-zA-Z0-9_-]{1,128}$")
_CUSTOM_TOOL: Final = Shape(
    fields={
        "type": nullable(string),
        "name": _TOOL_NAME,
        "input_schema": mapping,
        "description": string,
        "cache_control": _CACHE_CONTROL,
        "defer_loading": boolean,
        "strict": boolean,
        "eager_input_streaming": nullable(boolean),
        "input_examples": list_of(mapping),
        "allowed_callers": list_of(string),
    },
    required=("name", "input_schema"),
)
_SERVER_TOOLS: Final = (
    "bash_",
    "browser_",
    "code_execution_",
    "computer_",
    "memory_",
    "text_editor_",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
)


def _tool(value: Any, path: str, caller: Caller) -> None:
    mapping(value, path, caller)
    kind = value.get("type") or "custom"
    if kind == "custom":
        _CUSTOM_TOOL(value, f"{path}.custom", caller)
        if value["input_schema"].get("type") != "object":
            raise invalid(f"{path}.custom.input_schema.type: Input should be 'object'")
        return
    if not str(kind).startswith(_SERVER_TOOLS):
        raise invalid(
            f"{path}: Input tag '{kind}' found using 'type' does not match any of the expected tags: 'custom'"
        )
    # Their other fields differ and are not checked.
    string(value.get("name", ""), f"{path}.{kind}.name", caller)
    _CACHE_CONTROL(value.get("cache_control"), f"{path}.{kind}.cache_control", caller)


_BLOCK_BINDING: Final = nullable(Shape(fields={"prefix_mismatch_behavior": nullable(one_of("error", "drop_block"))}))


def _display(value: Any, path: str, caller: Caller) -> None:
    allowed = ("summarized", "omitted", "updates") if caller.has_beta(DISPLAY_UPDATES) else ("summarized", "omitted")
    nullable(one_of(*allowed))(value, path, caller)


_BINDING_BETA: Final = {"block_binding": (BINDING_CONTROLS,)}
_THINKING: Final = tagged(
    {
        "adaptive": Shape(
            fields={"type": string, "display": _display, "block_binding": _BLOCK_BINDING}, betas=_BINDING_BETA
        ),
        "enabled": Shape(
            fields={
                "type": string,
                "budget_tokens": integer(1_024),
                "display": _display,
                "block_binding": _BLOCK_BINDING,
            },
            required=("budget_tokens",),
            betas=_BINDING_BETA,
        ),
        "disabled": Shape(fields={"type": string}),
        "between_tools": Shape(fields={"type": string}),
    }
)
_TOOL_CHOICE: Final = tagged(
    {
        "auto": Shape(fields={"type": string, "disable_parallel_tool_use": boolean}),
        "any": Shape(fields={"type": string, "disable_parallel_tool_use": boolean}),
        "tool": Shape(
            fields={"type": string, "name": string, "disable_parallel_tool_use": boolean}, required=("name",)
        ),
        "none": Shape(fields={"type": string}),
    }
)
_OUTPUT_CONFIG: Final = Shape(
    fields={
        "effort": nullable(one_of(*_EFFORTS)),
        "format": nullable(
            Shape(fields={"type": one_of("json_schema"), "schema": mapping}, required=("type", "schema"))
        ),
    }
)

_SHARED: Final[dict[str, Check]] = {
    "model": string,
    "messages": list_of(_MESSAGE),
    "system": text_or(list_of(tagged({"text": _TEXT}))),
    "tools": list_of(_tool),
    "tool_choice": _TOOL_CHOICE,
    "thinking": _THINKING,
    "output_config": _OUTPUT_CONFIG,
    "cache_control": _CACHE_CONTROL,
    "speed": nullable(one_of("standard", "fast")),
    "compaction": nullable(
        Shape(fields={"type": one_of("summarize"), "instructions": nullable(string)}, required=("type",))
    ),
    "context_management": nullable(mapping),
    "mcp_servers": list_of(mapping),
}
_SHARED_BETAS: Final = {
    "compaction": (COMPACT_ON_DEMAND,),
    "context_management": (CONTEXT_MANAGEMENT, COMPACT_AT_THRESHOLD),
    "mcp_servers": MCP,
}
_COUNT: Final = Shape(fields=_SHARED, required=("model", "messages"), betas=_SHARED_BETAS)
_CREATE: Final = Shape(
    fields={
        **_SHARED,
        "max_tokens": integer(0),
        "stream": boolean,
        "stop_sequences": list_of(string),
        "metadata": Shape(fields={"user_id": nullable(string)}),
        "diagnostics": nullable(Shape(fields={"previous_message_id": nullable(string)})),
        "service_tier": one_of("auto", "standard_only"),
        "inference_geo": nullable(string),
        "container": anything,
        "thread": nullable(mapping),
        "fallbacks": anything,
        "fallback_credit_token": anything,
        "temperature": number,
        "top_p": number,
        "top_k": integer(0),
    },
    required=("model", "max_tokens", "messages"),
    betas={
        **_SHARED_BETAS,
        "thread": (THREADS,),
        "fallbacks": FALLBACKS,
        "fallback_credit_token": FALLBACK_CREDIT,
    },
)
_SAMPLING: Final = ("temperature", "top_p", "top_k")


def check_fields(body: Any, caller: Caller, *, counting: bool) -> None:
    """Check that the request has only known fields of the right types. Raises `Refused`."""
    if not isinstance(body, dict):
        raise invalid("Input should be a valid dictionary")
    if caller.version != VERSION_2023:
        for name in _SAMPLING:
            if name in body:
                raise extra_input(name)
    (_COUNT if counting else _CREATE)(body, "", caller)
    if not body["messages"]:
        raise invalid("messages: at least one message is required")
    if len(body["messages"]) > _MAX_MESSAGES:
        raise invalid(f"messages: List should have at most {_MAX_MESSAGES} items")
    names = [tool["name"] for tool in body.get("tools", []) if "name" in tool]
    if len(names) != len(set(names)):
        raise invalid("tools: Tool names must be unique.")
