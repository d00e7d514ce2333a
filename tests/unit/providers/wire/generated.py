"""Generated streams in the formats of the two providers."""

import base64
import json
from typing import Any

from hypothesis import strategies as st

from tests.support.strategies import json_values

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text("abcdefgh_", min_size=1, max_size=8)
unknown = st.dictionaries(names.map(lambda name: f"future_{name}"), json_values, max_size=2)
signatures = st.binary(min_size=1, max_size=60).flatmap(
    lambda data: st.sampled_from(
        [
            base64.b64encode(data).decode(),
            base64.b64encode(data).decode().rstrip("="),
            base64.urlsafe_b64encode(data).decode(),
            base64.urlsafe_b64encode(data).decode().rstrip("="),
        ]
    )
)
signed: st.SearchStrategy[dict[str, Any]] = st.just({}) | st.builds(lambda text: {"thoughtSignature": text}, signatures)
arguments = st.dictionaries(words, json_values, max_size=3)


def _part(shape: dict[str, Any], signature: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {**shape, **signature, **more}


gemini_parts = st.builds(
    _part,
    st.builds(lambda text: {"text": text}, words)
    | st.builds(lambda text, thought: {"text": text, "thought": thought}, words, st.booleans())
    | st.builds(lambda name, args: {"functionCall": {"name": name, "args": args}}, names, arguments)
    | st.builds(
        lambda id_, name, args: {"functionCall": {"id": id_, "name": name, "args": args}}, names, names, arguments
    )
    | st.builds(lambda name, value: {f"future_{name}": value}, names, json_values),
    signed,
    st.just({}) | unknown,
)


def gemini_chunk(parts: list[dict[str, Any]], finish: str | None, more: dict[str, Any]) -> dict[str, Any]:
    end = {} if finish is None else {"finishReason": finish}
    return {"candidates": [{"content": {"role": "model", "parts": parts}, **end, **more}], "responseId": "made-up"}


def _number_ids(chunks: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """No provider gives an id twice in an answer."""
    count = 0
    for part in (part for parts in chunks for part in parts):
        if "id" in part.get("functionCall", {}):
            count += 1
            part["functionCall"] = part["functionCall"] | {"id": f"{part['functionCall']['id']}_{count}"}
    return chunks


gemini_chunks = st.lists(st.lists(gemini_parts, max_size=3), max_size=6).map(_number_ids)


def _frames(documents: list[dict[str, Any]], end: str) -> bytes:
    lines = []
    for document in documents:
        if "type" in document:
            lines.append(f"event: {document['type']}{end}")
        lines.append(f"data: {json.dumps(document)}{end}{end}")
    return "".join(lines).encode()


gemini_bodies = st.builds(
    lambda chunks, finish, more, end: _frames(
        [*(gemini_chunk(parts, None, more) for parts in chunks), *([gemini_chunk([], finish, {})] if finish else [])],
        end,
    ),
    gemini_chunks,
    st.sampled_from(["STOP", "MAX_TOKENS", "SAFETY", None]),
    unknown,
    st.sampled_from(["\n", "\r\n"]),
)


@st.composite
def anthropic_blocks(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The start of a block and its deltas."""
    more = draw(unknown)
    match draw(st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "future"])):
        case "text":
            return {"type": "text", "text": "", **more}, [
                {"type": "text_delta", "text": text} for text in draw(st.lists(words, max_size=4))
            ]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": text} for text in draw(st.lists(words, max_size=3))]
            end = draw(
                st.lists(st.builds(lambda text: {"type": "signature_delta", "signature": text}, signatures), max_size=1)
            )
            return {"type": "thinking", "thinking": "", "signature": "", **more}, [*deltas, *end]
        case "redacted_thinking":
            return {"type": "redacted_thinking", "data": draw(signatures), **more}, []
        case "tool_use":
            text = json.dumps(draw(arguments))
            cut = draw(st.integers(0, len(text)))
            pieces = ["", text[:cut], text[cut:]]
            shell = {"type": "tool_use", "id": f"toolu_{draw(names)}", "name": draw(names), "input": {}, **more}
            return shell, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        case _:
            return {"type": f"future_{draw(names)}", "body": "", **more}, [
                {"type": "future_delta", "body": text} for text in draw(st.lists(words, max_size=2))
            ]


def anthropic_events(blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]], reason: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg_made_up", "usage": {"input_tokens": 3, "output_tokens": 1}}}
    ]
    for index, (start, deltas) in enumerate(blocks):
        if start["type"] == "tool_use":
            # No provider gives an id twice in an answer.
            start["id"] = f"toolu_{index}"
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    end = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 9}}
    return [*events, end, {"type": "message_stop"}]


anthropic_bodies = st.builds(
    lambda blocks, reason, kept: _frames(anthropic_events(blocks, reason)[:kept], "\n"),
    st.lists(anthropic_blocks(), max_size=4),
    st.sampled_from(["end_turn", "tool_use", "max_tokens", "refusal", "something_new"]),
    st.none() | st.integers(0, 12),
)
