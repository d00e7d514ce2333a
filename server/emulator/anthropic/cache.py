"""A simulated prompt cache: what a request reads from it, writes to it and pays in full.

There is one entry per breakpoint, under a hash of everything up to it. A breakpoint finds entries that earlier requests
wrote at its own block or up to 19 blocks before it. Entries live from the start of the request that wrote or last read
them, and can be read once that request's response has started. Prefixes below the minimum are not cached.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.emulator.anthropic.cache_markers import PromptItem
from server.emulator.anthropic.model_rules import effort_of, thinking_type
from server.emulator.anthropic.models import Model

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

    A default that is written out is no change.
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
