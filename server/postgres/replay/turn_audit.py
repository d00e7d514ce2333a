"""The roll of a conversation's turns: each is looked at once, and the calls that gave them are crossed off.

Requests and answers prove the turns that calls were made of and have given. What no call is there for is proven here.
"""

from collections.abc import Mapping

from server.conversation.call import Call
from server.conversation.turn import STRATA_DIALECT, TurnKind, TurnState, open_call_ids
from server.conversation.usage import Usage
from server.postgres.codec import decode_text
from server.postgres.replay.turn_window import StoredTurn
from server.postgres.rows import Row, usage_from
from server.replay.verify.call_walk import Flaw
from server.replay.verify.verification import UNREADABLE, tell_unreadable


class TurnAudit:
    """Of one conversation, as it was when it was looked at first: what came later is passed over."""

    def __init__(self, row: Row, references: Mapping[int, frozenset[str]]) -> None:
        """`row`: the conversation's. `references`: by turn the images that are kept for it."""
        self._row = row
        self._references = references
        running: int | None = row["lease_turn_seq"]
        self._last_seq: int = (row["next_seq"] if running is None else min(running, row["next_seq"])) - 1
        self._flaws: list[Flaw] = []
        self._seen_count = 0
        self._task_count = 0
        self._newest: StoredTurn | None = None
        self._given: dict[int, int] = {}
        """Answers whose calls are still to come, with the attempt that gave each; 0 where nobody was asked."""
        self._met = (0, 0)
        """Turn and attempt of the newest call."""

    def take_flaws(self) -> list[Flaw]:
        """What was found to be wrong since this was asked last."""
        flaws, self._flaws = self._flaws, []
        return flaws

    def see(self, turn: StoredTurn) -> None:
        """The next turn."""
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
            self._add(f"turn {turn.seq}", tell_unreadable("The turn", error))

    def meet(self, call: Call) -> None:
        """The next call of a turn, which has been seen where it is there."""
        seq, attempt = call.turn_seq, call.start.attempt
        if seq > self._last_seq:
            return
        self._pass(seq)
        self._count_attempt(call, f"turn {seq}")
        if call.end is None:
            self._add(f"call {attempt} of turn {seq}", "The call has not ended, and its turn has.")
        if attempt > self._given.get(seq, attempt):
            self._add(f"turn {seq} attempt", f"Call {attempt} was made for the turn, and is not known to it.")

    def meet_aside(self, call: Call) -> None:
        """The next call of no turn, which has its epoch's number. They come behind all others."""
        self._pass(self._last_seq + 1)
        epoch = call.start.epoch
        if call.turn_seq != -epoch:
            self._add("turn_seq", "A call of no turn has its epoch's number.", str(call.turn_seq), str(-epoch))
        self._count_attempt(call, f"epoch {epoch}")

    def end(self) -> None:
        """There are no more turns, and no more calls."""
        self._pass(self._last_seq + 1)
        newest = 0 if self._newest is None else self._newest.seq
        if newest < self._last_seq:
            self._add(f"turn {newest + 1}", "The turn is missing.")
        elif self._newest is not None and self._seen_count == self._last_seq:
            self._check_conversation(self._newest)

    def _pass(self, before: int) -> None:
        """No more calls will come for the turns before this one."""
        while self._given and (seq := next(iter(self._given))) < before:
            given = self._given.pop(seq)
            met = self._met[1] if self._met[0] == seq else 0
            if met < given:
                self._add(f"call {met + 1} of turn {seq}", "The call is missing.")

    def _count_attempt(self, call: Call, whose: str) -> None:
        """Attempts follow one another."""
        before = self._met[1] if self._met[0] == call.turn_seq else 0
        self._met = (call.turn_seq, call.start.attempt)
        if call.start.attempt != before + 1:
            self._add(f"call {before + 1} of {whose}", "The call is missing.")

    def _check_input(self, turn: StoredTurn) -> None:
        """An input is stored twice, for reading and as it is sent; and its images are kept by name."""
        row = turn.row
        self._task_count += row["kind"] == TurnKind.USER_TASK
        difference = turn.find_twin_difference()
        if difference is not None:
            note = "What is shown of the turn is not what is sent of it."
            self._add(f"turn {turn.seq} {difference.path}", note, difference.stored, difference.found)
        for name, expected in (("state", TurnState.COMPLETE.value), ("dialect", STRATA_DIALECT)):
            if row[name] != expected:
                self._add(f"turn {turn.seq} {name}", "No input has this.", row[name], expected)
        shown, kept = frozenset(turn.images), self._references.get(turn.seq, frozenset())
        if shown != kept:
            note = "The images that are kept for the turn are not those that it shows."
            self._add(f"turn {turn.seq} images", note, ", ".join(sorted(kept)), ", ".join(sorted(shown)))

    def _check_answer(self, turn: StoredTurn) -> None:
        row = turn.row
        self._given[turn.seq] = row["attempt"] or 0
        if row["attempt"] is not None:
            return
        answer = turn.as_answer()
        if answer.blocks or answer.native or usage_from(row) != Usage() or answer.state is TurnState.COMPLETE:
            self._add(f"turn {turn.seq} attempt", "Something was answered, and by no call.")

    def _check_conversation(self, newest: StoredTurn) -> None:
        """What the conversation has counted."""
        counted: int | None = self._row["exchange_count"]
        if counted not in {None, self._task_count}:
            note = "There are more or fewer user tasks."
            self._add("conversation.exchange_count", note, str(counted), str(self._task_count))
        if self._row["lease_turn_seq"] is not None:
            return
        pending = tuple(decode_text(call_id) for call_id in self._row["pending_call_ids"])
        is_whole = newest.row["kind"] == TurnKind.MODEL_RESPONSE and newest.row["state"] == TurnState.COMPLETE
        try:
            asked = open_call_ids(newest.as_answer().blocks) if is_whole else ()
        except UNREADABLE:
            # Told where the turn was compared.
            return
        if pending != asked:
            note = "The calls that the conversation waits for are not those of its newest answer."
            self._add("conversation.pending_call_ids", note, ", ".join(pending), ", ".join(asked))

    def _add(self, place: str, note: str, stored: str | None = None, found: str | None = None) -> None:
        self._flaws.append(Flaw(place=place, note=note, stored=stored or None, found=found or None))
