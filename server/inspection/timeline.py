"""A timeline as it is told to people: what belongs together, what changed on the way, where history was cut."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.block import JsonValue, ToolCallBlock
from server.conversation.epoch import EpochReason
from server.conversation.store import EpochOutline
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn
from server.inspection.port import CallOutline, EpochMark, Timeline, TimelineTurn

_CLOCK: Final = "current_datetime"
"""Changes with every call, and says nothing."""
_RENDERING: Final = frozenset({EpochReason.STARTED, EpochReason.ASSISTANT_CHANGED, EpochReason.ARGUMENTS_CHANGED})
"""Other epochs keep the text that they find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldCall:
    """A call, and the epoch that it is the first of."""

    call: CallOutline
    begins: EpochMark | None
    """None where the call before was made in the same epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A compaction: the turns before this place are not messages any more."""

    outline: EpochOutline
    undone_by: EpochOutline | None
    tokens_before: int | None
    """Input of the newest call before it, and of the first after it; None where that call is not among those shown."""
    tokens_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldTurn:
    """A turn, and what has to be said with it."""

    item: TimelineTurn
    calls: Sequence[ToldCall]
    cuts: Sequence[Cut]
    """Those that cut right before this turn."""
    context: JsonValue
    """The dynamic layer of its newest call; text where it is no JSON, None without a call."""
    is_context_new: bool
    """Whether it says something else than that of the call before, the clock aside."""
    called_tools: Mapping[str, str]
    """For results: the names of the tools that they come from, by the ids of the calls, where the calls are shown."""
    answered_ids: frozenset[str]
    """For an answer: the calls whose results stand in the next turn."""

    @property
    def new_args(self) -> Mapping[str, JsonValue] | None:
        """The conversation's args, where a static text was rendered with them for this turn; None to begin without."""
        marks = [told.begins for told in self.calls if told.begins and told.begins.reason in _RENDERING]
        if not marks or (marks[-1].reason is EpochReason.STARTED and not marks[-1].args):
            return None
        return marks[-1].args

    @property
    def duration_seconds(self) -> float | None:
        """From the first call's start to the last one's end."""
        calls = self.item.calls
        ended_at = calls[-1].ended_at if calls else None
        return None if ended_at is None else max(0.0, (ended_at - calls[0].started_at).total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldTimeline:
    """The turns of a part, oldest first."""

    turns: Sequence[ToldTurn]
    cuts_at_end: Sequence[Cut]
    """Those that left no turn in the buffer, where the part ends the conversation."""
    running_calls: Sequence[ToldCall]


def tell_timeline(timeline: Timeline) -> ToldTimeline:
    """What a part of a conversation has to say."""
    calls = list(_tell_calls(timeline))
    cuts = list_cuts(timeline.epochs, [told.call for told in calls], timeline.earlier_call)
    shown = {item.turn.seq for item in timeline.turns}
    told_turns = []
    context = read_context(timeline.earlier_call)
    for index, item in enumerate(timeline.turns):
        own = [told for told in calls if told.call.turn_seq == item.turn.seq]
        newer = read_context(own[-1].call) if own else None
        told_turns.append(
            ToldTurn(
                item=item,
                calls=own,
                cuts=[cut for cut in cuts if cut.outline.buffer_start_seq == item.turn.seq],
                context=newer,
                is_context_new=newer is not None and _without_clock(newer) != _without_clock(context),
                called_tools=_name_tools(item, timeline.turns[index - 1] if index else None),
                answered_ids=_list_answered(item, timeline.turns[index + 1 : index + 2]),
            )
        )
        context = context if newer is None else newer
    return ToldTimeline(
        turns=told_turns,
        cuts_at_end=[
            cut
            for cut in cuts
            if timeline.later_seq is None
            and cut.outline.buffer_start_seq > timeline.last_seq
            and cut.outline.buffer_start_seq not in shown
        ],
        running_calls=[told for told in calls if timeline.running and told.call.turn_seq == timeline.running.seq],
    )


def read_context(call: CallOutline | None) -> JsonValue:
    """The dynamic layer as a value; as text where it is no JSON, None where there is none."""
    if call is None or not call.dynamic:
        return None
    try:
        return json.loads(call.dynamic)
    except (ValueError, RecursionError):
        return call.dynamic


def list_cuts(
    epochs: Sequence[EpochOutline], calls: Sequence[CallOutline], earlier: CallOutline | None
) -> Sequence[Cut]:
    """Compactions in their order. `epochs` come newest first, as they are stored; `calls` oldest first."""
    undone = _pair_undone(epochs)
    # One that failed has no input to speak of.
    known = [
        (call.epoch, call.usage.input_tokens)
        for call in [*([earlier] if earlier else []), *calls]
        if call.usage and call.usage.input_tokens
    ]
    return [
        Cut(
            outline=outline,
            undone_by=undone.get(outline.number),
            tokens_before=next((tokens for epoch, tokens in reversed(known) if epoch < outline.number), None),
            tokens_after=next((tokens for epoch, tokens in known if epoch >= outline.number), None),
        )
        for outline in reversed(epochs)
        if outline.reason is not EpochReason.COMPACTION_UNDONE
    ]


def _pair_undone(epochs: Sequence[EpochOutline]) -> dict[int, EpochOutline]:
    """Which epoch took back which: always the newest that still held."""
    held: list[int] = []
    undone = {}
    for outline in reversed(epochs):
        if outline.reason is not EpochReason.COMPACTION_UNDONE:
            held.append(outline.number)
        elif held:
            undone[held.pop()] = outline
    return undone


def _tell_calls(timeline: Timeline) -> Iterator[ToldCall]:
    epoch = timeline.earlier_call.epoch if timeline.earlier_call else 0
    running = timeline.running.calls if timeline.running and timeline.later_seq is None else ()
    for call in [*(call for item in timeline.turns for call in item.calls), *running]:
        yield ToldCall(call=call, begins=timeline.call_epochs.get(call.epoch) if call.epoch != epoch else None)
        epoch = call.epoch


def _without_clock(context: JsonValue) -> JsonValue:
    """What a context says; nothing at all where it only has empty lists."""
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
