"""The models and their differences, and `GET /v1/models`. Every rule that differs between models is data here."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class PrefixCheck(StrEnum):
    """For which accounts a request fails if the prefix of a thinking block has changed."""

    EVERY_ACCOUNT = "every_account"
    NEW_ACCOUNTS = "new_accounts"
    """Old accounts only if the request enables it."""
    NOBODY = "nobody"


_LOW_TO_MAX: Final = ("low", "medium", "high", "xhigh", "max")
_LOW_TO_HIGH: Final = ("low", "medium", "high")
_WITHOUT_XHIGH: Final = ("low", "medium", "high", "max")

_CLAUDE_4: Final = frozenset(
    {
        "claude-sonnet-4-5",
        "claude-haiku-4-5",
        "claude-opus-4-5",
        "claude-opus-4-6",
        "claude-sonnet-4-6",
        "claude-opus-4-7",
        "claude-opus-4-8",
    }
)
_UP_TO_SONNET_5: Final = _CLAUDE_4 | {"claude-sonnet-5"}
_UP_TO_OPUS_5: Final = _UP_TO_SONNET_5 | {"claude-opus-5"}
_FABLE_5: Final = frozenset({"claude-mythos-preview", "claude-fable-5", "claude-mythos-5"})
_FABLE_5_1: Final = frozenset({"claude-fable-5-1", "claude-mythos-5-1"})
_FABLE_5_2: Final = frozenset({"claude-fable-5-2", "claude-mythos-5-2"})
_GENERATION_5_5: Final = frozenset({"claude-opus-5-5", "claude-sonnet-5-5", "claude-haiku-5-5"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    id: str
    display_name: str
    line: str
    created_at: str
    reads: frozenset[str]
    """The other models whose thinking it may read."""
    cache_minimum_tokens: int
    thinking_types: frozenset[str] = frozenset({"adaptive"})
    """The values of `thinking.type` it accepts."""
    thinks_by_default: bool = True
    displays_thinking: bool = False
    """Whether thinking is displayed by default."""
    effort_levels: tuple[str, ...] = _LOW_TO_MAX
    default_effort: str = "high"
    highest_effort_without_thinking: str | None = None
    prefix_check: PrefixCheck = PrefixCheck.NOBODY
    preserves_thinking: bool = False
    """Whether its signatures record the prefix of the block."""
    binds_to_account: bool = False
    keeps_old_thinking: bool = True
    """Whether thinking of earlier turns stays in the prompt; otherwise it is removed and costs nothing."""
    takes_system_messages: bool = True
    takes_forced_tools: bool = True
    takes_prefill: bool = False
    compacts: bool = True
    max_input_tokens: int = 1_000_000
    max_tokens: int = 128_000


_ADAPTIVE_OR_OFF: Final = frozenset({"adaptive", "disabled"})
_MANUAL_OR_OFF: Final = frozenset({"enabled", "disabled"})

_ALL: Final = (
    Model(
        id="claude-fable-5-2",
        display_name="Claude Fable 5.2",
        line="fable",
        created_at="2026-11-09T00:00:00Z",
        reads=_UP_TO_OPUS_5 | _FABLE_5 | _FABLE_5_1 | _GENERATION_5_5 | _FABLE_5_2,
        cache_minimum_tokens=512,
        prefix_check=PrefixCheck.EVERY_ACCOUNT,
        preserves_thinking=True,
        takes_forced_tools=False,
    ),
    Model(
        id="claude-mythos-5-2",
        display_name="Claude Mythos 5.2",
        line="mythos",
        created_at="2026-11-09T00:00:00Z",
        reads=_UP_TO_OPUS_5 | _FABLE_5 | _FABLE_5_1 | _GENERATION_5_5 | _FABLE_5_2,
        cache_minimum_tokens=512,
        prefix_check=PrefixCheck.EVERY_ACCOUNT,
        preserves_thinking=True,
        takes_forced_tools=False,
    ),
    Model(
        id="claude-haiku-5-5",
        display_name="Claude Haiku 5.5",
        line="haiku",
        created_at="2026-10-08T00:00:00Z",
        reads=_UP_TO_SONNET_5,
        cache_minimum_tokens=512,
        thinking_types=_ADAPTIVE_OR_OFF,
        default_effort="medium",
        highest_effort_without_thinking="high",
        prefix_check=PrefixCheck.NEW_ACCOUNTS,
        preserves_thinking=True,
        binds_to_account=True,
        takes_system_messages=False,
    ),
    Model(
        id="claude-sonnet-5-5",
        display_name="Claude Sonnet 5.5",
        line="sonnet",
        created_at="2026-09-29T00:00:00Z",
        reads=_UP_TO_SONNET_5 | {"claude-haiku-5-5"},
        cache_minimum_tokens=512,
        thinking_types=frozenset({"adaptive", "between_tools"}),
        prefix_check=PrefixCheck.NEW_ACCOUNTS,
        preserves_thinking=True,
        binds_to_account=True,
        takes_forced_tools=False,
    ),
    Model(
        id="claude-opus-5-5",
        display_name="Claude Opus 5.5",
        line="opus",
        created_at="2026-09-22T00:00:00Z",
        reads=_UP_TO_OPUS_5 | {"claude-sonnet-5-5", "claude-haiku-5-5"},
        cache_minimum_tokens=512,
        default_effort="medium",
        prefix_check=PrefixCheck.NEW_ACCOUNTS,
        preserves_thinking=True,
        takes_forced_tools=False,
    ),
    Model(
        id="claude-fable-5-1",
        display_name="Claude Fable 5.1",
        line="fable",
        created_at="2026-09-01T00:00:00Z",
        reads=_UP_TO_OPUS_5 | _FABLE_5 | _FABLE_5_1 | {"claude-opus-5-5"},
        cache_minimum_tokens=512,
        prefix_check=PrefixCheck.NEW_ACCOUNTS,
        preserves_thinking=True,
        takes_forced_tools=False,
    ),
    Model(
        id="claude-mythos-5-1",
        display_name="Claude Mythos 5.1",
        line="mythos",
        created_at="2026-09-01T00:00:00Z",
        reads=_UP_TO_OPUS_5 | _FABLE_5 | _FABLE_5_1 | {"claude-opus-5-5"},
        cache_minimum_tokens=512,
        preserves_thinking=True,
        takes_forced_tools=False,
    ),
    Model(
        id="claude-opus-5",
        display_name="Claude Opus 5",
        line="opus",
        created_at="2026-07-20T00:00:00Z",
        reads=_UP_TO_SONNET_5,
        cache_minimum_tokens=512,
        thinking_types=_ADAPTIVE_OR_OFF,
    ),
    Model(
        id="claude-sonnet-5",
        display_name="Claude Sonnet 5",
        line="sonnet",
        created_at="2026-06-30T00:00:00Z",
        reads=_CLAUDE_4,
        cache_minimum_tokens=1_024,
        thinking_types=_ADAPTIVE_OR_OFF,
        takes_system_messages=False,
    ),
    Model(
        id="claude-fable-5",
        display_name="Claude Fable 5",
        line="fable",
        created_at="2026-06-09T00:00:00Z",
        reads=_CLAUDE_4 | _FABLE_5,
        cache_minimum_tokens=512,
    ),
    Model(
        id="claude-mythos-5",
        display_name="Claude Mythos 5",
        line="mythos",
        created_at="2026-06-09T00:00:00Z",
        reads=_CLAUDE_4 | _FABLE_5,
        cache_minimum_tokens=512,
    ),
    Model(
        id="claude-opus-4-8",
        display_name="Claude Opus 4.8",
        line="opus",
        created_at="2026-05-28T00:00:00Z",
        reads=_CLAUDE_4,
        cache_minimum_tokens=1_024,
        thinking_types=_ADAPTIVE_OR_OFF,
        thinks_by_default=False,
    ),
    Model(
        id="claude-opus-4-7",
        display_name="Claude Opus 4.7",
        line="opus",
        created_at="2026-04-16T00:00:00Z",
        reads=_CLAUDE_4 - {"claude-opus-4-8"},
        cache_minimum_tokens=2_048,
        thinking_types=_ADAPTIVE_OR_OFF,
        thinks_by_default=False,
        takes_system_messages=False,
    ),
    Model(
        id="claude-mythos-preview",
        display_name="Claude Mythos Preview",
        line="mythos",
        created_at="2026-04-07T00:00:00Z",
        reads=_CLAUDE_4 - {"claude-opus-4-8", "claude-opus-4-7"},
        cache_minimum_tokens=2_048,
        takes_system_messages=False,
    ),
    Model(
        id="claude-sonnet-4-6",
        display_name="Claude Sonnet 4.6",
        line="sonnet",
        created_at="2026-02-17T00:00:00Z",
        reads=_CLAUDE_4 - {"claude-opus-4-8", "claude-opus-4-7"},
        cache_minimum_tokens=1_024,
        thinking_types=_ADAPTIVE_OR_OFF | {"enabled"},
        thinks_by_default=False,
        displays_thinking=True,
        effort_levels=_WITHOUT_XHIGH,
        takes_system_messages=False,
    ),
    Model(
        id="claude-opus-4-6",
        display_name="Claude Opus 4.6",
        line="opus",
        created_at="2026-02-04T00:00:00Z",
        reads=_CLAUDE_4 - {"claude-opus-4-8", "claude-opus-4-7"},
        cache_minimum_tokens=4_096,
        thinking_types=_ADAPTIVE_OR_OFF | {"enabled"},
        thinks_by_default=False,
        displays_thinking=True,
        effort_levels=_WITHOUT_XHIGH,
        takes_system_messages=False,
    ),
    Model(
        id="claude-opus-4-5",
        display_name="Claude Opus 4.5",
        line="opus",
        created_at="2025-11-24T00:00:00Z",
        reads=frozenset({"claude-sonnet-4-5", "claude-haiku-4-5"}),
        cache_minimum_tokens=4_096,
        thinking_types=_MANUAL_OR_OFF,
        thinks_by_default=False,
        displays_thinking=True,
        effort_levels=_LOW_TO_HIGH,
        takes_system_messages=False,
        takes_prefill=True,
        compacts=False,
        max_input_tokens=200_000,
        max_tokens=64_000,
    ),
    Model(
        id="claude-haiku-4-5",
        display_name="Claude Haiku 4.5",
        line="haiku",
        created_at="2025-10-15T00:00:00Z",
        reads=frozenset({"claude-sonnet-4-5"}),
        cache_minimum_tokens=4_096,
        thinking_types=_MANUAL_OR_OFF,
        thinks_by_default=False,
        displays_thinking=True,
        effort_levels=(),
        keeps_old_thinking=False,
        takes_system_messages=False,
        takes_prefill=True,
        compacts=False,
        max_input_tokens=200_000,
        max_tokens=64_000,
    ),
    Model(
        id="claude-sonnet-4-5",
        display_name="Claude Sonnet 4.5",
        line="sonnet",
        created_at="2025-09-29T00:00:00Z",
        reads=frozenset({"claude-haiku-4-5"}),
        cache_minimum_tokens=1_024,
        thinking_types=_MANUAL_OR_OFF,
        thinks_by_default=False,
        displays_thinking=True,
        effort_levels=(),
        keeps_old_thinking=False,
        takes_system_messages=False,
        takes_prefill=True,
        compacts=False,
        max_input_tokens=200_000,
        max_tokens=64_000,
    ),
)

MODELS: Final = {model.id: model for model in _ALL}
"""Newest first, as the API lists them."""

_DATED: Final = {
    "claude-opus-4-5-20251101": "claude-opus-4-5",
    "claude-haiku-4-5-20251001": "claude-haiku-4-5",
    "claude-sonnet-4-5-20250929": "claude-sonnet-4-5",
}


def find_model(name: str) -> Model | None:
    """The model of that id or dated id."""
    return MODELS.get(_DATED.get(name, name))


_PAGE: Final = 20
_MAX_PAGE: Final = 1_000
_YES: Final = {"supported": True}
_NO: Final = {"supported": False}


def render_model(model: Model) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.display_name,
        "line": model.line,
        "lifecycle": "active",
        "created_at": model.created_at,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": model.max_input_tokens,
        "max_tokens": model.max_tokens,
        "capabilities": _render_capabilities(model),
    }


def render_page(query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the list, newest first, by `limit` and `after_id` or `before_id`."""
    cards = [render_model(model) for model in MODELS.values()]
    names = [card["id"] for card in cards]
    limit = min(int(query["limit"]), _MAX_PAGE) if query.get("limit", "").isdecimal() else _PAGE
    if query.get("before_id") in names:
        rest = cards[: names.index(query["before_id"])]
        page, has_more = rest[-limit:], len(rest) > limit
    else:
        first = names.index(query["after_id"]) + 1 if query.get("after_id") in names else 0
        page, has_more = cards[first : first + limit], len(cards) > first + limit
    return {
        "data": page,
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _render_capabilities(model: Model) -> dict[str, Any]:
    levels = {name: _YES if name in model.effort_levels else _NO for name in ("low", "medium", "high", "xhigh", "max")}
    kinds = {
        name: _YES if name in model.thinking_types else _NO
        for name in ("adaptive", "between_tools", "disabled", "enabled")
    }
    return {
        "batch": _NO,
        "citations": _NO,
        "code_execution": _NO,
        "compaction": {"supported": model.compacts, "summarize": _YES if model.compacts else _NO},
        "context_management": {"supported": False},
        "effort": {"supported": bool(model.effort_levels), **levels},
        "image_input": _YES,
        "pdf_input": _YES,
        "server_tools": {"supported": False, "code_execution": _NO, "web_search": _NO},
        "structured_outputs": _YES,
        "thinking": {"supported": True, "types": kinds},
    }
