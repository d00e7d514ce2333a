"""The prefix of a block as one hash: `system`, `tools` and every earlier block.

Thinking and cache markers are left out. Neither the order of keys nor the way messages of one role are split changes
the hash; every other value does. The hash is folded block by block, so that a compaction block can carry the state it
replaces.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from server.emulator.anthropic.prompt import PlacedBlock, content_blocks, place_blocks
from server.emulator.tokens import canonical_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    digest: str
    role: str = ""
    """Of the last block in it."""

    def extended(self, role: str, block: Mapping[str, Any]) -> "Prefix":
        """The prefix with one more block. Thinking does not change it."""
        if block["type"] in {"thinking", "redacted_thinking"}:
            return self
        mark = "" if role == self.role else role
        return Prefix(digest=hash_json([self.digest, mark, plain_block(block)]), role=role)

    def marked(self, role: str, extras: Mapping[str, Any]) -> "Prefix":
        """The prefix with the other fields of a message."""
        return replace(self, digest=hash_json([self.digest, role, dict(extras)])) if extras else self


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStart:
    """The hashes of `system` and `tools`, separate, so that an error can say which of them changed."""

    system: str
    tools: str

    @property
    def prefix(self) -> Prefix:
        return Prefix(digest=hash_json([self.system, self.tools]))


def open_prefix(body: Mapping[str, Any]) -> PrefixStart:
    """The start of the prefix. Deferred tools that no message refers to do not count."""
    referred = set(_referred_tools(body["messages"]))
    tools = [
        {key: value for key, value in tool.items() if key != "cache_control"}
        for tool in body.get("tools", [])
        if not tool.get("defer_loading") or tool.get("name") in referred
    ]
    system = [plain_block(block) for block in content_blocks(body.get("system", []))]
    return PrefixStart(system=hash_json(system), tools=hash_json(tools))


def walk(messages: list[dict[str, Any]], start: Prefix) -> Iterator[tuple[PlacedBlock, Prefix]]:
    """Yield each block of the messages with its prefix."""
    prefix = start
    for placed in place_blocks(messages):
        if placed.index == 0:
            prefix = prefix.marked(placed.role, _extras(messages[placed.message]))
        yield placed, prefix
        if placed.block["type"] != "compaction":
            prefix = prefix.extended(placed.role, placed.block)


def close_prefix(messages: list[dict[str, Any]], start: Prefix) -> Prefix:
    """The prefix of the response."""
    last = start
    for placed, before in walk(messages, start):
        last = before if placed.block["type"] == "compaction" else before.extended(placed.role, placed.block)
    return last


def plain_block(block: Mapping[str, Any]) -> dict[str, Any]:
    """The block without its cache marker and without fields that are null."""
    plain = {key: value for key, value in block.items() if key != "cache_control" and value is not None}
    if block["type"] == "tool_result" and "content" in plain:
        plain["content"] = [plain_block(inner) for inner in content_blocks(plain["content"])]
    return plain


def hash_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _extras(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in {"role", "content"} and value is not None}


def _referred_tools(messages: list[dict[str, Any]]) -> Iterator[str]:
    for placed in place_blocks(messages):
        block = placed.block
        if block["type"] == "tool_use":
            yield str(block["name"])
        if block["type"] == "tool_result":
            for inner in content_blocks(block.get("content", [])):
                if inner["type"] == "tool_reference":
                    yield str(inner["tool_name"])
