"""Walking through stored calls, with what each was made of.

Making a single request again means reading all turns of its buffer; doing that for every call would read a long
conversation again and again. Here the buffer is a window over the turns that moves with the calls: each turn is read
once, unless a compaction was taken back and the window has to go back too. What many small conversations need is read
together, so that a batch costs a handful of round trips.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from server.assistant import Assistant
from server.block import JsonValue
from server.call import Call
from server.call_walk import CallFilter, Flaw, PastAnswer, PastCall
from server.conversation import Conversation
from server.epoch import Epoch
from server.errors import NotFound
from server.identifiers import CONVERSATION, TENANT, decode_id, encode_id
from server.postgres import walk_rows
from server.postgres.codec import decode_json, encode_text
from server.postgres.engine import Database
from server.postgres.loading import load_rebuild_source
from server.postgres.paging import ABOVE_ALL_SEQS
from server.postgres.rows import Row, assistant_from, conversation_from, epoch_from
from server.postgres.shared_parts import SharedParts
from server.postgres.source_rows import HeldRows
from server.postgres.turn_window import TurnWindow
from server.postgres.walk_rows import PAGE_BYTES, PAGE_ROWS, FirstRows, WalkPage, read_call
from server.store import PayloadSource
from server.usage import Usage
from server.verification import UNREADABLE

_ASSISTANTS: Final = 200
_BEFORE_TURNS: Final = (0, 0)
_BEFORE_ALL: Final = (-ABOVE_ALL_SEQS, -1)


class PostgresCallWalk:
    """The port, on Postgres. Bound to a tenant, or to none."""

    def __init__(
        self,
        database: Database,
        *,
        tenant_id: str | None = None,
        page_rows: int = PAGE_ROWS,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self._database = database
        self._limits: dict[str, Any] = {"page_rows": page_rows, "page_bytes": page_bytes}
        self._tenant = None if tenant_id is None else decode_id(TENANT, tenant_id)
        self._assistants: dict[tuple[UUID, int], Assistant] = {}

    async def conversations(
        self, conversation_ids: Sequence[str], wanted: CallFilter
    ) -> AsyncIterator["PostgresWalkedConversation"]:
        """See the port."""
        ids = [found for each in conversation_ids if (found := decode_id(CONVERSATION, each)) is not None]
        frames = await self._database.run(walk_rows.FRAMES, conversations=ids, tenant=self._tenant)
        by_id = {row["id"]: row for row in frames}
        there = [each for each in ids if each in by_id]
        if not there:
            return
        epochs = await self._database.run(walk_rows.EPOCHS, conversations=there)
        turns = await self.read_turns(there, after_seq=0)
        calls = await self.read_calls(there, wanted, after=_BEFORE_TURNS)
        aside = await self.read_calls(there, wanted, after=_BEFORE_ALL, until_seq=0)
        for each in there:
            yield PostgresWalkedConversation(
                walk=self,
                database=self._database,
                wanted=wanted,
                row=by_id[each],
                epoch_rows=[row for row in epochs if row["conversation_id"] == each],
                first_turns=turns.take(each),
                first_calls=calls.take(each),
                first_aside=aside.take(each),
            )

    async def read_turns(self, conversations: Sequence[UUID], *, after_seq: int) -> WalkPage:
        """The turns behind this one, as many as are read at once."""
        rows = await self._database.run(
            walk_rows.TURNS,
            conversations=list(conversations),
            after_seq=after_seq,
            **self._limits,
        )
        return WalkPage(rows, **self._limits)

    async def read_calls(
        self,
        conversations: Sequence[UUID],
        wanted: CallFilter,
        *,
        after: tuple[int, int],
        until_seq: int = ABOVE_ALL_SEQS,
    ) -> WalkPage:
        """The calls behind this one, in the same way."""
        rows = await self._database.run(
            walk_rows.CALLS,
            conversations=list(conversations),
            after_seq=after[0],
            after_attempt=after[1],
            until_seq=until_seq,
            provider=wanted.provider,
            model=None if wanted.model is None else encode_text(wanted.model),
            started_after=wanted.started_after,
            started_before=wanted.started_before,
            **self._limits,
        )
        return WalkPage(rows, **self._limits)

    async def load_assistant(self, assistant: UUID, version: int) -> Assistant | None:
        """A version, which never changes. None where it is not there."""
        key = (assistant, version)
        if key not in self._assistants:
            rows = await self._database.run(walk_rows.ASSISTANT, assistant=assistant, version=version)
            if not rows:
                return None
            if len(self._assistants) >= _ASSISTANTS:
                self._assistants.clear()
            self._assistants[key] = assistant_from(rows[0])
        return self._assistants[key]


@dataclass(slots=True, kw_only=True)
class PostgresWalkedConversation:
    """Implements `server.call_walk.WalkedConversation`. The rows are a first page, as far as it reached."""

    walk: PostgresCallWalk
    database: Database
    wanted: CallFilter
    row: Row
    epoch_rows: Sequence[Row]
    first_turns: FirstRows
    first_calls: FirstRows
    first_aside: FirstRows
    _window: TurnWindow = field(init=False)
    _shared: SharedParts = field(init=False)
    _epochs: dict[int, Epoch] = field(default_factory=dict)
    _usages: tuple[int, dict[int, Usage]] = (0, {})
    _conversation: Conversation | None = None

    @property
    def id(self) -> str:
        return encode_id(CONVERSATION, self.row["id"])

    async def is_there(self) -> bool:
        """See the port."""
        return bool(await self.database.run(walk_rows.STILL_THERE, conversation=self.row["id"]))

    async def load_manifest(self, call: Call) -> Sequence[Mapping[str, JsonValue]]:
        """See the port."""
        rows = await self.database.run(
            walk_rows.MANIFEST, conversation=self.row["id"], turn_seq=call.turn_seq, attempt=call.start.attempt
        )
        manifest: Sequence[Mapping[str, JsonValue]] = decode_json(rows[0]["manifest"]) if rows else ()
        return manifest

    async def items(self) -> AsyncIterator[PastCall | Flaw]:
        """See the port."""
        self._window = TurnWindow(self._read_turns, self.first_turns.rows)
        self._shared = SharedParts(self.database, self.row)
        try:
            self._conversation = conversation_from(self.row)
            self._epochs = {row["epoch_number"]: epoch_from(row) for row in self.epoch_rows}
        except UNREADABLE as error:
            yield Flaw(place="conversation", note=_unreadable("The conversation or one of its epochs", error))
            return
        async for row in self._pages(self.first_calls, ABOVE_ALL_SEQS):
            item = await self._read(row)
            for flaw in (*self._window.take_flaws(), *self._shared.take_flaws()):
                yield flaw
            yield item
        async for row in self._pages(self.first_aside, 0):
            yield await self._read(row)
        if self.wanted.is_open:
            for epoch in list(self._epochs.values()):
                await self._shared.check_static(epoch)
            for flaw in self._shared.take_flaws():
                yield flaw

    async def _pages(self, first: FirstRows, until_seq: int) -> AsyncIterator[Row]:
        """The rows that are there, and those behind them."""
        rows, is_all = first.rows, first.is_all
        after = _BEFORE_TURNS if until_seq else _BEFORE_ALL
        while True:
            for row in rows:
                after = (row["turn_seq"], row["attempt"])
                yield row
            if is_all:
                return
            page = await self.walk.read_calls([self.row["id"]], self.wanted, after=after, until_seq=until_seq)
            rows, is_all = page.rows, not page.is_cut

    async def _read(self, row: Row) -> PastCall | Flaw:
        try:
            call, flaws = read_call(row)
        except UNREADABLE as error:
            place = f"call {row['attempt']} of turn {row['turn_seq']}"
            return Flaw(place=place, note=_unreadable("The call", error))
        if call.turn_seq < 0:
            return await self._read_aside(call, flaws)
        epoch = await self._find_epoch(call.start.epoch)
        if epoch is None:
            missing = Flaw(place=f"epoch {call.start.epoch}", note="The epoch that the call was made in is missing.")
            return PastCall(call=call, source=None, answer=None, usages=None, flaws=(*flaws, missing))
        await self._window.move(epoch.buffer_start_seq, call.turn_seq)
        found: list[Flaw] = []
        if call.start.attempt == 1:
            self._check_input(call.trigger_seq, found)
        answer = self._find_answer(call, found)
        source = await self._build_source(call, epoch, found)
        usages = self._add_usage(call)
        return PastCall(call=call, source=source, answer=answer, usages=usages, flaws=(*flaws, *found))

    async def _find_epoch(self, number: int) -> Epoch | None:
        """A turn that was taken meanwhile may have begun one."""
        if number not in self._epochs:
            rows = await self.database.run(walk_rows.EPOCHS, conversations=[self.row["id"]])
            self._epochs |= {row["epoch_number"]: epoch_from(row) for row in rows}
        return self._epochs.get(number)

    async def _read_turns(self, after_seq: int) -> Sequence[Row]:
        return (await self.walk.read_turns([self.row["id"]], after_seq=after_seq)).rows

    async def _read_aside(self, call: Call, flaws: tuple[Flaw, ...]) -> PastCall:
        """A call of no turn. There are few, so each reads what it was made of by itself."""
        tenant_id = encode_id(TENANT, self.row["tenant_id"])
        try:
            rebuild = await load_rebuild_source(
                self.database, HeldRows(), tenant_id, self.id, turn_seq=call.turn_seq, attempt=call.start.attempt
            )
        except NotFound as error:
            flaw = Flaw(place="request", note=f"What it was made of is gone: {error} [{error.code}]")
            return PastCall(call=call, source=None, answer=None, usages=None, flaws=(*flaws, flaw))
        except UNREADABLE as error:
            flaw = Flaw(place="request", note=_unreadable("What the request was made of", error))
            return PastCall(call=call, source=None, answer=None, usages=None, flaws=(*flaws, flaw))
        return PastCall(call=call, source=rebuild.source, answer=None, usages=None, flaws=flaws)

    def _find_answer(self, call: Call, flaws: list[Flaw]) -> PastAnswer | None:
        turn = self._window.find(call.turn_seq)
        if turn is None:
            self._miss_last(call, flaws)
            return None
        if turn.row["attempt"] != call.start.attempt:
            return None
        try:
            return turn.as_answer()
        except UNREADABLE as error:
            flaws.append(Flaw(place=f"turn {turn.seq}", note=_unreadable("The turn", error)))
            return None

    def _miss_last(self, call: Call, flaws: list[Flaw]) -> None:
        """The window sees a gap; that the last turn is missing, only the conversation knows."""
        is_last = not self._window.turns or self._window.turns[-1].seq < call.turn_seq
        is_taken = call.turn_seq < self.row["next_seq"] and self.row["lease_turn_seq"] != call.turn_seq
        if is_last and is_taken:
            flaws.append(Flaw(place=f"turn {call.turn_seq}", note="The turn is missing."))

    def _check_input(self, seq: int, flaws: list[Flaw]) -> None:
        """An input is stored twice, for reading and as it is sent."""
        turn = self._window.find(seq)
        if turn is None:
            return
        try:
            difference = turn.find_twin_difference()
        except UNREADABLE as error:
            flaws.append(Flaw(place=f"turn {seq}", note=_unreadable("The turn", error)))
            return
        if difference is not None:
            note = "What is shown of the turn is not what is sent of it."
            place = f"turn {seq} {difference.path}"
            flaws.append(Flaw(place=place, note=note, stored=difference.stored, found=difference.found))

    async def _build_source(self, call: Call, epoch: Epoch, flaws: list[Flaw]) -> PayloadSource | None:
        assistant = await self.walk.load_assistant(self.row["assistant_id"], epoch.assistant_version)
        if assistant is None or self._conversation is None:
            place = f"assistant version {epoch.assistant_version}"
            flaws.append(Flaw(place=place, note="The assistant's version of the epoch is missing."))
            return None
        sent = [turn for turn in self._window.turns if epoch.buffer_start_seq <= turn.seq <= call.trigger_seq]
        try:
            buffered = tuple(turn.as_buffered(assistant.definition.provider) for turn in sent)
            images = list(dict.fromkeys(image for turn in sent for image in turn.images))
        except UNREADABLE as error:
            flaws.append(Flaw(place="turns", note=_unreadable("A turn of the request", error)))
            return None
        blobs = await self._shared.hold_blobs(images)
        gone = [image for image in images if image not in blobs]
        if gone:
            flaws += [Flaw(place="image", note="The image is missing.", stored=image) for image in gone]
            return None
        return PayloadSource(
            conversation=self._conversation,
            assistant=assistant,
            epoch=epoch,
            static_text=await self._shared.static_text(epoch),
            buffered=buffered,
            blobs=blobs,
            previous_manifest=(),
            previous_order=None,
            previous_prefix_hash=None,
        )

    def _add_usage(self, call: Call) -> tuple[Usage, ...] | None:
        """Those of the turn so far. None where a call before this one was not met."""
        seq, usages = self._usages
        if seq != call.turn_seq:
            usages = {}
            self._usages = (call.turn_seq, usages)
        usages[call.start.attempt] = Usage() if call.end is None else call.end.usage
        return tuple(usages.values()) if len(usages) == call.start.attempt else None


def _unreadable(what: str, error: Exception) -> str:
    return f"{what} cannot be read ({type(error).__name__})."
