"""Any request is accepted or refused with a problem; the emulator itself never fails."""

import copy
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from server.emulator.anthropic.caller import COMPACT_ON_DEMAND, Caller
from server.emulator.anthropic.errors import Refused
from server.emulator.anthropic.state import AnthropicState
from server.emulator.anthropic.validation import admit
from server.emulator.state import build_state

_CALLER = Caller(organization_id="o", is_old_account=False, version="2026-10-21", betas=frozenset({COMPACT_ON_DEMAND}))
_BODY: dict[str, Any] = {
    "model": "claude-fable-5-2",
    "max_tokens": 10,
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20260318", "name": "web_search"}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "low"},
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {"previous_message_id": None},
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "x"}],
                    "is_error": False,
                },
                {"type": "image", "source": {"type": "url", "url": "http://x"}},
            ],
        },
        {"role": "system", "content": "Be brief."},
    ],
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_REMOVED = object()
_WORDS = st.sampled_from(
    [
        "text",
        "thinking",
        "redacted_thinking",
        "compaction",
        "system",
        "assistant",
        "user",
        "tool_result",
        "disabled",
        "any",
    ]
)


def list_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in list_places(item, (*path, key)))]


_PLACES = [place for place in list_places(_BODY) if place]


def test_the_unchanged_body_is_accepted() -> None:
    assert admit(copy.deepcopy(_BODY), _CALLER, AnthropicState(build_state()), counting=False).total_tokens > 0


@settings(max_examples=400)
@given(place=st.sampled_from(_PLACES), value=_JSON | _WORDS | st.just(_REMOVED))
def test_a_damaged_body_is_accepted_or_refused(place: tuple[Any, ...], value: Any) -> None:
    body = copy.deepcopy(_BODY)
    holder: Any = body
    for step in place[:-1]:
        holder = holder[step]
    if value is _REMOVED:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    with suppress(Refused):
        admit(body, _CALLER, AnthropicState(build_state()), counting=False)
