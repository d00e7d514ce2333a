"""Cache diagnostics: the request compared with the earlier request it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.emulator.anthropic.cache import message_settings
from server.emulator.anthropic.cache_markers import PromptItem
from server.emulator.anthropic.models import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What is stored of a request for later comparison."""

    model: tuple[str, str]
    layers: Mapping[str, tuple[str, ...]]
    """The blocks of tools, system and messages, as text."""
    tokens: Mapping[str, tuple[int, ...]]
    settings: str


def take_fingerprint(
    body: Mapping[str, Any], model: Model, items: Sequence[PromptItem], tokens: Mapping[str, int]
) -> Fingerprint:
    layers: dict[str, tuple[str, ...]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for layer in ("tools", "system", "messages"):
        chosen = [item for item in items if item.layer == layer]
        layers[layer] = tuple(f"{item.role}{_plain(item.value)}" for item in chosen)
        counts[layer] = tuple(tokens[item.path] for item in chosen)
    return Fingerprint(
        model=(body["model"], body.get("speed") or "standard"),
        layers=layers,
        tokens=counts,
        settings=repr(message_settings(body, model, items)),
    )


def diagnose(earlier: Fingerprint | None, now: Fingerprint) -> dict[str, Any] | None:
    """The `diagnostics` of the response; None if the earlier prompt is a prefix of this one."""
    if earlier is None:
        return _because("previous_message_not_found")
    total = sum(sum(counts) for counts in earlier.tokens.values())
    if earlier.model != now.model:
        return _because("model_changed", total)
    if earlier.layers["system"] != now.layers["system"]:
        return _because("system_changed", total - sum(earlier.tokens["tools"]) * _same(earlier, now, "tools"))
    if earlier.layers["tools"] != now.layers["tools"]:
        return _because("tools_changed", total)
    before, after = earlier.layers["messages"], now.layers["messages"]
    if after[: len(before)] != before:
        shared = next(index for index, (one, other) in enumerate(_pairs(before, after)) if one != other)
        return _because("messages_changed", sum(earlier.tokens["messages"][shared:]))
    return _because("unavailable") if earlier.settings != now.settings else None


def _same(earlier: Fingerprint, now: Fingerprint, layer: str) -> bool:
    return earlier.layers[layer] == now.layers[layer]


def _pairs(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, str | None]]:
    return [(one, after[index] if index < len(after) else None) for index, one in enumerate(before)]


def _because(kind: str, missed_tokens: int | None = None) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": kind}
    if missed_tokens is not None:
        reason["cache_missed_input_tokens"] = missed_tokens
    return {"cache_miss_reason": reason}


def _plain(value: Mapping[str, Any]) -> str:
    return repr({key: inner for key, inner in value.items() if key != "cache_control"})
