"""The request to a judge that compares a candidate answer with the recorded one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.conversation.block import Block, ImageBlock, JsonValue, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.payload import Layer, Payload, PayloadMessage
from server.payload.arguments import clone
from server.payload.settings import read_settings
from server.providers.provider import Provider

JUDGE: Final = "judge"
"""The `kind` of the warning that is stored with the call."""
_MAX_CHARACTERS: Final = 50_000
"""Maximum length of each text and value in the request."""
_FORM: Final = (
    'Answer with one JSON object and nothing else: {"score": a number from 0, the candidate is of no use, '
    'to 1, it is as good as the recorded answer or better, "reason": one sentence}.'
)


def write_question(asked: Sequence[Block], recorded: Sequence[Block], candidate: Sequence[Block]) -> str:
    """Write the message to a judge: the input and both answers as JSON data of bounded size, and the answer format."""
    data = {"input": _describe(asked), "recorded": _describe(recorded), "candidate": _describe(candidate)}
    return f"{json.dumps(data, ensure_ascii=False)}\n\n{_FORM}"


def build_judge_payload(
    provider: Provider, model: str, prompt: str, settings: Mapping[str, JsonValue], question: str
) -> Payload:
    """Build the request. The same values give the same bytes."""
    data = provider.user_message((TextBlock(text=question),), {})
    return Payload(
        model=model,
        static_text=prompt,
        tools=(),
        messages=(PayloadMessage(layer=Layer.TRIGGER, data=data, role="user"),),
        settings=read_settings(settings),
    )


def read_score(text: str) -> tuple[float, str] | None:
    """Read the score and its reason. Returns None if the answer has another form."""
    begin, end = text.find("{"), text.rfind("}")
    try:
        verdict = json.loads(text[begin : end + 1]) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return None
    score = verdict.get("score") if isinstance(verdict, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        return None
    reason = verdict.get("reason") if isinstance(verdict, dict) else None
    return float(score), reason if isinstance(reason, str) else ""


def _describe(blocks: Sequence[Block]) -> list[Any]:
    described: list[Any] = []
    for block in blocks:
        match block:
            case TextBlock() if block.text:
                described.append({"text": block.text[:_MAX_CHARACTERS]})
            case ToolCallBlock():
                described.append({"tool_call": block.name, "arguments": _truncate(block.arguments)})
            case ToolResultBlock():
                described.append({"tool_result": _truncate(block.output), "is_error": block.is_error})
            case ImageBlock():
                described.append({"image": block.media_type})
            case _:
                continue
    return described


def _truncate(value: JsonValue) -> JsonValue:
    plain = clone(value)
    text = json.dumps(plain, ensure_ascii=False)
    return plain if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
