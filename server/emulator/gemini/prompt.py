"""The prompt of a request: system instruction, tools and contents, after those of an explicit cache."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.gemini.models import Model
from server.emulator.gemini.turn_order import Content, Part, has_standard_content, responses_of, role_of
from server.emulator.improvise import ToolOffer
from server.emulator.tokens import canonical_json, count_json, count_tokens

_IMAGE_TOKENS: Final = 258


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Decoded values, keys in snake_case."""

    model: Model
    system_instruction: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_config: Mapping[str, Any] | None = None
    contents: Sequence[Content] = ()

    @property
    def question(self) -> str:
        """The last text of the newest user content that has one. Clients send what else the model should know before
        it.
        """
        for content in reversed(self.contents):
            if role_of(content) != "model" and has_standard_content(content):
                return next((part["text"] for part in reversed(content["parts"]) if "text" in part), "")
        return ""

    @property
    def tool_results(self) -> list[str]:
        """The function responses in the newest content, as JSON."""
        parts = responses_of(self.contents[-1]) if self.contents else []
        return [json.dumps(part["function_response"].get("response", {}), ensure_ascii=False) for part in parts]

    @property
    def offers(self) -> list[ToolOffer]:
        """The functions that the model may call."""
        if self._calling.get("mode") == "NONE":
            return []
        allowed = self._calling.get("allowed_function_names")
        declared = [declaration for tool in self.tools for declaration in tool.get("function_declarations", ())]
        return [
            ToolOffer(
                name=declaration.get("name", ""),
                description=declaration.get("description", ""),
                schema=_schema_of(declaration),
            )
            for declaration in declared
            if not allowed or declaration.get("name") in allowed
        ]

    @property
    def must_call(self) -> bool:
        """Whether the model must return a function call."""
        return self._calling.get("mode") == "ANY"

    @property
    def _calling(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = (self.tool_config or {}).get("function_calling_config", {})
        return config

    def blocks(self) -> list[tuple[str, int]]:
        """The pieces of the prompt in prefix order, each as canonical JSON with its tokens."""
        blocks = []
        system = self.system_instruction
        if system is not None:
            blocks.append((canonical_json(["system", {name: system[name] for name in system if name != "parts"}]), 0))
            blocks += [
                (canonical_json(["system part", part]), self._count_part(part)) for part in system.get("parts", ())
            ]
        if self.tools:
            blocks.append((canonical_json(["tools", self.tools, self.tool_config]), count_json(self.tools)))
        for content in self.contents:
            role = role_of(content)
            blocks.append((canonical_json(["role", role]), 1))
            blocks += [(canonical_json(["part", part]), self._count_part(part)) for part in content["parts"]]
        return blocks

    def count(self) -> int:
        return sum(tokens for _, tokens in self.blocks())

    def _count_part(self, part: Part) -> int:
        signature = part.get("thought_signature", "") if self.model.keeps_thoughts else ""
        if "text" in part:
            return count_tokens(part["text"]) + count_tokens(signature)
        if "inline_data" in part or "file_data" in part:
            return _IMAGE_TOKENS
        rest = {name: value for name, value in part.items() if name != "thought_signature"}
        return count_json(rest) + count_tokens(signature)


def _schema_of(declaration: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = declaration.get("parameters_json_schema") or declaration.get("parameters")
    return schema if isinstance(schema, Mapping) else {}


def read_prompt(body: Mapping[str, Any], model: Model) -> Prompt:
    """The prompt of a decoded request, or of the body of an explicit cache."""
    return Prompt(
        model=model,
        system_instruction=body.get("system_instruction"),
        tools=body.get("tools", ()),
        tool_config=body.get("tool_config"),
        contents=body.get("contents", ()),
    )
