"""Signatures for operators: which part came with one, which should have, and which are kept back from a request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
from server.providers.model_profile import ModelProfile


class SignatureState(StrEnum):
    """What is to be said of a part's signature."""

    PRESENT = "present"
    MISSING = "missing"
    """The model insists on one here, and none came."""
    WITHHELD = "withheld"
    """It is kept, and was not sent with this request."""
    UNSIGNED = "unsigned"
    """None came, and none has to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSignature:
    """The signature of one part of an answer."""

    seq: int
    place: int
    """Of the block in its turn."""
    block_type: str
    state: SignatureState
    length: int | None = None
    fingerprint: str | None = None
    reason: str | None = None
    """Why it was withheld."""


def report_sent(turns: Sequence[Turn], warnings: Sequence[Mapping[str, JsonValue]]) -> tuple[PartSignature, ...]:
    """Of the answers that a request sent back. `warnings` are the call's: they say what was withheld."""
    reasons = _read_withheld(warnings)
    answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
    return tuple(
        _report(turn.seq, place, block, reasons.get(turn.seq), insists=False)
        for turn in answers
        for place, block in _signable(turn.blocks)
    )


def report_received(seq: int, blocks: Sequence[Block], profile: ModelProfile) -> tuple[PartSignature, ...]:
    """Of the answer that a call gave."""
    first_call = next((block for block in blocks if isinstance(block, ToolCallBlock)), None)
    return tuple(
        _report(seq, place, block, None, insists=profile.signs_calls and block is first_call)
        for place, block in _signable(blocks)
    )


def _report(seq: int, place: int, block: Block, withheld: str | None, *, insists: bool) -> PartSignature:
    mark: SignatureMark | None = getattr(block, "signature", None)
    if mark is None:
        is_missing = insists or (withheld == WithheldReason.UNSIGNED and isinstance(block, ToolCallBlock))
        state = SignatureState.MISSING if is_missing else SignatureState.UNSIGNED
    else:
        state = SignatureState.PRESENT if withheld is None else SignatureState.WITHHELD
    return PartSignature(
        seq=seq,
        place=place,
        block_type=str(block_to_json(block)["type"]),
        state=state,
        length=None if mark is None else mark.length,
        fingerprint=None if mark is None else mark.fingerprint,
        reason=withheld if state is SignatureState.WITHHELD else None,
    )


def _signable(blocks: Sequence[Block]) -> Iterator[tuple[int, Block]]:
    for place, block in enumerate(blocks):
        if not isinstance(block, ImageBlock | ToolResultBlock | UnknownBlock):
            yield place, block


def _read_withheld(warnings: Sequence[Mapping[str, JsonValue]]) -> dict[int, str]:
    return {
        int(seq): str(warning.get("reason"))
        for warning in warnings
        if warning.get("kind") == "signatures_withheld"
        for seq in warning.get("seqs", ())
    }
