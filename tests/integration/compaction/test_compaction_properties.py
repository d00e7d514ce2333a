"""After any exchanges, compactions, undos, summaries and deaths of a worker, nothing is lost and nothing moves."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from server.compaction.compactor import Compactor
from server.compaction.summary import Summariser, SummaryRequest
from server.conversation.api_key import Tenant
from server.conversation.conversation import ConversationDraft
from server.conversation.epoch import EpochReason, Segment
from server.conversation.errors import CompactionNotFound, ConversationBusy, ProviderNotConfigured
from server.conversation.store import History
from server.conversation.turn import TurnKind, TurnState
from server.payload.builder import hash_prefix
from server.payload.shared_caches import StaticTextCache
from server.postgres.store import PostgresStore
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from server.providers.token_estimate import TokenEstimate
from tests.support.builders import (
    accept,
    answer,
    call_start,
    create_assistant,
    definition,
    epoch,
    tool_response,
    user_input,
)
from tests.support.fakes.compaction_observer import Observed

SECRET = "Rain?"
"""The thinking in the answers of the builders."""
HEADING = re.compile(r"^\[(\d+)(?:-(\d+))?\] ", re.MULTILINE)
RENDERER = JinjaRenderer(load_templates(None), RenderLimits())


class Died(Exception):
    """The worker has died."""


class MortalStore(PostgresStore):
    """Dies before or after its next write, if the test requests it."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store._database)  # noqa: SLF001  reason: the same database
        self.dies: str | None = None

    async def begin_epoch(self, *args: Any, **more: Any) -> None:
        when, self.dies = self.dies, None
        if when == "before":
            raise Died
        await super().begin_epoch(*args, **more)
        if when == "after":
            raise Died


class CannedSummaries(Summariser):
    """Summarises without a provider, or fails."""

    def __init__(self) -> None:
        self.works = True

    def choose(self, segments: Any) -> int:
        return (len(segments) + 1) // 2

    async def summarise(self, tenant_id: str, request: SummaryRequest) -> str:
        del tenant_id
        if not self.works:
            raise ProviderNotConfigured
        return f"In short, of {len(request.segments)}."


@dataclass(slots=True)
class CompactedConversation:
    """One conversation, and its invariants."""

    store: MortalStore
    tenant_id: str
    conversation_id: str
    compactor: Compactor
    summaries: CannedSummaries
    statics: dict[int, list[str]] = field(default_factory=dict)
    """The static texts of each generation, in order."""
    number: int = 0

    async def exchange(self, calls: int, state: TurnState) -> None:
        """A task and its answer, with a tool loop if there are calls."""
        self.number += 1
        epoch_number = (await self.store.load_conversation(self.tenant_id, self.conversation_id)).epoch
        start = call_start(epoch=epoch_number, manifest=())
        turn = user_input(self.conversation_id, f"Task {self.number}.\n[1] user", abandons_calls=True)
        accepted = await accept(self.store, self.tenant_id, turn)
        ids = [f"call-{self.number}-{place}" for place in range(calls)]
        if ids:
            await self.store.finish_turn(accepted.lease, answer("Looking.", calls=ids, start=start))
            accepted = await accept(self.store, self.tenant_id, tool_response(self.conversation_id, ids))
        await self.store.finish_turn(accepted.lease, answer(f"Answer {self.number}.", state=state, start=start))

    async def leave_open(self) -> None:
        """A task whose answer waits for a tool."""
        self.number += 1
        turn = user_input(self.conversation_id, f"Task {self.number}.", abandons_calls=True)
        accepted = await accept(self.store, self.tenant_id, turn)
        await self.store.finish_turn(
            accepted.lease, answer("Looking.", calls=[f"open-{self.number}"], start=call_start(manifest=()))
        )

    async def compact(self, *, force: bool) -> None:
        await self.compactor.compact(self.tenant_id, self.conversation_id, force=force)

    async def undo(self) -> None:
        try:
            await self.compactor.undo(self.tenant_id, self.conversation_id)
        except CompactionNotFound:
            assert (await self.history()).segments == ()
        except ConversationBusy:
            assert (await self.history()).source.conversation.pending_call_ids

    async def summarise(self) -> None:
        rewriter = self.compactor._rewriter  # noqa: SLF001  reason: no window is this small
        if (await self.history()).segments:
            await rewriter.summarise(self.tenant_id, self.conversation_id, 0)

    async def history(self) -> History:
        return await self.store.load_history(self.tenant_id, self.conversation_id)

    async def check(self) -> None:
        history = await self.history()
        source, begun = history.source, history.source.epoch
        assert begun is not None
        assert source.static_text is not None
        turns = (await self.store.list_turns(self.tenant_id, self.conversation_id, limit=100)).items
        covered = [(segment.first_seq, segment.last_seq) for segment in history.segments]
        seqs = [seq for first, last in covered for seq in range(first, last + 1)]
        # No turn is lost from the union of segments and buffer, none is in both, and the order is kept.
        assert seqs + [turn.seq for turn in source.buffered] == [turn.seq for turn in turns]
        assert [(int(a), int(b or a)) for a, b in HEADING.findall(history_text(history)) or []] == expected_headings(
            history
        )
        # A cut is between two exchanges.
        kinds: Mapping[int, TurnKind] = {turn.seq: turn.kind for turn in source.buffered}
        if source.buffered:
            assert kinds[source.buffered[0].seq] is TurnKind.USER_TASK
        assert all(first % 2 == 1 and last % 2 == 0 for first, last in covered)
        assert SECRET not in source.static_text
        assert begun.prefix_hash == hash_prefix(source.static_text, source.assistant.definition.tools)
        self.statics.setdefault(begun.generation, []).append(source.static_text)


