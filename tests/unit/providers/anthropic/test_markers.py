"""For any payload, Claude receives at most four cache markers, and longer lifetimes come first."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.caching.policy import LONG_SECONDS, SHORT_SECONDS, place_breakpoints
from server.conversation.assistant import Tool
from server.conversation.payload import PIECE_CHARACTERS, CallSettings, Payload, split_static
from server.providers.anthropic.request import build_extra, build_parameters, encode_system, encode_tools, join_messages
from server.providers.model_profile import PROFILES
from tests.contracts.provider_harness import build_payload

CLAUDES = [profile for profile in PROFILES.values() if profile.provider == "anthropic"]
MARKER = {"type": "ephemeral"}


BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "Yes."},
    "empty": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": "c2ln"},
    "call": {"type": "tool_use", "id": "toolu_1", "name": "t", "input": {}},
    "result": {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"},
}


messages = st.lists(st.lists(st.sampled_from(list(BLOCKS)), min_size=1, max_size=40), max_size=12).map(
    lambda kinds: [
        json.dumps({"role": "user", "content": [BLOCKS[kind] for kind in message]}).encode() for message in kinds
    ]
)


@st.composite
def payloads(draw: st.DrawFn) -> tuple[Payload, Any]:
    profile = draw(st.sampled_from(CLAUDES))
    static = "x" * draw(st.integers(0, 40)) + ("y" * PIECE_CHARACTERS + "\n") * draw(st.integers(0, 4))
    tools = tuple(Tool(name=f"t{number}", description="", parameters={}) for number in range(draw(st.integers(0, 3))))
    chosen = draw(messages)
    markers = place_breakpoints(
        len(chosen),
        has_tools=bool(tools),
        static_piece_count=len(split_static(static)),
        limit=profile.breakpoints,
        is_wide=draw(st.booleans()),
    )
    extra: dict[str, Any] = draw(
        st.sampled_from([{}, {"cache_control": MARKER}, {"tools": [{"name": "x", "cache_control": MARKER}] * 5}])
    )
    payload = build_payload(
        profile.model,
        chosen,
        static_text=static,
        tools=tools,
        settings=CallSettings(extra=extra),
        marks_tools=markers.tools,
        # Also the breakpoints that a call of another release has stored.
        breakpoints=draw(st.sampled_from([markers.messages, tuple(range(len(chosen)))])),
        cache_seconds=draw(st.sampled_from([SHORT_SECONDS, LONG_SECONDS])),
        static_cache_seconds=draw(st.sampled_from([SHORT_SECONDS, LONG_SECONDS])),
    )
    return payload, profile


@given(drawn=payloads())
def test_at_most_four_markers_and_longer_lifetimes_first(drawn: tuple[Payload, Any]) -> None:
    payload, profile = drawn
    parameters = build_parameters(payload, profile)
    body = build_extra(payload, parameters) | parameters
    if payload.static_text:
        body["system"] = json.loads(encode_system(payload, profile))
    if payload.tools:
        body["tools"] = json.loads(encode_tools(payload, profile))
    sent = json.loads(b"[" + join_messages(payload, profile) + b"]")
    assert "cache_control" not in body
    blocks = [*body.get("tools", []), *body.get("system", []), *(one for message in sent for one in message["content"])]
    lifetimes = [one["cache_control"].get("ttl", "5m") for one in blocks if "cache_control" in one]
    assert len(lifetimes) <= 4
    assert lifetimes == sorted(lifetimes)
    assert all("cache_control" not in one for one in blocks if one.get("type") == "thinking" or one.get("text") == "")
    if payload.static_text:
        assert "cache_control" in body["system"][-1]
