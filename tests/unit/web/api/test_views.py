import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import (
    Block,
    ImageBlock,
    SignatureMark,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    UnknownBlock,
)
from server.conversation.errors import StrataError, every_error
from server.conversation.turn import TurnState, UserTaskTurn
from server.web.api.views import ModelTurnView, TurnErrorView, view_blocks, view_turn
from server.web.json_text import encode_json
from tests.support.builders import A_TIME
from tests.support.strategies import blocks
from tests.unit.web.test_sse import TURN

SECRET = "c2lnbmF0dXJl"
MARK = SignatureMark(length=9, fingerprint="0123456789abcdef")


@given(st.lists(blocks, max_size=5))
def test_any_block_can_be_shown_and_no_signature_is_included(made: list[Block]) -> None:
    shown = json.loads(encode_json([view.model_dump() for view in view_blocks(tuple(made))]))
    carriers = [block for block in made if isinstance(block, TextBlock) and not block.text and block.signature]
    assert len(shown) == len(made) - len(carriers)
    assert not any("signature" in block for block in shown)


def test_known_blocks_are_shown_without_their_signatures() -> None:
    shown = [
        view.model_dump()
        for view in view_blocks(
            (
                TextBlock(text="a", signature=MARK),
                TextBlock(text="", signature=MARK),
                ThinkingBlock(text="b", signature=MARK),
                ToolCallBlock(id="c", name="d", arguments={"signature": "the user's"}, signature=MARK),
                ImageBlock(media_type="image/png", sha256="00", size_bytes=1),
            )
        )
    ]
    assert shown == [
        {"type": "text", "text": "a"},
        {"type": "thinking", "text": "b", "redacted": False},
        {"type": "tool_call", "id": "c", "name": "d", "arguments": {"signature": "the user's"}},
        {"type": "image", "media_type": "image/png", "sha256": "00", "size_bytes": 1},
    ]


@pytest.mark.parametrize(
    "name", ["signature", "thoughtSignature", "thought_signature", "data", "encrypted_content", "encryptedContent"]
)
def test_an_unknown_block_is_shown_without_sealed_members(name: str) -> None:
    data = {"type": "news", "kept": [1, {"deep": True, name: SECRET}], name: SECRET, "inner": {name: {"x": SECRET}}}
    (view,) = view_blocks((UnknownBlock(data=data),))
    shown = view.model_dump()
    assert shown == {"type": "unknown", "data": {"type": "news", "kept": [1, {"deep": True}], "inner": {}}}


def test_an_incomplete_answer_has_its_reason() -> None:
    assert ModelTurnView.of(TURN).error is None
    details = {"provider_message": "Overloaded", "provider_status": "overloaded_error", "retry_after_seconds": 7.0}
    failed = ModelTurnView.of(replace(TURN, state=TurnState.FAILED, error_code="provider_overloaded", ending=details))
    assert failed.error == TurnErrorView(
        code="provider_overloaded",
        message="The provider is overloaded.",
        hint="Try again in a moment.",
        source="provider",
        provider_message="Overloaded",
        provider_status="overloaded_error",
        retry_after_seconds=7.0,
    )
    interrupted = ModelTurnView.of(replace(TURN, state=TurnState.INTERRUPTED))
    assert interrupted.error is not None
    assert (interrupted.error.code, interrupted.error.source) == ("turn_interrupted", "strata")
    refused = ModelTurnView.of(replace(TURN, ending={"stop_details": {"category": "bio"}}))
    assert refused.stop_details == {"category": "bio"}


@pytest.mark.parametrize("kind", list(every_error()), ids=lambda kind: kind.code)
def test_every_error_has_a_message(kind: type[StrataError]) -> None:
    assert TurnErrorView.of(kind.code).message


def test_a_code_of_another_release_is_shown_as_an_error() -> None:
    view = TurnErrorView.of("provider_bored")
    assert view.code == "provider_bored"
    assert view.message


def test_a_cost_is_a_number_or_unknown() -> None:
    assert ModelTurnView.of(TURN).cost_usd == pytest.approx(0.0012)
    assert ModelTurnView.of(replace(TURN, cost_usd=None)).cost_usd is None


def test_an_input_turn_is_always_complete() -> None:
    view = view_turn(UserTaskTurn(seq=1, created_at=A_TIME, blocks=(TextBlock(text="a"),)))
    assert view.model_dump() == {
        "seq": 1,
        "kind": "user_task",
        "state": "complete",
        "blocks": [{"type": "text", "text": "a"}],
        "created_at": A_TIME,
    }
