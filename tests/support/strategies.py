"""Values for property tests."""

import string

from hypothesis import strategies as st

from server.conversation.block import (
    Block,
    ImageBlock,
    SignatureMark,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)
from server.conversation.turn import TurnKind
from server.payload.history import Step

any_text = st.text(st.characters(codec=None), max_size=60) | st.text("\x00\ud800\udfff\U0010ffff0f\\u", max_size=12)
"""Any code points, lone surrogates among them, and frequently those that need escaping."""

numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(any_text, json_values, max_size=4)

marks = st.none() | st.builds(
    SignatureMark,
    length=st.integers(0, 10_000),
    fingerprint=st.text(string.hexdigits.lower(), min_size=16, max_size=16),
)
blocks: st.SearchStrategy[Block] = st.one_of(
    st.builds(TextBlock, text=any_text, signature=marks),
    st.builds(
        ImageBlock,
        media_type=st.sampled_from(["image/png", "image/jpeg"]),
        sha256=st.text(string.hexdigits.lower(), min_size=64, max_size=64),
        size_bytes=st.integers(0, 10**9),
    ),
    st.builds(ThinkingBlock, text=any_text, redacted=st.booleans(), signature=marks),
    st.builds(ToolCallBlock, id=any_text, name=any_text, arguments=json_objects, signature=marks),
    st.builds(ToolResultBlock, tool_call_id=any_text, output=json_values, is_error=st.booleans()),
    st.builds(UnknownBlock, data=json_objects),
)


def _step(seq: int, kind: TurnKind, ids: list[str], *, complete: bool) -> Step:
    match kind:
        case TurnKind.MODEL_RESPONSE:
            calls = tuple(ToolCallBlock(id=id_, name="f", arguments={}) for id_ in ids)
            return Step(kind=kind, seq=seq, calls=calls, complete=complete)
        case TurnKind.TOOL_RESPONSE:
            results = tuple(ToolResultBlock(tool_call_id=id_, output=seq) for id_ in ids)
            return Step(kind=kind, seq=seq, results=results)
        case TurnKind.USER_TASK:
            return Step(kind=kind, seq=seq)


broken_histories: st.SearchStrategy[tuple[Step, ...]] = st.lists(
    st.tuples(st.sampled_from(TurnKind), st.lists(st.sampled_from("abcd"), max_size=3), st.booleans()), max_size=12
).map(
    lambda drawn: tuple(
        _step(seq, kind, ids, complete=complete) for seq, (kind, ids, complete) in enumerate(drawn, start=1)
    )
)
"""Any turns in any order, with few ids, so that ids collide."""
