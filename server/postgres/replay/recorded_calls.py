"""Stored calls for verification, each with the source of its request.

Rebuilding one request needs all turns of its buffer. Reading them for every call would read a long conversation again
and again, so the buffer is a window over the turns that moves with the calls. Each turn is read once, unless a
compaction was reversed and the window moves back. The first pages of many conversations are read together: a batch of
small conversations costs a few round trips.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import zstandard

from server.conversation.assistant import Assistant
from server.conversation.call import Call
from server.conversation.conversation import Conversation
from server.conversation.epoch import Epoch
from server.conversation.errors import NotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, encode_id
from server.conversation.store import PayloadSource
from server.conversation.usage import Usage
from server.postgres.codec import decode_text, encode_text
from server.postgres.engine import Database
from server.postgres.paging import ABOVE_ALL_SEQS
from server.postgres.payload.loading import PayloadStore, load_continued
from server.postgres.payload.manifests import ManifestReader
from server.postgres.replay import call_rows
from server.postgres.replay.call_rows import PAGE_BYTES, PAGE_ROWS, FirstRows, RowPage, read_call
from server.postgres.replay.shared_parts import SharedParts
from server.postgres.replay.turn_audit import TurnAudit
from server.postgres.replay.turn_window import TurnWindow
from server.postgres.rows import Row, assistant_from, conversation_from, epoch_from
from server.replay.verify.epoch_check import check_epoch, check_order
from server.replay.verify.recorded_calls import CallFilter, Flaw, RecordedAnswer, RecordedCall
from server.replay.verify.verification import UNREADABLE, describe_unreadable

_ASSISTANTS: Final = 200
_BEFORE_TURNS: Final = (0, 0)
_BEFORE_ALL: Final = (-ABOVE_ALL_SEQS, -1)


class PostgresRecordedCalls:
    """Implements `server.replay.verify.recorded_calls.RecordedCalls`, for one tenant or for all."""

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
        self._assistants: dict[tuple[UUID, int], Assistant | None] = {}
        self._templates: set[bytes] = set()
        """Hashes of templates that exist and match."""

    async def conversations(
        self, conversation_ids: Sequence[str], wanted: CallFilter
    ) -> AsyncIterator[tuple[str, AsyncIterator[RecordedCall | Flaw]]]:
        ids = [found for each in conversation_ids if (found := decode_id(CONVERSATION, each)) is not None]
        frames = await self._database.run(call_rows.FRAMES, conversations=ids, tenant=self._tenant)
        by_id = {row["id"]: row for row in frames}
        existing = [each for each in ids if each in by_id]
        if not existing:
            return
        epochs = await self._database.run(call_rows.EPOCHS, conversations=existing)
        turns = await self.read_turns(existing, after_seq=0)
        calls = await self.read_calls(existing, wanted, after=_BEFORE_TURNS)
        background = await self.read_calls(existing, wanted, after=_BEFORE_ALL, until_seq=0)
        references = await self._read_references(existing)
        for each in existing:
            conversation = _ConversationCalls(
                store=self,
                database=self._database,
                wanted=wanted,
                row=by_id[each],
                epoch_rows=[row for row in epochs if row["conversation_id"] == each],
                first_turns=turns.take(each),
                first_calls=calls.take(each),
                first_background=background.take(each),
                references=references.get(each, {}),
            )
            yield conversation.id, conversation.items()

    async def has_conversation(self, conversation_id: str) -> bool:
        key = decode_id(CONVERSATION, conversation_id)
        return bool(await self._database.run(call_rows.EXISTS, conversation=key))

    async def read_turns(self, conversations: Sequence[UUID], *, after_seq: int) -> RowPage:
        """Read one page of the turns after this one."""
        rows = await self._database.run(
            call_rows.TURNS,
            conversations=list(conversations),
            after_seq=after_seq,
            **self._limits,
        )
        return RowPage(rows, **self._limits)

    async def read_calls(
        self,
        conversations: Sequence[UUID],
        wanted: CallFilter,
        *,
        after: tuple[int, int],
        until_seq: int = ABOVE_ALL_SEQS,
    ) -> RowPage:
        """Read one page of the calls after this one."""
        rows = await self._database.run(
            call_rows.CALLS,
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
        return RowPage(rows, **self._limits)

    async def load_assistant(self, assistant: UUID, version: int) -> Assistant | None:
        """Load a version, which never changes. None if it is missing or cannot be read."""
        key = (assistant, version)
        if key not in self._assistants:
            rows = await self._database.run(call_rows.ASSISTANT, assistant=assistant, version=version)
            if len(self._assistants) >= _ASSISTANTS:
                self._assistants.clear()
            try:
                self._assistants[key] = assistant_from(rows[0]) if rows else None
            except UNREADABLE:
                self._assistants[key] = None
        return self._assistants[key]

    async def has_template(self, template_hash: bytes) -> bool:
        """Return whether the template exists and matches its hash."""
        if template_hash not in self._templates:
            rows = await self._database.run(call_rows.TEMPLATE, template_hash=template_hash)
            sources = [decode_text(row["source"]).encode("utf-8", "surrogatepass") for row in rows]
            self._templates |= {hashlib.sha256(source).digest() for source in sources}
        return template_hash in self._templates

    async def _read_references(self, conversations: Sequence[UUID]) -> dict[UUID, dict[int, frozenset[str]]]:
        """Return the image references by conversation and turn."""
        found: dict[UUID, dict[int, frozenset[str]]] = {}
        for row in await self._database.run(call_rows.REFERENCES, conversations=list(conversations)):
            turns = found.setdefault(row["conversation_id"], {})
            turns[row["seq"]] = turns.get(row["seq"], frozenset()) | {row["sha256"].hex()}
        return found


@dataclass(slots=True, kw_only=True)
class _ConversationCalls:
    """The calls of one conversation. The rows given are those of the first pages."""

    store: PostgresRecordedCalls
    database: Database
    wanted: CallFilter
    row: Row
    epoch_rows: Sequence[Row]
    first_turns: FirstRows
    first_calls: FirstRows
    first_background: FirstRows
    references: Mapping[int, frozenset[str]]
    _audit: TurnAudit = field(init=False)
    _window: TurnWindow = field(init=False)
    _shared: SharedParts = field(init=False)
    _manifests: ManifestReader = field(init=False)
    _epochs: dict[int, Epoch] = field(default_factory=dict)
    _usages: tuple[int, dict[int, Usage]] = (0, {})
    _conversation: Conversation | None = None

    @property
    def id(self) -> str:
        return encode_id(CONVERSATION, self.row["id"])

    async def items(self) -> AsyncIterator[RecordedCall | Flaw]:
        self._audit = TurnAudit(self.row, self.references)
        self._window = TurnWindow(
            self._read_turns, self.first_turns.rows, self._audit.add_turn, skips=not self.wanted.is_open
        )
        self._shared = SharedParts(self.database, self.row)
        self._manifests = ManifestReader(self.database)
        try:
            self._conversation = conversation_from(self.row)
            self._epochs = {row["epoch_number"]: epoch_from(row) for row in self.epoch_rows}
        except UNREADABLE as error:
            yield Flaw(
                position="conversation", note=describe_unreadable("The conversation or one of its epochs", error)
            )
            return
        async for row in self._pages(self.first_calls, ABOVE_ALL_SEQS):
            item = await self._read(row)
            for flaw in self._take_flaws():
                yield flaw
            yield item
        async for row in self._pages(self.first_background, 0):
            yield await self._read(row)
        if self.wanted.is_open:
            try:
                flaws = await self._check_remaining(self._conversation)
            except UNREADABLE as error:
                flaws = [Flaw(position="conversation", note=describe_unreadable("The conversation", error))]
            for flaw in flaws:
                yield flaw

    def _take_flaws(self) -> list[Flaw]:
        return [*self._window.take_flaws(), *self._audit.take_flaws(), *self._shared.take_flaws()]

    async def _check_remaining(self, conversation: Conversation) -> list[Flaw]:
        """Check what no call needed: the turns after the last call, and the epochs."""
        last_seq = conversation.next_seq - 1
        if last_seq:
            await self._window.move(last_seq, last_seq)
        self._audit.end()
        flaws = list(check_order(conversation, self._epochs))
        for number, epoch in sorted(self._epochs.items()):
            text, segments = await self._shared.static_text(epoch), await self._shared.load_segments(epoch)
            assistant = await self.store.load_assistant(self.row["assistant_id"], epoch.assistant_version)
            if assistant is None:
                flaws.append(_missing_assistant(epoch))
                continue
            before = self._epochs.get(number - 1)
            flaws += check_epoch(epoch, before, text, segments, assistant.definition.tools)
            if not await self.store.has_template(epoch.template_hash):
                flaws.append(_missing_template(epoch.template_hash.hex()))
        return [*self._take_flaws(), *flaws]

    async def _pages(self, first: FirstRows, until_seq: int) -> AsyncIterator[Row]:
        """Yield the rows of the first page, and of the pages after it."""
        rows, is_all = first.rows, first.is_all
        after = _BEFORE_TURNS if until_seq else _BEFORE_ALL
        while True:
            for row in rows:
                after = (row["turn_seq"], row["attempt"])
                yield row
            if is_all:
                return
            page = await self.store.read_calls([self.row["id"]], self.wanted, after=after, until_seq=until_seq)
            rows, is_all = page.rows, not page.is_cut

    async def _read(self, row: Row) -> RecordedCall | Flaw:
        try:
            manifest = await self._manifests.expand(self.row["id"], row["turn_seq"], row["attempt"], row["manifest"])
            call, flaws = read_call(row, manifest)
            return await (
                self._read_background_call(call, flaws) if call.turn_seq < 0 else self._read_turn_call(call, flaws)
            )
        except UNREADABLE as error:
            position = f"call {row['attempt']} of turn {row['turn_seq']}"
            return Flaw(position=position, note=describe_unreadable("The call or its source", error))

    async def _read_turn_call(self, call: Call, flaws: tuple[Flaw, ...]) -> RecordedCall:
        epoch = await self._find_epoch(call.start.epoch)
        if epoch is None:
            missing = Flaw(position=f"epoch {call.start.epoch}", note="The epoch of the call is missing.")
            return RecordedCall(call=call, source=None, answer=None, usages=None, flaws=(*flaws, missing))
        await self._window.move(epoch.buffer_start_seq, call.turn_seq)
        if self.wanted.is_open:
            self._audit.add_call(call)
        found: list[Flaw] = []
        answer = self._find_answer(call, found)
        source = await self._build_source(call, epoch, found)
        return RecordedCall(
            call=call,
            source=source,
            answer=answer,
            usages=self._add_usage(call),
            continued=await self._load_continued(call, found),
            flaws=(*flaws, *found),
        )

    async def _load_continued(self, call: Call, flaws: list[Flaw]) -> tuple[bytes | None, ...]:
        try:
            return await load_continued(self.database, self.row["id"], call)
        except zstandard.ZstdError:
            flaws.append(Flaw(position="continuation", note="The raw bytes of a continued call are damaged."))
            return (None,)

    async def _find_epoch(self, number: int) -> Epoch | None:
        """Find an epoch. A turn that was taken meanwhile may have started a new one."""
        if number not in self._epochs:
            rows = await self.database.run(call_rows.EPOCHS, conversations=[self.row["id"]])
            self._epochs |= {row["epoch_number"]: epoch_from(row) for row in rows}
        return self._epochs.get(number)

    async def _read_turns(self, after_seq: int) -> Sequence[Row]:
        return (await self.store.read_turns([self.row["id"]], after_seq=after_seq)).rows

    async def _read_background_call(self, call: Call, flaws: tuple[Flaw, ...]) -> RecordedCall:
        """Read a background call. There are few, so each loads its own source."""
        if self.wanted.is_open:
            self._audit.add_background_call(call)
        for warning in call.start.warnings:
            if "template_hash" in warning and not await self.store.has_template(
                bytes.fromhex(warning["template_hash"])
            ):
                flaws = (*flaws, _missing_template(warning["template_hash"]))
        tenant_id = encode_id(TENANT, self.row["tenant_id"])
        try:
            rebuild = await PayloadStore(self.database).load_rebuild_source(
                tenant_id, self.id, call.turn_seq, call.start.attempt
            )
        except NotFound as error:
            flaw = Flaw(position="request", note=f"The source is missing: {error} [{error.code}]")
            return RecordedCall(call=call, source=None, answer=None, usages=None, flaws=(*flaws, flaw))
        except UNREADABLE as error:
            flaw = Flaw(position="request", note=describe_unreadable("The source of the request", error))
            return RecordedCall(call=call, source=None, answer=None, usages=None, flaws=(*flaws, flaw))
        return RecordedCall(call=call, source=rebuild.source, answer=None, usages=None, flaws=flaws)

    def _find_answer(self, call: Call, flaws: list[Flaw]) -> RecordedAnswer | None:
        turn = self._window.find(call.turn_seq)
        if turn is None or turn.row["attempt"] != call.start.attempt:
            return None
        try:
            return turn.as_answer()
        except UNREADABLE as error:
            flaws.append(Flaw(position=f"turn {turn.seq}", note=describe_unreadable("The turn", error)))
            return None

    async def _build_source(self, call: Call, epoch: Epoch, flaws: list[Flaw]) -> PayloadSource | None:
        assistant = await self.store.load_assistant(self.row["assistant_id"], epoch.assistant_version)
        if assistant is None or self._conversation is None:
            flaws.append(_missing_assistant(epoch))
            return None
        sent = [turn for turn in self._window.turns if epoch.buffer_start_seq <= turn.seq <= call.trigger_seq]
        try:
            buffered = tuple(turn.as_buffered(assistant.definition.provider) for turn in sent)
            images = list(dict.fromkeys(image for turn in sent for image in turn.images))
        except UNREADABLE as error:
            flaws.append(Flaw(position="turns", note=describe_unreadable("A turn of the request", error)))
            return None
        blobs = await self._shared.load_blobs(images)
        missing = [image for image in images if image not in blobs]
        if missing:
            flaws += [Flaw(position="image", note="The image is missing.", stored=image) for image in missing]
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
        """Return the usages of the turn so far. None if an earlier call of it was not read."""
        seq, usages = self._usages
        if seq != call.turn_seq:
            usages = {}
            self._usages = (call.turn_seq, usages)
        usages[call.start.attempt] = Usage() if call.end is None else call.end.usage
        return tuple(usages.values()) if len(usages) == call.start.attempt else None


def _missing_template(template_hash: str) -> Flaw:
    note = "The template is missing, or does not match its hash."
    return Flaw(position="template", note=note, stored=template_hash)


def _missing_assistant(epoch: Epoch) -> Flaw:
    note = "The assistant version is missing, or cannot be read."
    return Flaw(position=f"assistant version {epoch.assistant_version}", note=note)
