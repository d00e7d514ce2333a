"""A window over the turns of a conversation that moves with its calls. A turn is read once unless it moves back."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from server.conversation.block import Block, ImageBlock, block_from_json, block_to_json, decode_blocks
from server.conversation.store import BufferedTurn
from server.conversation.turn import Native, StopReason, TurnKind, TurnState
from server.inspection.differences import ValueDifference, find_value_difference
from server.postgres.codec import decode_json
from server.postgres.rows import Row, json_or_none, text_or_none, usage_from
from server.replay.verify.recorded_calls import Flaw, RecordedAnswer

ReadTurns: TypeAlias = Callable[[int], Awaitable[Sequence[Row]]]
"""Reads one page of the turns after a number."""


class StoredTurn:
    """A turn's row, decoded on demand. Decoding a damaged one raises one of `UNREADABLE`."""

    __slots__ = ("_bare", "_blocks", "_whole", "row", "seq")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.seq: int = row["seq"]
        self._blocks: tuple[Block, ...] | None = None
        self._bare: BufferedTurn | None = None
        self._whole: BufferedTurn | None = None

    def as_buffered(self, provider: str) -> BufferedTurn:
        """Return the turn as a payload for this provider contains it: see `server.postgres.payload.loading`."""
        row = self.row
        if row["kind"] != TurnKind.MODEL_RESPONSE or (
            row["state"] != TurnState.COMPLETE
            or row["stop_reason"] == StopReason.TOOL_USE
            or text_or_none(row["provider"]) != provider
        ):
            if self._whole is None:
                self._whole = self._buffer(self._read_blocks())
            return self._whole
        if self._bare is None:
            self._bare = self._buffer(None)
        return self._bare

    def as_answer(self) -> RecordedAnswer:
        """Return a model turn as an answer."""
        row = self.row
        return RecordedAnswer(
            blocks=self._read_blocks(),
            native=row["native"],
            state=TurnState(row["state"]),
            stop_reason=None if row["stop_reason"] is None else StopReason(row["stop_reason"]),
            error_code=row["error_code"],
            usage=usage_from(row),
            dialect=row["dialect"],
            provider=text_or_none(row["provider"]),
            model=text_or_none(row["model"]),
            model_version=text_or_none(row["model_version"]),
            account=text_or_none(row["account"]),
        )

    @property
    def images(self) -> Sequence[str]:
        """The hashes of the images of a user task."""
        if self.row["kind"] != TurnKind.USER_TASK:
            return ()
        return [block.sha256 for block in self._read_blocks() if isinstance(block, ImageBlock)]

    def find_twin_difference(self) -> ValueDifference | None:
        """Return the first difference between the blocks of an input and its native bytes, which encode the same."""
        shown = [block_to_json(block_from_json(item)) for item in decode_json(self.row["blocks"])]
        sent = [block_to_json(block) for block in self._read_blocks()]
        return None if shown == sent else find_value_difference(shown, sent, "blocks")

    def _read_blocks(self) -> tuple[Block, ...]:
        if self._blocks is None:
            row = self.row
            if row["kind"] == TurnKind.MODEL_RESPONSE:
                self._blocks = tuple(block_from_json(item) for item in decode_json(row["blocks"]))
            else:
                self._blocks = decode_blocks(row["native"])
        return self._blocks

    def _buffer(self, blocks: tuple[Block, ...] | None) -> BufferedTurn:
        row = self.row
        return BufferedTurn(
            seq=self.seq,
            kind=TurnKind(row["kind"]),
            state=TurnState(row["state"]),
            native=Native(dialect=row["dialect"], data=row["native"]),
            blocks=blocks,
            provider=text_or_none(row["provider"]),
            model=text_or_none(row["model"]),
            model_version=text_or_none(row["model_version"]),
            account=text_or_none(row["account"]),
            language=text_or_none(row["language"]),
            args=json_or_none(row["args"]),
            prefix_hash=row["prefix_hash"],
            dynamic=row["dynamic"],
            input_time=text_or_none(row["input_time"]),
            output_tokens=row["output_tokens"],
            reasoning_tokens=row["reasoning_tokens"],
            created_at=row["created_at"],
        )


class TurnWindow:
    """Consecutive turns. A missing one is reported as a flaw."""

    def __init__(
        self, read: ReadTurns, first_rows: Sequence[Row], on_turn: Callable[[StoredTurn], None], *, skips: bool
    ) -> None:
        """`first_rows`: the first turns, as far as they were read already. `on_turn` is called once for each turn that
        is read; with `skips`, turns that no call needs are not read.
        """
        self._read = read
        self._on_turn = on_turn
        self._skips = skips
        self._seen_seq = 0
        self._last_seq = 0
        """The last turn that was read."""
        self._flaws: list[Flaw] = []
        self._missing: set[int] = set()
        self.turns: list[StoredTurn] = []
        self._extend(first_rows)

    async def move(self, first: int, last: int) -> None:
        """Move to the turns from `first` to `last`, as far as they exist."""
        moves_back = first <= self._last_seq and (not self.turns or first < self.turns[0].seq)
        if moves_back or (self._skips and first > self._last_seq + 1):
            self.turns.clear()
            self._last_seq = first - 1
        self._drop_before(first)
        while self._last_seq < last and (rows := await self._read(self._last_seq)):
            self._extend(rows)
            self._drop_before(first)

    def find(self, seq: int) -> StoredTurn | None:
        """Return the turn if it is in the window."""
        index = seq - self.turns[0].seq if self.turns else -1
        if 0 <= index < len(self.turns) and self.turns[index].seq == seq:
            return self.turns[index]
        return next((turn for turn in self.turns if turn.seq == seq), None)

    def take_flaws(self) -> list[Flaw]:
        """Remove and return the flaws found since the last call."""
        flaws, self._flaws = self._flaws, []
        return flaws

    def _drop_before(self, first: int) -> None:
        del self.turns[: bisect_left(self.turns, first, key=lambda turn: turn.seq)]

    def _extend(self, rows: Sequence[Row]) -> None:
        for row in rows:
            missing = self._last_seq + 1
            if row["seq"] != missing and missing not in self._missing:
                self._missing.add(missing)
                self._flaws.append(Flaw(position=f"turn {missing}", note="The turn is missing."))
            turn = StoredTurn(row)
            self._last_seq = turn.seq
            self.turns.append(turn)
            if turn.seq > self._seen_seq:
                self._seen_seq = turn.seq
                self._on_turn(turn)
