"""Replies without a script: deterministic, and related to the request.

This is not a model. It calls the tools that the prompt mentions, with arguments built from their schemas and the
prompt, and turns tool results into a text, so that a demonstration looks plausible and a tool loop can be completed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from server.emulator.reply import Reply, ToolCall

_WORD: Final = re.compile(r"[^\W_]+")
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NAME: Final = re.compile(r"\b[A-Z][\w'-]+(?:\s[A-Z][\w'-]+)*")
_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_QUOTED: Final = re.compile(r"[\"“`]([^\"”`]+)[\"”`]")
_PLACES: Final = frozenset({"city", "location", "place", "town", "country", "destination", "origin"})
# fmt: off
_COMMON: Final = frozenset({
    "a", "about", "all", "an", "and", "any", "are", "as", "at", "be", "by", "can", "current", "do", "for", "from",
    "get", "give", "has", "have", "how", "i", "in", "is", "it", "its", "look", "make", "me", "my", "now", "of",
    "on", "or", "please", "read", "returns", "run", "set", "show", "some", "tell", "that", "the", "this", "to",
    "tool", "up", "use", "used", "using", "want", "what", "when", "where", "which", "who", "will", "with", "you",
    "your",
})
# fmt: on
_OPENINGS: Final = ("Here is what I can say about it", "A short answer first", "Let me put it plainly", "Good question")
_CLOSINGS: Final = (
    "Ask me for more detail on any of it.",
    "That is the heart of it; the rest follows.",
    "Say so if you meant something else.",
)
_SHOWN_CHARACTERS: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """A tool that the request offers to the model."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schema of its arguments; type names in either case."""


def improvise(prompt: str, history_length: int, tools: Sequence[ToolOffer], tool_results: Sequence[str]) -> Reply:
    """Build a reply. If there are tool results the reply is about them; else it calls the tools that the prompt
    mentions.
    """
    if tool_results:
        return _answer_with(prompt, tool_results)
    calls = tuple(call for tool in tools if _is_wanted(tool, prompt) for call in _call(tool, prompt))
    if calls:
        names = " and ".join(dict.fromkeys(call.name for call in calls))
        return Reply(
            thinking=f"The request is about {_topic(prompt)}. I should ask {names} before I answer.", tool_calls=calls
        )
    return _answer(prompt, history_length)


def _answer(prompt: str, history_length: int) -> Reply:
    topic = _topic(prompt)
    pick = len(prompt) + history_length
    before = f" We have exchanged {history_length} messages before this one." if history_length else ""
    return Reply(
        thinking=f"The user asks about {topic}. No tool is needed, so I answer from what was said.",
        text=(
            f"{_OPENINGS[pick % len(_OPENINGS)]}: you asked about {topic}.{before} "
            f"I am an emulated model, so my words are made up from yours, but they arrive like real ones. "
            f"{_CLOSINGS[pick % len(_CLOSINGS)]}"
        ),
    )


def _answer_with(prompt: str, results: Sequence[str]) -> Reply:
    shown = "; ".join(_shorten(result) for result in results)
    noun = "result" if len(results) == 1 else f"{len(results)} results"
    return Reply(
        thinking=f"I have the {noun} that I asked for and can answer about {_topic(prompt)} now.",
        text=f"About {_topic(prompt)}: the tools say {shown}. That is all I needed to know.",
    )


def _is_wanted(tool: ToolOffer, prompt: str) -> bool:
    if re.search(rf"\b{re.escape(tool.name)}\b", prompt, re.IGNORECASE):
        return True
    wanted = _stems(prompt)
    return bool(wanted & _stems(tool.name)) or len(wanted & _stems(tool.description)) > 1


def _stems(text: str) -> set[str]:
    """The significant words, without plural endings."""
    words = {word.casefold() for part in text.split("_") for word in _WORD.findall(_CAMEL.sub(" ", part))}
    return {word.removesuffix("s") for word in words - _COMMON}


def _call(tool: ToolOffer, prompt: str) -> list[ToolCall]:
    """One call, or one per place if the prompt names several and the tool takes one at a time."""
    wanted = _mapping(tool.schema, "properties")
    place = next((name for name in wanted if name.casefold() in _PLACES), None)
    places = _names(prompt) if place else []
    return [
        ToolCall(
            name=tool.name, arguments={**_arguments(wanted, tool.schema, prompt), **({place: one} if place else {})}
        )
        for one in (places or [_fallback(prompt)])
    ]


def _arguments(properties: Mapping[str, Any], schema: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    required = _list(schema, "required") or list(properties)
    return {name: build_value(_mapping(properties, name), name, prompt) for name in properties if name in required}


def build_value(rule: Mapping[str, Any], name: str, prompt: str) -> Any:
    """A value that the JSON schema allows, taken from the prompt if possible."""
    if options := _list(rule, "enum"):
        return next((option for option in options if str(option).casefold() in prompt.casefold()), options[0])
    number = _NUMBER.search(prompt)
    match _kind(rule):
        case "integer":
            return int(float(number[0])) if number else 1
        case "number":
            return float(number[0]) if number else 1.5
        case "boolean":
            return True
        case "array":
            return [build_value(_mapping(rule, "items"), name, prompt)]
        case "object":
            return _arguments(_mapping(rule, "properties"), rule, prompt)
        case _:
            return _words_for(name, prompt)


def _kind(rule: Mapping[str, Any]) -> str:
    kind = rule.get("type", "string")
    if isinstance(kind, list):
        kind = next((one for one in kind if str(one).casefold() != "null"), "string")
    return str(kind).casefold()


def _mapping(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping of the schema. Schemas come from the client unchecked, so anything else counts as empty."""
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _words_for(name: str, prompt: str) -> str:
    quoted = _QUOTED.search(prompt)
    if quoted:
        return quoted[1]
    names = _names(prompt)
    if names and name.casefold() in _PLACES:
        return names[0]
    return prompt.strip() if name.casefold() in {"query", "q", "question", "text", "prompt"} else _fallback(prompt)


def _names(prompt: str) -> list[str]:
    """The capitalised words that are not at the beginning of a sentence."""
    found = [match for match in _NAME.finditer(prompt) if not _begins_sentence(prompt, match.start())]
    return list(dict.fromkeys(match[0].removesuffix("'s") for match in found if match[0] != "I"))


def _begins_sentence(text: str, start: int) -> bool:
    before = text[:start].rstrip()
    return not before or before[-1] in ".!?:\n"


def _fallback(prompt: str) -> str:
    names = _names(prompt)
    return names[0] if names else _topic(prompt)


def _topic(prompt: str) -> str:
    words = [word for word in _WORD.findall(prompt) if word.casefold() not in _COMMON]
    return " ".join(words[:6]) or "that"


def _shorten(result: str) -> str:
    try:
        text = json.dumps(json.loads(result), ensure_ascii=False)
    except ValueError:
        text = result
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
