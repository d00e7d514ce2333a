"""Roles, empty blocks and the pairing of tool calls with their results."""

from collections.abc import Sequence
from typing import Any, Final

from server.emulator.anthropic.caller import VERSION_2023, Caller
from server.emulator.anthropic.errors import extra_input, invalid
from server.emulator.anthropic.models import Model
from server.emulator.anthropic.prompt import MessageRun, PlacedBlock, content_blocks, join_runs, place_blocks

_ONLY_ASSISTANT: Final = frozenset({"thinking", "redacted_thinking", "tool_use", "server_tool_use", "compaction"})
_ONLY_USER: Final = frozenset({"tool_result", "image", "container_upload"})
_ONLY_SYSTEM: Final = frozenset({"tool_addition", "tool_removal"})
_SERVER_RESULT: Final = "_tool_result"


def check_messages(body: dict[str, Any], model: Model, caller: Caller) -> None:
    """Check the order of messages and blocks, except how they end. Raises `Refused`."""
    messages = body["messages"]
    placed = place_blocks(messages)
    _check_first_role(messages)
    _check_system_messages(messages, model)
    _check_not_empty(messages, body.get("system", []))
    for block in placed:
        _check_place(block, caller)
    _check_unique_ids(placed)
    runs = join_runs(messages)
    _check_results_follow(runs)
    _check_results_belong(runs)
    _check_server_tools(runs)


def check_ending(body: dict[str, Any], model: Model, *, continues_paused_turn: bool) -> None:
    """Check that the conversation ends with a turn for the model to answer. Raises `Refused`."""
    last = [message for message in body["messages"] if message["role"] != "system"][-1]
    if last["role"] != "assistant" or continues_paused_turn:
        return
    if not model.takes_prefill:
        raise invalid(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )
    blocks = content_blocks(last["content"])
    if blocks and blocks[-1]["type"] == "text" and blocks[-1]["text"] != blocks[-1]["text"].rstrip():
        raise invalid("messages: final assistant content cannot end with trailing whitespace")


def _check_first_role(messages: Sequence[dict[str, Any]]) -> None:
    first = messages[0]
    if first["role"] == "user":
        return
    blocks = content_blocks(first["content"])
    if first["role"] == "assistant" and blocks and blocks[0]["type"] == "compaction":
        return
    raise invalid('messages: first message must use the "user" role')


def _check_system_messages(messages: Sequence[dict[str, Any]], model: Model) -> None:
    for number, message in enumerate(messages):
        if message["role"] != "system":
            for name in ("clear_at", "output_config"):
                if name in message:
                    raise extra_input(f"messages.{number}.{name}")
            continue
        if not model.takes_system_messages:
            raise invalid(
                'messages: Unexpected role "system". The Messages API accepts a top-level `system` parameter, '
                'not "system" as an input message role.'
            )
        _check_system_place(messages, number)
        _check_cleared(message, number)


def _check_system_place(messages: Sequence[dict[str, Any]], number: int) -> None:
    before = messages[number - 1]
    if before["role"] == "assistant":
        blocks = content_blocks(before["content"])
        follows_server_tool = bool(blocks) and _is_server_result(blocks[-1])
        if not follows_server_tool:
            raise invalid(
                f"messages.{number}: role 'system' must follow a 'user' message or an 'assistant' message that ends "
                "with a server tool result"
            )
    if number + 1 < len(messages) and messages[number + 1]["role"] == "user":
        raise invalid(f"messages.{number}: role 'system' must precede an 'assistant' message or end the array")


def _check_cleared(message: dict[str, Any], number: int) -> None:
    if message.get("clear_at") != "next_user_message":
        return
    for index, block in enumerate(content_blocks(message["content"])):
        path = f"messages.{number}.content.{index}"
        if block["type"] != "text":
            raise invalid(f"{path}: a message with `clear_at` may hold `text` blocks only")
        if block.get("cache_control"):
            raise invalid(f"{path}.cache_control: cache_control cannot be set in a message with `clear_at`")


def _check_not_empty(messages: Sequence[dict[str, Any]], system: str | list[dict[str, Any]]) -> None:
    for number, message in enumerate(messages):
        is_final_assistant = number == len(messages) - 1 and message["role"] == "assistant"
        if message["content"] == [] and not is_final_assistant:
            raise invalid(
                f"messages.{number}: all messages must have non-empty content except for the optional final "
                "assistant message"
            )
        _check_texts(content_blocks(message["content"]), "messages", f"messages.{number}.content")
    if system:
        _check_texts(content_blocks(system), "system", "system")


