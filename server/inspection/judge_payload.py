"""The request to a judge: two answers beside each other, and what to make of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.conversation.block import Block, ImageBlock, JsonValue, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.payload import Layer, Payload, PayloadMessage
from server.payload.arguments import clone
from server.payload.settings import read_settings
from server.providers.provider import Provider

JUDGE: Final = "judge"
"""The `kind` of the note that is kept with the call."""
_LONGEST: Final = 50_000
"""Characters of an answer that a judge is shown."""
_FORM: Final = (
    'Answer with one JSON object and nothing else: {"score": a number from 0, the candidate is of no use, '
    'to 1, it is as good as the recorded answer or better, "reason": one sentence}.'
)


def write_question(asked: Sequence[Block], recorded: Sequence[Block], candidate: Sequence[Block]) -> str:
    """What a judge is asked, behind its prompt. What was said is data in it, and never more than so long."""
    told = {"input": _tell(asked), "recorded": _tell(recorded), "candidate": _tell(candidate)}
    return f"{json.dumps(told, ensure_ascii=False)}\n\n{_FORM}"


def build_judge_payload(
    provider: Provider, model: str, prompt: str, settings: Mapping[str, JsonValue], question: str
) -> Payload:
    """The request. The same values give the same bytes."""
    data = provider.user_message((TextBlock(text=question),), {})
    return Payload(
        model=model,
        static_text=prompt,
        tools=(),
        messages=(PayloadMessage(layer=Layer.TRIGGER, data=data, role="user"),),
        settings=read_settings(settings),
    )


def read_score(text: str) -> tuple[float, str] | None:
    """The score and its reason; None where the judge has said something else."""
    begin, end = text.find("{"), text.rfind("}")
    try:
        said = json.loads(text[begin : end + 1]) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return None
    score = said.get("score") if isinstance(said, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        return None
    reason = said.get("reason") if isinstance(said, dict) else None
    return float(score), reason if isinstance(reason, str) else ""


def _tell(blocks: Sequence[Block]) -> list[Any]:
    told: list[Any] = []
    for block in blocks:
        match block:
            case TextBlock() if block.text:
                told.append({"text": block.text[:_LONGEST]})
            case ToolCallBlock():
                told.append({"tool_call": block.name, "arguments": _cut(block.arguments)})
            case ToolResultBlock():
                told.append({"tool_result": _cut(block.output), "is_error": block.is_error})
            case ImageBlock():
                told.append({"image": block.media_type})
            case _:
                continue
    return told


def _cut(value: JsonValue) -> JsonValue:
    plain = clone(value)
    text = json.dumps(plain, ensure_ascii=False)
    return plain if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
