"""A simulated prompt cache: what a request reads from it, writes to it and pays in full; and cache diagnostics.

There is one entry per breakpoint, under a hash of everything up to it. A breakpoint finds entries that earlier requests
wrote at its own block or up to 19 blocks before it. Entries live from the start of the request that wrote or last read
them, and can be read once that request's response has started. Prefixes below the minimum are not cached.

Diagnostics compare a request with the earlier request that it names.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.anthropic.model_rules import effort_of, thinking_type
from server.emulator.anthropic.models import Model
from server.emulator.anthropic.prompt_items import PromptItem

LOOKBACK_BLOCKS: Final = 20
_SECONDS: Final = {"5m": 300.0, "1h": 3_600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """The three counts never overlap; their sum is the whole input."""

    input_tokens: int
    read_tokens: int
    written_5m_tokens: int
    written_1h_tokens: int

    @property
    def written_tokens(self) -> int:
        return self.written_5m_tokens + self.written_1h_tokens

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.read_tokens + self.written_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What a request reads, and what it writes once its response starts."""

    usage: CacheUsage
    entries: tuple[tuple[str, str], ...]
    """Key and time to live of the entries that are written or refreshed."""
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One block of the prompt: the hash of everything up to it, and its own tokens."""

    key: str
    tokens: int
    ttl: str | None
    """Set at a breakpoint."""


class PromptCache:
    def __init__(self) -> None:
        self._expiries: dict[str, tuple[float, str]] = {}

    def plan(self, links: Sequence[Link], *, minimum_tokens: int, now: float) -> CachePlan:
        """Plan what this request reads and writes; nothing changes before `commit`."""
        totals = _running_totals(links)
        breakpoints = [index for index, link in enumerate(links) if link.ttl is not None]
        hit = max((self._find_hit(links, index, now) for index in breakpoints), default=-1)
        written = [index for index in breakpoints if index > hit and totals[index] >= minimum_tokens]
        read_tokens = totals[hit] if hit >= 0 else 0
        through = totals[written[-1]] if written else read_tokens
        hour = [index for index in written if links[index].ttl == "1h"]
        hour_tokens = totals[hour[-1]] - read_tokens if hour else 0
        total = totals[-1] if totals else 0
        refreshed = [links[index].key for index in breakpoints if index <= hit] + ([links[hit].key] if hit >= 0 else [])
        return CachePlan(
            usage=CacheUsage(
                input_tokens=total - through,
                read_tokens=read_tokens,
                written_1h_tokens=hour_tokens,
                written_5m_tokens=through - read_tokens - hour_tokens,
            ),
            entries=(
                *((key, self._expiries[key][1]) for key in dict.fromkeys(refreshed) if self._is_alive(key, now)),
                *((links[index].key, str(links[index].ttl)) for index in written),
            ),
            started_at=now,
        )

    def commit(self, plan: CachePlan) -> None:
        """Store the entries: the response starts, and later requests can read them."""
        for key, ttl in plan.entries:
            self._expiries[key] = (plan.started_at + _SECONDS[ttl], ttl)

    def _find_hit(self, links: Sequence[Link], breakpoint_: int, now: float) -> int:
        farthest = max(0, breakpoint_ - LOOKBACK_BLOCKS + 1)
        for index in range(breakpoint_, farthest - 1, -1):
            if self._is_alive(links[index].key, now):
                return index
        return -1

    def _is_alive(self, key: str, now: float) -> bool:
        entry = self._expiries.get(key)
        return entry is not None and now < entry[0]


def chain_links(
    items: Sequence[PromptItem],
    *,
    tokens: Mapping[str, int],
    ttls: Mapping[str, str],
    account: str,
    body: Mapping[str, Any],
    model: Model,
) -> list[Link]:
    """The prompt as a chain of hashes, in which every link covers everything before it.

    The model comes first; the settings that invalidate cached messages come before the first message.
    """
    links: list[Link] = []
    digest = _digest("", [account, body["model"], body.get("speed") or "standard"])
    in_messages = False
    for item in items:
        if item.layer == "messages" and not in_messages:
            digest = _digest(digest, message_settings(body, model, items))
            in_messages = True
        plain = {key: value for key, value in item.value.items() if key != "cache_control"}
        digest = _digest(digest, [item.layer, item.role, plain])
        links.append(Link(key=digest, tokens=tokens[item.path], ttl=ttls.get(item.path)))
    return links


def message_settings(body: Mapping[str, Any], model: Model, items: Sequence[PromptItem]) -> list[Any]:
    """The settings that invalidate cached messages: tool choice, thinking, effort, and whether there is any image.

    Stating a default explicitly is not a change.
    """
    return [
        body.get("tool_choice"),
        thinking_type(body, model),
        body.get("thinking", {}).get("budget_tokens"),
        effort_of(body, model),
        any(_has_image(item.value) for item in items),
    ]


def _has_image(value: Mapping[str, Any]) -> bool:
    content = value.get("content")
    inner = content if value.get("type") == "tool_result" and isinstance(content, list) else []
    return value.get("type") == "image" or any(_has_image(block) for block in inner)


def _digest(before: str, value: Any) -> str:
    # Keys are not sorted: for the cache their order counts.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def _running_totals(links: Sequence[Link]) -> list[int]:
    totals: list[int] = []
    for link in links:
        totals.append(link.tokens + (totals[-1] if totals else 0))
    return totals


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