def _check_texts(blocks: Sequence[dict[str, Any]], where: str, path: str) -> None:
    for index, block in enumerate(blocks):
        if block["type"] != "text":
            continue
        if not block["text"]:
            if block.get("cache_control"):
                raise invalid(f"{path}.{index}.text: cache_control cannot be set for empty text blocks")
            raise invalid(f"{where}: text content blocks must be non-empty")
        if not block["text"].strip():
            raise invalid(f"{where}: text content blocks must contain non-whitespace text")


def _check_place(placed: PlacedBlock, caller: Caller) -> None:
    kind, role = placed.block["type"], placed.role
    for kinds, owner in ((_ONLY_ASSISTANT, "assistant"), (_ONLY_USER, "user"), (_ONLY_SYSTEM, "system")):
        if kind in kinds and role != owner:
            raise invalid(f"{placed.path}: `{kind}` blocks can only be in `{owner}` messages")
    if role == "system" and kind not in {"text", "compaction"} | _ONLY_SYSTEM:
        raise invalid(f"{placed.path}: `{kind}` blocks cannot be in `system` messages")
    if caller.version != VERSION_2023:
        if kind == "document" and role == "assistant":
            raise invalid(f"{placed.path}: `document` blocks can only be in `user` messages")
        if kind == "text" and role == "user" and placed.block.get("citations"):
            raise extra_input(f"{placed.path}.text.citations")


def _check_unique_ids(placed: Sequence[PlacedBlock]) -> None:
    seen: set[str] = set()
    for block in placed:
        if block.block["type"] in {"tool_use", "server_tool_use"}:
            if block.block["id"] in seen:
                raise invalid(f"{block.path}: `tool_use` ids must be unique")
            seen.add(block.block["id"])


def _check_results_follow(runs: Sequence[MessageRun]) -> None:
    """Check that the results of all calls begin the next message; a text before the results hides them."""
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        if not run.tool_use_ids or run.role != "assistant":
            continue
        answered = _leading_results(following)
        if missing := [id_ for id_ in run.tool_use_ids if id_ not in answered]:
            holder = next(block.message for block in run.blocks if block.block.get("id") == missing[0])
            raise invalid(
                f"messages.{holder}: `tool_use` ids were found without `tool_result` blocks immediately after: "
                f"{', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in the "
                "next message."
            )


def _leading_results(run: MessageRun | None) -> set[str]:
    found: set[str] = set()
    for placed in run.blocks if run is not None and run.role == "user" else ():
        if placed.block["type"] != "tool_result":
            break
        found.add(placed.block["tool_use_id"])
    return found


def _check_results_belong(runs: Sequence[MessageRun]) -> None:
    calls: list[str] = []
    toolsets: dict[str, str | None] = {}
    for run in runs:
        seen: set[str] = set()
        for placed in run.blocks:
            if placed.block["type"] != "tool_result":
                continue
            id_ = placed.block["tool_use_id"]
            if id_ not in calls:
                raise invalid(
                    f"{placed.path}: unexpected `tool_use_id` found in `tool_result` blocks: {id_}. Each `tool_result` "
                    "block must have a corresponding `tool_use` block in the previous message."
                )
            if id_ in seen:
                raise invalid(
                    f"{placed.path}: each tool_use must have a single result. Found multiple `tool_result` blocks "
                    f"with id: {id_}"
                )
            if toolsets.get(id_) != placed.block.get("toolset_name"):
                raise invalid(f"{placed.path}.toolset_name: does not match the `toolset_name` of the `tool_use` block")
            seen.add(id_)
        calls = run.tool_use_ids
        toolsets = {
            placed.block["id"]: placed.block.get("toolset_name")
            for placed in run.blocks
            if placed.block["type"] == "tool_use"
        }


def _check_server_tools(runs: Sequence[MessageRun]) -> None:
    """Check that server tool calls have their results in the same message, unless the turn was paused.

    If the message also has a client tool call, the results may follow the result of that call: at the start of the next
    assistant message.
    """
    for number, run in enumerate(runs[:-1]):
        holders = [run]
        results = runs[number + 1]
        if run.tool_use_ids and results.block_types == {"tool_result"}:
            if number + 2 == len(runs):
                continue
            holders.append(runs[number + 2])
        answered = {
            placed.block.get("tool_use_id")
            for holder in holders
            for placed in holder.blocks
            if _is_server_result(placed.block)
        }
        for placed in run.blocks:
            call = placed.block
            if call["type"] == "server_tool_use" and call["id"] not in answered:
                raise invalid(
                    f"`{call['name']}` tool use with id `{call['id']}` was found without a corresponding "
                    f"`{call['name']}_tool_result` block"
                )


def _is_server_result(block: dict[str, Any]) -> bool:
    return str(block["type"]).endswith(_SERVER_RESULT)
