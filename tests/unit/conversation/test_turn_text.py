"""The text of a turn that the search covers."""

from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import (
    Block,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)
from server.conversation.turn_text import EXCERPT_LIMIT, TEXT_LIMIT_BYTES, read_excerpt, read_text

texts = st.text(st.characters(codec=None))


def test_all_visible_text_is_included() -> None:
    blocks: tuple[Block, ...] = (
        ThinkingBlock(text="Hm."),
        TextBlock(text="It rains."),
        ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Tromsø"}),
        ToolResultBlock(tool_call_id="call_1", output={"celsius": 4}),
        ToolResultBlock(tool_call_id="call_1", output="plain"),
        ImageBlock(media_type="image/png", sha256="00", size_bytes=1),
        UnknownBlock(data={"sealed": "secret"}),
    )
    assert read_text(blocks) == 'Hm.\nIt rains.\nget_weather {"city": "Tromsø"}\n{"celsius": 4}\nplain'


@given(text=texts)
def test_any_text_can_be_stored(text: str) -> None:
    found = read_text((TextBlock(text=text),))
    assert "\x00" not in found
    found.encode()
    assert len(found) == len(text)


def test_a_long_text_is_cut_at_its_limit_and_between_characters() -> None:
    found = read_text((TextBlock(text="a" + "\U0001f600" * 100_000),))
    assert TEXT_LIMIT_BYTES - 4 <= len(found.encode()) <= TEXT_LIMIT_BYTES
    assert set(found) == {"a", "\U0001f600"}


@given(text=texts)
def test_an_excerpt_is_one_short_line(text: str) -> None:
    found = read_excerpt((ThinkingBlock(text="never"), TextBlock(text=text * 20)))
    assert len(found) <= EXCERPT_LIMIT
    assert found == " ".join(found.split())
    assert "never" not in found or "never" in text
