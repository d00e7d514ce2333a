"""A part of a conversation with the calls that were made for each turn: the projection that all renderings use.

An inspector reads the rows and calls `annotate_timeline`, which adds what follows from them: changes of the context,
the epochs that calls began, compactions, and which tool result belongs to which call.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Final, assert_never

from server.conversation.block import JsonValue, ToolCallBlock
from server.conversation.conversation import Conversation, ConversationFacts
from server.conversation.epoch import EpochReason
from server.conversation.payload import LayerOrder
from server.conversation.store import EpochOutline
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn, Turn, UserTaskTurn, describe_ending
from server.conversation.usage import Usage
from server.inspection.call_explanation import ErrorExplanation, explain_error

TIMELINE_LIMIT: Final = 100
"""Maximum number of turns in one timeline."""
TIMELINE_BYTES: Final = 4 * 1024 * 1024
"""A timeline has fewer turns if they would take more bytes than this in the store. It always has one."""
_CLOCK: Final = "current_datetime"
"""The member of a context that changes with every call."""
_RENDERING: Final = frozenset({EpochReason.STARTED, EpochReason.ASSISTANT_CHANGED, EpochReason.ARGUMENTS_CHANGED})
"""Epochs whose static text was rendered. Other epochs keep the text of the epoch before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMark:
    """How an epoch began."""

    number: int
    reason: EpochReason
    assistant_version: int
    buffer_start_seq: int
    created_at: datetime
    args: Mapping[str, JsonValue] | None
    """The conversation's args that the static text was rendered with. None if they were not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutline:
    """A call without its large columns."""

    turn_seq: int
    attempt: int
    provider: str
    model: str
    epoch: int
    layer_order: LayerOrder
    dynamic: str
    """The dynamic layer as sent."""
    started_at: datetime
    first_byte_at: datetime | None
    ended_at: datetime | None
    status: int | None
    error_code: str | None
    usage: Usage | None
    """None while the call is running."""
    cost_usd: Decimal | None
    cache_expected_tokens: int | None
    cache_miss_reason: str | None
    raw_length: int | None
    repair_count: int
    template_failure_count: int
    warning_kinds: tuple[str, ...]
    began_epoch: EpochMark | None = None
    """In a timeline: the epoch of which this is the first call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """A compaction: the turns before it are no longer sent as messages."""

    outline: EpochOutline
    undone_by: EpochOutline | None
    tokens_before: int | None
    """Input tokens of the last call before the compaction. None if that call is not in the timeline."""
    tokens_after: int | None
    """Input tokens of the first call after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineTurn:
    """A turn with the calls that were made for it, oldest first. `annotate_timeline` sets the other members."""

    turn: Turn
    calls: Sequence[CallOutline] = ()
    compactions: Sequence[Compaction] = ()
    """Compactions after which this turn is the first message."""
    context: JsonValue = None
    """The dynamic layer of the newest call: a value, or text if it is not JSON. None without a call."""
    is_context_changed: bool = False
    """Whether the context differs from that of the call before, apart from the time."""
    tool_names: Mapping[str, str] = field(default_factory=dict)
    """For tool results: the names of the tools by call id, if the calls are in the timeline."""
    answered_call_ids: frozenset[str] = frozenset()
    """For an answer: the ids of the tool calls whose results are in the next turn."""

    @property
    def role(self) -> str:
        """`user`, `model` or `tools`."""
        match self.turn:
            case UserTaskTurn():
                return "user"
            case ModelResponseTurn():
                return "model"
            case ToolResponseTurn():
                return "tools"
            case _:
                assert_never(self.turn)

    @property
    def answer(self) -> ModelResponseTurn | None:
        """The turn if it is an answer."""
        return self.turn if isinstance(self.turn, ModelResponseTurn) else None

    @property
    def args(self) -> Mapping[str, JsonValue] | None:
        """The prompt arguments that were sent with this turn."""
        return None if isinstance(self.turn, ModelResponseTurn) else self.turn.args

    @property
    def conversation_args(self) -> Mapping[str, JsonValue] | None:
        """The conversation's args, if a static text was rendered with them for this turn. None for empty first ones."""
        marks = [call.began_epoch for call in self.calls if call.began_epoch and call.began_epoch.reason in _RENDERING]
        if not marks or (marks[-1].reason is EpochReason.STARTED and not marks[-1].args):
            return None
        return marks[-1].args

    @property
    def error(self) -> ErrorExplanation | None:
        """What the error code of an answer means. None without an error, or for a code that this release lacks."""
        code = self.answer.error_code if self.answer else None
        explained = explain_error(code) if code else None
        return explained if explained and explained.message else None

    @property
    def ending(self) -> str:
        """What the provider said about the end of an answer, as sentences; empty if nothing."""
        return describe_ending(self.answer.ending) if self.answer else ""

    @property
    def duration_seconds(self) -> float | None:
        """The time from the start of the first call to the end of the last one. None if it has not ended."""
        ended_at = self.calls[-1].ended_at if self.calls else None
        return None if ended_at is None else max(0.0, (ended_at - self.calls[0].started_at).total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTurn:
    """The turn that is running now."""

    seq: int
    owner: str
    """The process that runs it."""
    lease_expires_at: datetime
    cancel_requested_at: datetime | None
    calls: Sequence[CallOutline] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Consecutive turns of a conversation."""

    tenant_id: str
    tenant_name: str
    conversation: Conversation
    assistant_name: str
    facts: ConversationFacts | None
    """None before the indexer has counted the conversation."""
    turns: Sequence[TimelineTurn]
    earlier_seq: int | None
    """Seq of the turn before the first one here. None if this is the start of the conversation."""
    later_seq: int | None
    """Seq of the turn after the last one here. None if this is the end of the conversation."""
    running: RunningTurn | None
    epochs: Sequence[EpochOutline]
    """Compactions and their undoing, newest first."""
    background_calls: Sequence[CallOutline]
    """Calls that belong to no turn, such as summaries, newest first."""
    last_seq: int = 0
    """Seq of the newest turn of the conversation; 0 before the first."""
    earlier_call: CallOutline | None = None
    """The last call before the first turn here."""
    call_epochs: Mapping[int, EpochMark] = field(default_factory=dict)
    """The epochs of the calls, by number."""
    compactions_at_end: Sequence[Compaction] = ()
    """Compactions that left no turn in the buffer, if this is the end of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineAnchor:
    """Which turns to read. The first member that is set counts; without any, the newest turns."""

    after_seq: int | None = None
    before_seq: int | None = None
    around_seq: int | None = None

    def start_after(self, last_seq: int, count: int) -> int:
        """Return the seq after which to read `count` turns. A seq beyond the last turn means the last turn."""
        if self.after_seq is not None:
            return max(0, self.after_seq)
        if self.before_seq is not None:
            return max(0, min(self.before_seq - 1, last_seq) - count)
        if self.around_seq is not None:
            return max(0, min(self.around_seq, last_seq) - count // 2 - 1)
        return max(0, last_seq - count)


def choose_range(sizes: Sequence[tuple[int, int]], anchor: TimelineAnchor, *, max_bytes: int) -> tuple[int, int] | None:
    """Return the first and last seq of the largest range at the anchor that fits `max_bytes`. None without turns.

    `sizes` are seqs in order with their bytes. The range always contains the turn at the anchor.
    """
    candidates = [item for item in sizes if anchor.before_seq is None or item[0] < max(anchor.before_seq, 1)]
    if not candidates:
        return None
    if anchor.after_seq is not None:
        center = 0
    elif anchor.before_seq is None and anchor.around_seq is not None:
        center = min(range(len(candidates)), key=lambda index: abs(candidates[index][0] - (anchor.around_seq or 0)))
    else:
        center = len(candidates) - 1
    return _grow_range(candidates, center, max_bytes)


def annotate_timeline(timeline: Timeline) -> Timeline:
    """Set the members that are derived from the turns, calls and epochs of a timeline."""
    calls = _mark_epochs(timeline)
    compactions = list_compactions(timeline.epochs, calls, timeline.earlier_call)
    turns = []
    context = read_context(timeline.earlier_call)
    for index, item in enumerate(timeline.turns):
        own = [call for call in calls if call.turn_seq == item.turn.seq]
        newer = read_context(own[-1]) if own else None
        turns.append(
            replace(
                item,
                calls=own,
                compactions=[each for each in compactions if each.outline.buffer_start_seq == item.turn.seq],
                context=newer,
                is_context_changed=newer is not None and _without_clock(newer) != _without_clock(context),
                tool_names=_name_tools(item, timeline.turns[index - 1] if index else None),
                answered_call_ids=_list_answered(item, timeline.turns[index + 1 : index + 2]),
            )
        )
        context = context if newer is None else newer
    running = timeline.running
    shown = {item.turn.seq for item in timeline.turns}
    return replace(
        timeline,
        turns=turns,
        running=running and replace(running, calls=[call for call in calls if call.turn_seq == running.seq]),
        compactions_at_end=[
            each
            for each in compactions
            if timeline.later_seq is None
            and each.outline.buffer_start_seq > timeline.last_seq
            and each.outline.buffer_start_seq not in shown
        ],
    )


def read_context(call: CallOutline | None) -> JsonValue:
    """Return the dynamic layer as a value, as text if it is not JSON, or None if there is none."""
    if call is None or not call.dynamic:
        return None
    try:
        return json.loads(call.dynamic)
    except (ValueError, RecursionError):
        return call.dynamic


def list_compactions(
    epochs: Sequence[EpochOutline], calls: Sequence[CallOutline], earlier: CallOutline | None
) -> Sequence[Compaction]:
    """List compactions, oldest first. `epochs` are newest first, `calls` oldest first."""
    undone = _pair_undone(epochs)
    # Failed calls have no input tokens.
    known = [
        (call.epoch, call.usage.input_tokens)
        for call in [*([earlier] if earlier else []), *calls]
        if call.usage and call.usage.input_tokens
    ]
    return [
        Compaction(
            outline=outline,
            undone_by=undone.get(outline.number),
            tokens_before=next((tokens for epoch, tokens in reversed(known) if epoch < outline.number), None),
            tokens_after=next((tokens for epoch, tokens in known if epoch >= outline.number), None),
        )
        for outline in reversed(epochs)
        if outline.reason is not EpochReason.COMPACTION_UNDONE
    ]


def _grow_range(sizes: Sequence[tuple[int, int]], center: int, max_bytes: int) -> tuple[int, int]:
    """Add one turn at a time, alternating sides. A side ends at the first turn that does not fit."""
    first = last = center
    left = max_bytes - sizes[center][1]
    grows_back, grows_on = True, True
    while grows_back or grows_on:
        grows_on = grows_on and last + 1 < len(sizes) and sizes[last + 1][1] <= left
        if grows_on:
            last += 1
            left -= sizes[last][1]
        grows_back = grows_back and first > 0 and sizes[first - 1][1] <= left
        if grows_back:
            first -= 1
            left -= sizes[first][1]
    return sizes[first][0], sizes[last][0]


def _pair_undone(epochs: Sequence[EpochOutline]) -> dict[int, EpochOutline]:
    """Map compactions to the epochs that undid them: an undo always takes back the newest that is in effect."""
    in_effect: list[int] = []
    undone = {}
    for outline in reversed(epochs):
        if outline.reason is not EpochReason.COMPACTION_UNDONE:
            in_effect.append(outline.number)
        elif in_effect:
            undone[in_effect.pop()] = outline
    return undone


def _mark_epochs(timeline: Timeline) -> list[CallOutline]:
    """All calls of the turns and of the running turn, each with the epoch that it began."""
    epoch = timeline.earlier_call.epoch if timeline.earlier_call else 0
    running = timeline.running.calls if timeline.running and timeline.later_seq is None else ()
    marked = []
    for call in [*(call for item in timeline.turns for call in item.calls), *running]:
        began = timeline.call_epochs.get(call.epoch) if call.epoch != epoch else None
        marked.append(replace(call, began_epoch=began))
        epoch = call.epoch
    return marked


def _without_clock(context: JsonValue) -> JsonValue:
    """The members of a context that can differ: without the time and without empty values. None if none is left."""
    if not isinstance(context, Mapping):
        return context
    return {name: value for name, value in context.items() if name != _CLOCK and value not in ([], {}, None)} or None


def _name_tools(item: TimelineTurn, before: TimelineTurn | None) -> dict[str, str]:
    if not isinstance(item.turn, ToolResponseTurn) or before is None:
        return {}
    return {block.id: block.name for block in before.turn.blocks if isinstance(block, ToolCallBlock)}


def _list_answered(item: TimelineTurn, following: Sequence[TimelineTurn]) -> frozenset[str]:
    if not isinstance(item.turn, ModelResponseTurn) or not following:
        return frozenset()
    return frozenset(
        block_id for block in following[0].turn.blocks if (block_id := getattr(block, "tool_call_id", None)) is not None
    )
