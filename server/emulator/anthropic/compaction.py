"""On-demand compaction: a signed summary that replaces the messages it summarises.

Its signature carries the prefix state at the end of those messages, so that thinking in the turns kept after it still
has its prefix. That holds only if `system` and `tools` are unchanged, the first kept turn has the other role, and the
model that wrote the summary records prefixes; otherwise the prefix starts at the summary.
"""

from collections.abc import Mapping
from typing import Any, Final

from server.emulator.anthropic.caller import COMPACT_AT_THRESHOLD, Caller
from server.emulator.anthropic.errors import Refused, invalid
from server.emulator.anthropic.models import Model
from server.emulator.anthropic.prefix import Prefix, PrefixStart, close_prefix, hash_json
from server.emulator.anthropic.prompt import PlacedBlock, place_blocks, read_text
from server.emulator.anthropic.signatures import Claims, sign_claims, verify_claims
from server.emulator.signing import Signer

_SENTENCES: Final = {
    "compaction_block_ambiguous": "`messages` holds more than one `compaction` block with content. Send only the block "
    "the conversation returned last.",
    "compaction_block_misplaced": "The `compaction` block is not the first block of the conversation, or is in a "
    "`system` message.",
    "compaction_content_mismatch": "The `compaction` block's `content` differs from the text its `signature` recorded.",
    "compaction_signature_invalid": "The `compaction` block's `signature` does not verify.",
    "compaction_tool_changes_mismatch": "The `compaction` block's `tool_changes` differs from what was returned with "
    "the block.",
    "compaction_incomplete_turn": "The compaction request ends on an `assistant` turn that is not finished.",
    "compaction_nothing_to_summarize": "`messages` holds no `user` or `assistant` content to summarize or adopt.",
}
_QUOTED_CHARACTERS: Final = 200


def find_start(body: Mapping[str, Any], caller: Caller, *, signer: Signer, opening: PrefixStart) -> Prefix:
    """The prefix before the first message: `system` and `tools`, or the state of a compaction block.

    Raises `Refused` if a compaction block was altered.
    """
    blocks = [placed for placed in place_blocks(body["messages"]) if placed.block["type"] == "compaction"]
    written = [placed for placed in blocks if placed.block.get("content") is not None]
    if not written:
        return opening.prefix
    if len(written) > 1:
        raise _refuse("compaction_block_ambiguous", written[1].path)
    placed = written[0]
    if (placed.message, placed.index) != (0, 0) or placed.role == "system":
        raise _refuse("compaction_block_misplaced", placed.path)
    if not placed.block["content"]:
        raise invalid(f"{placed.path}.compaction.content: String should have at least 1 character")
    if placed.block.get("signature") is None and caller.has_beta(COMPACT_AT_THRESHOLD):
        return _begin_anew(placed, opening)
    claims = _open(placed, signer)
    return _continue(body, placed, claims, opening)


def check_request(body: Mapping[str, Any], model: Model, *, is_paused: bool) -> None:
    """Check a request for a summary: there are messages to summarise, and it ends between turns. Raises `Refused`."""
    if not model.compacts:
        raise invalid("compaction: on-demand compaction is not supported on this model")
    if body.get("context_management") is not None:
        raise invalid("compaction: cannot be combined with `context_management`")
    placed = [block for block in place_blocks(body["messages"]) if block.role != "system"]
    if not any(block.block.get("content") is not None or block.block["type"] != "compaction" for block in placed):
        raise _refuse("compaction_nothing_to_summarize")
    if is_paused or (placed[-1].role == "assistant" and _calls_tool(placed)):
        raise _refuse("compaction_incomplete_turn")


def build_block(
    body: Mapping[str, Any], model: Model, *, signer: Signer, opening: PrefixStart, start: Prefix
) -> dict[str, Any]:
    """The signed block."""
    end = close_prefix(body["messages"], start)
    content = summarize(body)
    claims: Claims = {
        "kind": "compaction",
        "content": hash_json(content),
        "tool_changes": hash_json([]),
        "opening": opening.prefix.digest,
        "prefix": end.digest if model.preserves_thinking else None,
        "role": end.role,
    }
    return {"type": "compaction", "content": content, "signature": sign_claims(signer, claims), "tool_changes": []}


def summarize(body: Mapping[str, Any]) -> str:
    """A deterministic summary: the first and last text of each side."""
    said: dict[str, list[str]] = {"user": [], "assistant": []}
    for message in body["messages"]:
        text = read_text(message["content"]).strip()
        if text and message["role"] in said:
            said[message["role"]].append(" ".join(text.split())[:_QUOTED_CHARACTERS])
    earlier = [
        placed.block["content"] for placed in place_blocks(body["messages"]) if placed.block["type"] == "compaction"
    ]
    parts = [str(summary) for summary in earlier if summary]
    if said["user"]:
        parts.append(f"The user began with: {said['user'][0]}")
        parts.append(f"The user last said: {said['user'][-1]}")
    if said["assistant"]:
        parts.append(f"The assistant last said: {said['assistant'][-1]}")
    instructions = (body["compaction"].get("instructions") or "").strip()
    if instructions:
        parts.append(f"Written under these instructions: {instructions}")
    return "\n".join(parts) or "Nothing was said in words."


def _continue(body: Mapping[str, Any], placed: PlacedBlock, claims: Claims, opening: PrefixStart) -> Prefix:
    kept = place_blocks(body["messages"])[1:]
    same_role = bool(kept) and kept[0].role == claims["role"]
    if claims["prefix"] is None or claims["opening"] != opening.prefix.digest or same_role:
        return _begin_anew(placed, opening)
    return Prefix(digest=claims["prefix"], role=claims["role"])


def _begin_anew(placed: PlacedBlock, opening: PrefixStart) -> Prefix:
    return Prefix(digest=hash_json(["summary", opening.prefix.digest, placed.block["content"]]))


def _open(placed: PlacedBlock, signer: Signer) -> Claims:
    block = placed.block
    claims = verify_claims(signer, block.get("signature"))
    if claims is None or claims["kind"] != "compaction":
        raise _refuse("compaction_signature_invalid", placed.path)
    if claims["content"] != hash_json(block["content"]):
        raise _refuse("compaction_content_mismatch", placed.path)
    if claims["tool_changes"] != hash_json(block.get("tool_changes") or []):
        raise _refuse("compaction_tool_changes_mismatch", placed.path)
    return claims


def _calls_tool(placed: list[PlacedBlock]) -> bool:
    last = placed[-1].message
    return any(block.message == last and block.block["type"] == "tool_use" for block in placed)


def _refuse(code: str, path: str = "") -> Refused:
    return invalid(f"{path}: {_SENTENCES[code]}" if path else _SENTENCES[code], error_code=code)
