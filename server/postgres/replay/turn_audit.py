"""Checks of a conversation's turns that need no call: each turn is checked once, and matched with its calls.

Rebuilt requests and parsed answers verify the turns that calls used and produced. The rest is checked here.
"""

from collections.abc import Mapping

from server.conversation.call import Call
from server.conversation.turn import STRATA_DIALECT, TurnKind, TurnState, open_call_ids
from server.conversation.usage import Usage
from server.postgres.codec import decode_text
from server.postgres.replay.turn_window import StoredTurn
from server.postgres.rows import Row, usage_from
from server.replay.verify.recorded_calls import Flaw
from server.replay.verify.verification import UNREADABLE, describe_unreadable


class TurnAudit:
    """The audit of one conversation as it was when the audit started. Later turns are ignored."""

    def __init__(self, row: Row, references: Mapping[int, frozenset[str]]) -> None:
        """`row`: the conversation's. `references`: the image references by turn."""
        self._row = row
        self._references = references
        running: int | None = row["lease_turn_seq"]
        self._last_seq: int = (row["next_seq"] if running is None else min(running, row["next_seq"])) - 1
        self._flaws: list[Flaw] = []
        self._seen_count = 0
        self._task_count = 0
        self._newest: StoredTurn | None = None
        self._given: dict[int, int] = {}
        """Answers whose calls have not been read yet, with the attempt that produced each; 0 without a call."""
        self._last_call = (0, 0)
        """Turn and attempt of the newest call."""

    def take_flaws(self) -> list[Flaw]:
        """Remove and return the flaws found since the last call."""
        flaws, self._flaws = self._flaws, []
        return flaws

    def add_turn(self, turn: StoredTurn) -> None:
        """Check the next turn."""
        if turn.seq > self._last_seq:
            return
        self._seen_count += 1
        self._newest = turn
        try:
            if turn.row["kind"] == TurnKind.MODEL_RESPONSE:
                self._check_answer(turn)
            else:
                self._check_input(turn)
        except UNREADABLE as error:
            self._add(f"turn {turn.seq}", describe_unreadable("The turn", error))

    def add_call(self, call: Call) -> None:
        """Match the next call of a turn, which was added before if it exists."""
        seq, attempt = call.turn_seq, call.start.attempt
        if seq > self._last_seq:
            return
        self._pass(seq)
        self._count_attempt(call, f"turn {seq}")
        if call.end is None:
            self._add(f"call {attempt} of turn {seq}", "The call has not ended, but its turn has.")
        if attempt > self._given.get(seq, attempt):
            self._add(
                f"turn {seq} attempt", f"Call {attempt} of the turn is newer than the attempt that the turn names."
            )

    def add_background_call(self, call: Call) -> None:
        """Check the next background call. They come after all others."""
        self._pass(self._last_seq + 1)
        epoch = call.start.epoch
        if call.turn_seq != -epoch:
            self._add(
                "turn_seq",
                "A background call must have the negative number of its epoch.",
                str(call.turn_seq),
                str(-epoch),
            )
        self._count_attempt(call, f"epoch {epoch}")

    def end(self) -> None:
        """Check what can be checked after the last turn and the last call."""
        self._pass(self._last_seq + 1)
        newest = 0 if self._newest is None else self._newest.seq
        if newest < self._last_seq:
            self._add(f"turn {newest + 1}", "The turn is missing.")
        elif self._newest is not None and self._seen_count == self._last_seq:
            self._check_conversation(self._newest)

    def _pass(self, before: int) -> None:
        """Report missing calls of the turns before this one."""
        while self._given and (seq := next(iter(self._given))) < before:
            given = self._given.pop(seq)
            met = self._last_call[1] if self._last_call[0] == seq else 0
            if met < given:
                self._add(f"call {met + 1} of turn {seq}", "The call is missing.")

    def _count_attempt(self, call: Call, whose: str) -> None:
        """Check that attempts are consecutive."""
        before = self._last_call[1] if self._last_call[0] == call.turn_seq else 0
        self._last_call = (call.turn_seq, call.start.attempt)
        if call.start.attempt != before + 1:
            self._add(f"call {before + 1} of {whose}", "The call is missing.")

    def _check_input(self, turn: StoredTurn) -> None:
        """Check an input: its blocks against its native bytes, and its images against their references."""
        row = turn.row
        self._task_count += row["kind"] == TurnKind.USER_TASK
        difference = turn.find_twin_difference()
        if difference is not None:
            note = "The blocks of the turn differ from its native bytes."
            self._add(f"turn {turn.seq} {difference.path}", note, difference.stored, difference.found)
        for name, expected in (("state", TurnState.COMPLETE.value), ("dialect", STRATA_DIALECT)):
            if row[name] != expected:
                self._add(f"turn {turn.seq} {name}", "An input must not have this value.", row[name], expected)
        shown, referenced = frozenset(turn.images), self._references.get(turn.seq, frozenset())
        if shown != referenced:
            note = "The image references of the turn differ from its images."
            self._add(f"turn {turn.seq} images", note, ", ".join(sorted(referenced)), ", ".join(sorted(shown)))

    def _check_answer(self, turn: StoredTurn) -> None:
        row = turn.row
        self._given[turn.seq] = row["attempt"] or 0
        if row["attempt"] is not None:
            return
        answer = turn.as_answer()
        if answer.blocks or answer.native or usage_from(row) != Usage() or answer.state is TurnState.COMPLETE:
            self._add(f"turn {turn.seq} attempt", "The turn has content, but no call.")

    def _check_conversation(self, newest: StoredTurn) -> None:
        """Check the counters of the conversation."""
        counted: int | None = self._row["exchange_count"]
        if counted not in {None, self._task_count}:
            note = "The number of user tasks differs."
            self._add("conversation.exchange_count", note, str(counted), str(self._task_count))
        if self._row["lease_turn_seq"] is not None:
            return
        pending = tuple(decode_text(call_id) for call_id in self._row["pending_call_ids"])
        is_whole = newest.row["kind"] == TurnKind.MODEL_RESPONSE and newest.row["state"] == TurnState.COMPLETE
        try:
            asked = open_call_ids(newest.as_answer().blocks) if is_whole else ()
        except UNREADABLE:
            # Reported when the turn was added.
            return
        if pending != asked:
            note = "The pending tool calls of the conversation are not those of its last answer."
            self._add("conversation.pending_call_ids", note, ", ".join(pending), ", ".join(asked))

    def _add(self, position: str, note: str, stored: str | None = None, found: str | None = None) -> None:
        self._flaws.append(Flaw(position=position, note=note, stored=stored or None, found=found or None))
