"""The question that a request contains, and the improvised reply to it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from server.emulator.anthropic.prompt import content_blocks, read_text
from server.emulator.improvise import ToolOffer, build_value, improvise
from server.emulator.reply import Reply
from server.emulator.tokens import canonical_json

REDACTED: Final = "[redacted]"
"""Scripted thinking that begins with this text is returned as `redacted_thinking`."""
REDACTION_TRIGGER: Final = (
    "ANTHROPIC_MAGIC_STRING_TRIGGER_REDACTED_THINKING_46C9A13E193C177646C7398A98432ECCCE4C1253D5E2D82641AC0E52CC2876CB"
)
REFUSAL_TRIGGER: Final = (
    "ANTHROPIC_MAGIC_STRING_TRIGGER_REFUSAL_1FAEFB6177B4672DEE07F9D3AFC62588CCD2631EDCF22E8CCC1FB35B501C9C86"
)
_REASONING_LABEL: Final = re.compile(r"^\s*(?:think|thinking|reasoning)\s*:", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question of a request."""

    prompt: str
    """All of the newest user text."""
    topic: str
    """The last block of that text; earlier blocks are usually reference material."""
    tool_results: tuple[str, ...]
    offers: tuple[ToolOffer, ...]
    history_length: int
    output_schema: dict[str, Any] | None

    @property
    def after_tools(self) -> bool:
        return bool(self.tool_results)


def read_question(body: dict[str, Any]) -> Question:
    """Read the newest user text, the newest tool results, and the tools that may be called."""
    messages = [message for message in body["messages"] if message["role"] == "user"]
    newest = content_blocks(messages[-1]["content"]) if messages else []
    results = [block for block in newest if block["type"] == "tool_result"]
    worded = [message["content"] for message in messages if read_text(message["content"])]
    output = body.get("output_config", {}).get("format") or {}
    return Question(
        prompt=read_text(worded[-1]) if worded else "",
        topic=_last_text(worded[-1]) if worded else "",
        tool_results=tuple(_result_text(block) for block in results),
        offers=tuple(_read_offers(body)),
        history_length=len(body["messages"]) - 1,
        output_schema=output.get("schema"),
    )


def improvise_reply(question: Question, body: dict[str, Any]) -> Reply:
    """An improvised reply. A forced tool is called regardless of the prompt."""
    choice = body.get("tool_choice", {})
    if choice.get("type") in {"any", "tool"}:
        named = [offer for offer in question.offers if offer.name == choice.get("name", offer.name)][:1]
        reply = improvise(" ".join([question.topic, *(offer.name for offer in named)]), 0, named, ())
    else:
        reply = improvise(question.topic, question.history_length, question.offers, question.tool_results)
    if question.output_schema is not None and not reply.tool_calls:
        value = build_value(question.output_schema, "answer", question.topic)
        reply = replace(reply, text=canonical_json(value))
    if choice.get("disable_parallel_tool_use"):
        reply = replace(reply, tool_calls=reply.tool_calls[:1])
    return reply


def find_refusal(body: dict[str, Any]) -> str | None:
    """The category in which the model refuses by itself: for the documented trigger, or for visible reasoning.

    A transcript with lines labelled as reasoning counts as an attempt to extract it.
    """
    texts = [read_text(body.get("system") or [])]
    texts += [read_text(message["content"]) for message in body["messages"] if message["role"] == "user"]
    if any(REFUSAL_TRIGGER in text for text in texts):
        return "general_harms"
    return "reasoning_extraction" if any(_REASONING_LABEL.search(text) for text in texts) else None


def is_redaction_wanted(thinking: str, body: dict[str, Any]) -> bool:
    """Whether this thinking is redacted: the script requests it, or the prompt contains the documented trigger."""
    return thinking.startswith(REDACTED) or REDACTION_TRIGGER in read_question(body).prompt


def _last_text(content: Any) -> str:
    return next(
        (
            str(block["text"])
            for block in reversed(content_blocks(content))
            if block["type"] == "text" and block["text"]
        ),
        "",
    )


def _read_offers(body: dict[str, Any]) -> Iterator[ToolOffer]:
    if body.get("tool_choice", {}).get("type") == "none":
        return
    for tool in body.get("tools", []):
        if "input_schema" in tool and not tool.get("defer_loading"):
            yield ToolOffer(name=tool["name"], description=tool.get("description", ""), schema=tool["input_schema"])


def _result_text(block: dict[str, Any]) -> str:
    return read_text(block.get("content", [])) or "(nothing)"
