"""`GET /v1/models`: the models and their capabilities."""

from collections.abc import Mapping
from typing import Any, Final

from server.emulator.anthropic.models import MODELS, Model

_PAGE: Final = 20
_LONGEST_PAGE: Final = 1_000
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
    limit = min(int(query["limit"]), _LONGEST_PAGE) if query.get("limit", "").isdecimal() else _PAGE
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
