"""A turn on the page of its conversation."""

from typing import Any

from server.conversation.block import (
    Block,
    ImageBlock,
    SignatureMark,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    UnknownBlock,
)
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState, UserTaskTurn
from server.conversation.usage import Usage
from server.inspection.timeline import TimelineTurn
from server.web.admin.page_budget import PageBudget
from server.web.admin.shown_turns import (
    EXCERPT_BYTES,
    MAX_BLOCKS,
    MIN_BYTES,
    PAGE_BYTES,
    ShownTurn,
    content_of,
    show_turn,
)
from tests.support.builders import A_TIME, tool_call

MARK = SignatureMark(length=3, fingerprint="00ff00ff00ff00ff")


def shown(*blocks: Block, **changes: Any) -> ShownTurn:
    values: dict[str, Any] = {
        "state": TurnState.COMPLETE,
        "stop_reason": StopReason.END_TURN,
        "error_code": None,
        "provider": "gemini",
        "model": "gemini-3.1-pro-preview",
    }
    turn = ModelResponseTurn(
        seq=2,
        created_at=A_TIME,
        blocks=blocks,
        usage=Usage(),
        cost_usd=None,
        attempt=1,
        revision=None,
        **values | changes,
    )
    return show_turn(TimelineTurn(turn=turn), PageBudget())


def test_a_missing_signature_is_marked_if_the_model_requires_one() -> None:
    bare, second = (ToolCallBlock(id=call_id, name="find", arguments={}) for call_id in ("a", "b"))
    assert [block.is_signature_missing for block in shown(bare, second).blocks] == [True, False]
    assert not shown(tool_call("a")).blocks[0].is_signature_missing
    # The requirements of another provider are unknown.
    assert not shown(bare, provider="elsewhere").blocks[0].is_signature_missing


def test_blocks_keep_their_positions_and_the_omitted_ones_are_counted() -> None:
    turn = shown(TextBlock(text=""), TextBlock(text="", signature=MARK), *[TextBlock(text="x")] * 100)
    assert [block.index for block in turn.blocks[:2]] == [1, 2]
    assert turn.hidden_count == 102 - MAX_BLOCKS
    assert len(turn.blocks) == MAX_BLOCKS - 1


def test_only_supported_images_are_shown() -> None:
    kinds = ["image/png", "image/svg+xml"]
    blocks = [ImageBlock(media_type=kind, sha256="00", size_bytes=1) for kind in kinds]
    assert [block.is_drawable for block in shown(*blocks).blocks] == [True, False]


def test_an_error_is_explained_if_this_release_has_an_explanation() -> None:
    known = shown(state=TurnState.FAILED, error_code="provider_disconnected").item.error
    assert known is not None
    assert known.message
    assert shown(state=TurnState.FAILED, error_code="of_another_release").item.error is None


def test_an_unknown_block_is_shown_with_the_name_that_its_provider_uses() -> None:
    blocks = [UnknownBlock(data={"type": "server_tool_use"}), UnknownBlock(data={"codeResult": 1, "type": 2})]
    assert [block.name for block in shown(*blocks, UnknownBlock(data={})).blocks] == [
        "server_tool_use",
        "codeResult",
        "nothing",
    ]


def test_args_and_a_new_context_are_shown_with_their_turn() -> None:
    task = UserTaskTurn(seq=1, created_at=A_TIME, blocks=(TextBlock(text="Hi"),), args={"tone": "formal"})
    turn = show_turn(TimelineTurn(turn=task, context={"todos": ["pack"]}, is_context_changed=True), PageBudget())
    assert turn.args is not None
    assert turn.args.text == '{"tone": "formal"}'
    assert turn.context is not None
    assert turn.item.role == "user"
    unchanged = show_turn(TimelineTurn(turn=task, context={"todos": ["pack"]}), PageBudget())
    assert unchanged.context is None


def test_the_complete_content_of_a_block_can_be_downloaded() -> None:
    assert content_of(ThinkingBlock(text="Hm.")) == "Hm."
    assert content_of(tool_call("a")) == {"city": "Oslo", "days": 3, "scale": 1.5}


def test_a_long_text_is_cut_and_its_length_is_shown() -> None:
    [block] = shown(TextBlock(text="x" * 1_000_000)).blocks
    assert block.excerpt is not None
    assert (len(block.excerpt.text), block.excerpt.length, block.excerpt.is_cut) == (EXCERPT_BYTES, 1_000_000, True)


def test_all_texts_together_stay_within_the_budget_and_each_has_a_beginning() -> None:
    budget = PageBudget(PAGE_BYTES, min_bytes=MIN_BYTES)
    task = UserTaskTurn(seq=1, created_at=A_TIME, blocks=(TextBlock(text="x" * 1_000_000),))
    sizes = [
        len(block.excerpt.text)
        for _ in range(1000)
        for block in show_turn(TimelineTurn(turn=task), budget).blocks
        if block.excerpt
    ]
    assert sizes[-1] == MIN_BYTES
    assert sum(sizes) <= PAGE_BYTES + 1000 * MIN_BYTES
