"""Signatures are sent back where they are valid, and nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from server.conversation.block import SignatureMark, TextBlock, ToolCallBlock
from server.conversation.store import BufferedTurn
from server.conversation.turn import Native, TurnKind
from server.payload.signatures import (
    SignatureScope,
    WithheldReason,
    find_current_family,
    find_withheld,
    record_withheld,
)
from server.providers.model_profile import find_profile
from tests.support.fakes.conversation import InMemoryConversation

HERE = b"here"
ELSEWHERE = b"elsewhere"
SIGNED_CALL = ToolCallBlock(id="a", name="f", arguments={}, signature=SignatureMark(length=1, fingerprint="00"))


def scope(model: str, account: str = "one") -> SignatureScope:
    provider = "gemini" if model.startswith("gemini") else "anthropic"
    return SignatureScope(provider=provider, account=account, profile=find_profile(provider, model), prefix_hash=HERE)


def withheld_from(turns: Sequence[BufferedTurn], asked: SignatureScope) -> Mapping[int, WithheldReason]:
    return find_withheld(turns, asked, find_current_family(turns, asked)).reasons


def answer(conversation: InMemoryConversation, model: str | None, **fields: Any) -> BufferedTurn:
    conversation.say("Go.")
    dialect = "gemini" if (model or "gemini").startswith("gemini") else "anthropic"
    values: dict[str, Any] = {
        "native": Native(dialect=dialect, data=b"{}"),
        "provider": dialect,
        "model": model,
        "account": "one",
        "prefix_hash": HERE,
    }
    return conversation.put(TurnKind.MODEL_RESPONSE, fields.pop("blocks", (TextBlock(text="Hm."),)), **values | fields)


@pytest.mark.parametrize(
    ("made_by", "fields", "asked", "reason"),
    [
        ("gemini-3.8-flash", {}, "gemini-3.8-flash", None),
        ("gemini-3.8-flash", {}, "gemini-3.1-pro-preview", None),
        ("gemini-3.8-flash", {"prefix_hash": ELSEWHERE}, "gemini-3.8-flash", None),
        ("gemini-3.8-flash", {"account": "other"}, "gemini-3.8-flash", WithheldReason.ACCOUNT),
        ("gemini-3.8-flash", {"account": None}, "gemini-3.8-flash", WithheldReason.ACCOUNT),
        ("gemini-3.8-flash", {}, "gemini-4-argon", WithheldReason.FAMILY),
        ("gemini-2.5-flash", {}, "gemini-3.8-flash", WithheldReason.FAMILY),
        (None, {}, "gemini-3.8-flash", WithheldReason.FAMILY),
        ("gemini-3.8-flash", {}, "claude-fable-5-2", WithheldReason.PROVIDER),
        ("claude-fable-5-2", {}, "gemini-3.8-flash", WithheldReason.PROVIDER),
        ("claude-fable-5-2", {}, "claude-fable-5-2", None),
        ("claude-fable-5-2", {"account": "other"}, "claude-fable-5-2", None),
        ("claude-opus-5-5", {}, "claude-fable-5-2", None),
        ("claude-fable-5-2", {"prefix_hash": ELSEWHERE}, "claude-fable-5-2", WithheldReason.PREFIX),
        ("claude-fable-5-2", {"prefix_hash": None}, "claude-fable-5-2", WithheldReason.PREFIX),
        ("claude-fable-5-2", {"prefix_hash": ELSEWHERE}, "claude-sonnet-5", None),
        ("gemini-3.8-flash", {"blocks": (SIGNED_CALL,)}, "gemini-3.8-flash", None),
        (
            "gemini-3.8-flash",
            {"blocks": (ToolCallBlock(id="a", name="f", arguments={}), SIGNED_CALL)},
            "gemini-3.8-flash",
            WithheldReason.UNSIGNED,
        ),
        (
            "gemini-2.5-flash",
            {"blocks": (ToolCallBlock(id="a", name="f", arguments={}),)},
            "gemini-2.5-flash",
            None,
        ),
    ],
)
def test_signatures_are_withheld_for_a_reason(
    made_by: str | None, fields: dict[str, Any], asked: str, reason: WithheldReason | None
) -> None:
    conversation = InMemoryConversation()
    turn = answer(conversation, made_by, **fields)
    assert withheld_from(conversation.turns, scope(asked)) == ({} if reason is None else {turn.seq: reason})


def test_results_under_another_prefix_permanently_end_all_thinking_before_them() -> None:
    conversation = InMemoryConversation()
    model = "claude-fable-5-2"
    answer(conversation, model)
    answer(conversation, model, blocks=(SIGNED_CALL,), prefix_hash=ELSEWHERE)
    conversation.say("Never mind.")
    before = {2: WithheldReason.PREFIX, 4: WithheldReason.PREFIX}
    assert withheld_from(conversation.turns, scope(model)) == before
    conversation.turns.pop()
    answer(conversation, model, native=Native(dialect="anthropic", data=b""))
    conversation.say("And?")
    assert withheld_from(conversation.turns, scope(model)) == before
    conversation.turns.pop()
    answer(conversation, model)
    answer(conversation, model)
    assert withheld_from(conversation.turns, scope(model)) == before


def test_a_loop_that_kept_its_prefix_ends_no_thinking() -> None:
    conversation = InMemoryConversation()
    model = "claude-fable-5-2"
    answer(conversation, model)
    answer(conversation, model, blocks=(SIGNED_CALL,), prefix_hash=ELSEWHERE)
    answer(conversation, model, prefix_hash=ELSEWHERE)
    answer(conversation, model)
    assert withheld_from(conversation.turns, scope(model)) == {4: WithheldReason.PREFIX, 6: WithheldReason.PREFIX}


def test_withheld_signatures_are_recorded_by_reason() -> None:
    reasons = {8: WithheldReason.FAMILY, 2: WithheldReason.PROVIDER, 4: WithheldReason.FAMILY}
    assert list(record_withheld(reasons)) == [
        {"kind": "signatures_withheld", "reason": "provider", "seqs": [2]},
        {"kind": "signatures_withheld", "reason": "family", "seqs": [4, 8]},
    ]


def test_thinking_from_before_a_signed_block_stays_valid_after_it_and_that_of_another_block_does_not() -> None:
    """A turn after the block carries the mark of the block, and the prefix from before it is stored with it."""
    conversation = InMemoryConversation()
    before = answer(conversation, "claude-fable-5-2", prefix_hash=ELSEWHERE)
    other = answer(conversation, "claude-fable-5-2", prefix_hash=b"behind another block")
    never = answer(conversation, "claude-fable-5-2", prefix_hash=None)
    behind = answer(conversation, "claude-fable-5-2")
    asked = replace(scope("claude-fable-5-2"), kept_prefix_hashes=(b"earlier", ELSEWHERE))
    withheld = withheld_from(conversation.turns, asked)
    assert withheld == {other.seq: WithheldReason.PREFIX, never.seq: WithheldReason.PREFIX}
    assert withheld_from([before, behind], scope("claude-fable-5-2")) == {before.seq: WithheldReason.PREFIX}
