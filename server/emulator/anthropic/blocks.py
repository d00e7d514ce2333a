"""The blocks of a response, each in both forms: whole, and as stream events."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.latency import pieces
from server.emulator.tokens import count_tokens

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
    """A tool call. `cut_at` cuts the JSON of the arguments after so many characters, as the token limit does."""
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
