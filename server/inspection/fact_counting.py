"""Facts about a conversation, counted turn by turn.

`count_turns` is pure: it adds new turns to earlier facts. Turns never change and their numbers have no gaps, so
counting in any portions gives the same facts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final

from server.conversation.block import JsonValue, ToolCallBlock
from server.conversation.conversation import ConversationFacts
from server.conversation.errors import TurnInterrupted
from server.conversation.turn import ModelResponseTurn, Turn, TurnState, UserTaskTurn
from server.conversation.turn_text import read_excerpt
from server.conversation.usage import Usage, add_usages
from server.payload.signatures import WithheldReason

LABEL_LIMIT: Final = 200
"""Maximum number of values of each kind, because clients choose the names of tools."""
_VALUE_LIMIT: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCall:
    """The members of a call that are counted."""

    turn_seq: int
    error_code: str | None
    usage: Usage
    cost_usd: Decimal | None
    duration_ms: int | None
    """None if the call has not ended."""
    repairs: Sequence[Mapping[str, JsonValue]]
    warnings: Sequence[Mapping[str, JsonValue]]


def count_turns(
    facts: ConversationFacts, turns: Sequence[Turn], calls: Sequence[CountedCall], *, own_from_seq: int
) -> ConversationFacts:
    """Add turns and calls that were not counted before.

    Calls of turns before `own_from_seq` were copied by a fork, so their usage and cost are not counted.
    """
    if not turns and not calls:
        return facts
    answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
    tools = [block.name for turn in answers for block in turn.blocks if isinstance(block, ToolCallBlock)]
    own = [call for call in calls if call.turn_seq < 0 or call.turn_seq >= own_from_seq]
    warnings = [warning for call in calls for warning in call.warnings]
    codes = [*(turn.error_code for turn in answers), *(call.error_code for call in calls)]
    first = next((turn for turn in turns if isinstance(turn, UserTaskTurn)), None)
    return replace(
        facts,
        last_indexed_seq=max([facts.last_indexed_seq, *(turn.seq for turn in turns)]),
        last_indexed_background_seq=min([facts.last_indexed_background_seq, *(call.turn_seq for call in calls)]),
        turn_count=facts.turn_count + len(turns),
        call_count=facts.call_count + len(own),
        models=_join(facts.models, (turn.model for turn in answers)),
        providers=_join(facts.providers, (turn.provider for turn in answers)),
        states=_join(facts.states, (turn.state for turn in answers)),
        stop_reasons=_join(facts.stop_reasons, (turn.stop_reason for turn in answers)),
        error_codes=_join(facts.error_codes, codes),
        tool_names=_join(facts.tool_names, tools),
        has_repairs=facts.has_repairs or any(call.repairs for call in calls),
        has_missing_signature=facts.has_missing_signature or any(map(_is_missing, warnings)),
        has_withheld_signature=facts.has_withheld_signature or any(map(_is_withheld, warnings)),
        has_prefix_break=facts.has_prefix_break or any(map(_is_prefix_break, warnings)),
        was_recovered=facts.was_recovered or any(map(_was_recovered, answers)),
        usage=add_usages([facts.usage, *(call.usage for call in own)]),
        cost_usd=sum((call.cost_usd for call in own if call.cost_usd is not None), facts.cost_usd),
        unpriced_count=facts.unpriced_count + sum(call.cost_usd is None for call in own),
        slowest_call_ms=_slowest([facts.slowest_call_ms, *(call.duration_ms for call in own)]),
        last_activity_at=max([facts.last_activity_at, *(turn.created_at for turn in turns)]),
        excerpt=facts.excerpt or ("" if first is None else read_excerpt(first.blocks)),
    )


def _join(known: tuple[str, ...], found: Iterable[str | None]) -> tuple[str, ...]:
    """Return all values without duplicates, in order."""
    values = dict.fromkeys([*known, *(str(value)[:_VALUE_LIMIT] for value in found if value)])
    return tuple(values)[:LABEL_LIMIT]


def _is_withheld(warning: Mapping[str, JsonValue]) -> bool:
    return warning.get("kind") == "signatures_withheld"


def _is_missing(warning: Mapping[str, JsonValue]) -> bool:
    return _is_withheld(warning) and warning.get("reason") == WithheldReason.UNSIGNED


def _is_prefix_break(warning: Mapping[str, JsonValue]) -> bool:
    return warning.get("kind") == "prefix_break"


def _was_recovered(turn: ModelResponseTurn) -> bool:
    return turn.state is TurnState.INTERRUPTED or turn.error_code == TurnInterrupted.code


def _slowest(durations: Iterable[int | None]) -> int | None:
    return max((duration for duration in durations if duration is not None), default=None)