def history_text(history: History) -> str:
    return "".join(segment.text for segment in history.segments)


def expected_headings(history: History) -> list[tuple[int, int]]:
    """The expected headings of the history: one per turn, except for summaries."""
    return [
        place
        for segment in history.segments
        for place in (
            [(segment.first_seq, segment.last_seq)]
            if is_summary(segment)
            else [(seq, seq) for seq in range(segment.first_seq, segment.last_seq + 1)]
        )
    ]


def is_summary(segment: Segment) -> bool:
    return segment.summarises is not None


async def open_compacted_conversation(store: PostgresStore, tenant: Tenant) -> CompactedConversation:
    settings_ = {"compaction": {"policy": "threshold", "max_turns": 6, "keep_exchanges": 1}}
    assistant = await create_assistant(store, tenant.id, settings=settings_)
    conversation = await store.create_conversation(tenant.id, ConversationDraft(assistant_id=assistant.id))
    mortal, summaries = MortalStore(store), CannedSummaries()
    tools = definition(settings=settings_).tools
    await store.begin_epoch(tenant.id, conversation.id, epoch(1, prefix_hash=hash_prefix("You help.", tools)))
    compactor = Compactor(
        store=mortal,
        renderer=RENDERER,
        summariser=summaries,
        observer=Observed(),
        # A process that has just started has an empty cache; one that continues has cached what it has written.
        texts=StaticTextCache(),
        estimate=TokenEstimate(),
        full_share=0.0,
    )
    return CompactedConversation(mortal, tenant.id, conversation.id, compactor, summaries)


STEPS = st.one_of(
    st.tuples(st.just("exchange"), st.integers(0, 2), st.sampled_from(list(TurnState))),
    st.tuples(st.just("leave_open")),
    st.tuples(st.just("compact"), st.booleans()),
    st.tuples(st.just("grow")),
    st.tuples(st.just("undo")),
    st.tuples(st.just("summarise"), st.booleans()),
    st.tuples(st.just("die"), st.sampled_from(["before", "after"])),
)


async def take(conversation: CompactedConversation, step: tuple[Any, ...]) -> None:
    match step:
        case ("exchange", calls, state):
            await conversation.exchange(calls, state)
        case ("leave_open",):
            await conversation.leave_open()
        case ("compact", force):
            await conversation.compact(force=force)
        case ("grow",):
            await conversation.exchange(1, TurnState.COMPLETE)
            await conversation.compact(force=True)
        case ("undo",):
            await conversation.undo()
        case ("summarise", works):
            conversation.summaries.works = works
            await conversation.summarise()
        case ("die", when):
            conversation.store.dies = when
        case _:
            raise AssertionError(step)


@settings(max_examples=40)
@given(steps=st.lists(STEPS, min_size=4, max_size=16))
async def test_nothing_is_lost_and_nothing_moves(store: PostgresStore, tenant: Tenant, steps: list[Any]) -> None:
    conversation = await open_compacted_conversation(store, tenant)
    for step in [("exchange", 0, TurnState.COMPLETE), *[("grow",)] * 3, *steps]:
        # Another worker starts with an empty cache; the turns of this process continue with theirs.
        with suppress(Died):
            await take(conversation, step)
        await conversation.check()
    await prove_growth(conversation)


async def prove_growth(conversation: CompactedConversation) -> None:
    """Within a generation the static text only grows, except for what was undone."""
    page = await conversation.store.list_epochs(conversation.tenant_id, conversation.conversation_id, limit=100)
    undone = {item.generation for item in page.items if item.reason is EpochReason.COMPACTION_UNDONE}
    for generation, texts in conversation.statics.items():
        for before, after in pairwise(texts):
            if generation not in undone:
                assert after.startswith(before)
            else:
                assert after.startswith(before) or before.startswith(after)
