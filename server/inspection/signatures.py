"""Signatures for operators: which blocks have one, which lack a required one, and which were withheld."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from server.conversation.block import (
    Block,
    ImageBlock,
    JsonValue,
    SignatureMark,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    block_to_json,
)
from server.conversation.turn import ModelResponseTurn, Turn
from server.payload.signatures import WithheldReason
from server.providers.choice import ANTHROPIC, GEMINI
from server.providers.model_profile import ModelProfile, find_profile

_PROFILED: Final = frozenset({GEMINI, ANTHROPIC})
"""Providers that this release has profiles for."""


class SignatureState(StrEnum):
    """The state of a block's signature."""

    PRESENT = "present"
    MISSING = "missing"
    """The model requires one here, and none was received."""
    WITHHELD = "withheld"
    """It is stored, but was not sent with this request."""
    UNSIGNED = "unsigned"
    """None was received, and none is required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSignature:
    """The signature of one block of an answer."""

    seq: int
    index: int
    """Index of the block in its turn."""
    block_type: str
    state: SignatureState
    length: int | None = None
    fingerprint: str | None = None
    reason: str | None = None
    """Why it was withheld."""


def list_sent(turns: Sequence[Turn], warnings: Sequence[Mapping[str, JsonValue]]) -> tuple[BlockSignature, ...]:
    """List the signatures of the answers in a request. The warnings of the call tell which were withheld."""
    reasons = _read_withheld(warnings)
    answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
    return tuple(
        _describe(turn.seq, index, block, reasons.get(turn.seq), is_required=False)
        for turn in answers
        for index, block in _signable(turn.blocks)
    )


def list_received(seq: int, blocks: Sequence[Block], profile: ModelProfile) -> tuple[BlockSignature, ...]:
    """List the signatures of a call's answer."""
    first_call = next((block for block in blocks if isinstance(block, ToolCallBlock)), None)
    return tuple(
        _describe(seq, index, block, None, is_required=profile.signs_calls and block is first_call)
        for index, block in _signable(blocks)
    )


def find_missing(answer: ModelResponseTurn) -> frozenset[int]:
    """Return the indexes of the blocks that lack a required signature. Empty for an unknown provider."""
    if answer.provider not in _PROFILED:
        return frozenset()
    signatures = list_received(answer.seq, answer.blocks, find_profile(answer.provider, answer.model))
    return frozenset(each.index for each in signatures if each.state is SignatureState.MISSING)


def _describe(seq: int, index: int, block: Block, withheld: str | None, *, is_required: bool) -> BlockSignature:
    mark: SignatureMark | None = getattr(block, "signature", None)
    if mark is None:
        is_missing = is_required or (withheld == WithheldReason.UNSIGNED and isinstance(block, ToolCallBlock))
        state = SignatureState.MISSING if is_missing else SignatureState.UNSIGNED
    else:
        state = SignatureState.PRESENT if withheld is None else SignatureState.WITHHELD
    return BlockSignature(
        seq=seq,
        index=index,
        block_type=str(block_to_json(block)["type"]),
        state=state,
        length=None if mark is None else mark.length,
        fingerprint=None if mark is None else mark.fingerprint,
        reason=withheld if state is SignatureState.WITHHELD else None,
    )


def _signable(blocks: Sequence[Block]) -> Iterator[tuple[int, Block]]:
    for index, block in enumerate(blocks):
        if not isinstance(block, ImageBlock | ToolResultBlock | UnknownBlock):
            yield index, block


def _read_withheld(warnings: Sequence[Mapping[str, JsonValue]]) -> dict[int, str]:
    return {
        int(seq): str(warning.get("reason"))
        for warning in warnings
        if warning.get("kind") == "signatures_withheld"
        for seq in warning.get("seqs", ())
    }
