"""Recorded tool results, served for the tool calls of a free-running candidate.

A call is identified by its signature: the name of the tool and the arguments in a canonical form, which ignores the
order of keys and the notation of numbers. Equal calls get their results in the recorded order, those of the same
exchange first, because the results of a tool may change during a conversation. After all of them are served, the last
one is served again.

The functions are pure: a process that takes over an item repeats the calls and gets the same results.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.block import JsonValue, ToolCallBlock, ToolResultBlock
from server.conversation.exact_json import Number
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn, Turn, UserTaskTurn
from server.replay.rerun.replay import OnMissingResult
from server.replay.rerun.similarity import measure_similarity

NO_RESULT: Final = {"error": "No result was recorded for this call."}
"""The output of a synthetic error."""
_MAX_DIGITS: Final = 4_000
"""Longer integers are compared as text."""
_MAX_COMPARED_CHARS: Final = 20_000
"""Of arguments, when the most similar ones are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResult:
    """A recorded tool result with its call."""

    exchange: int
    """The index of the exchange, from 0."""
    name: str
    arguments: str
    """In canonical form."""
    output: JsonValue
    is_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedResults:
    """The results for the calls of one answer."""

    blocks: tuple[ToolResultBlock, ...]
    """In the order of the calls. Empty if the item has to end here."""
    used: frozenset[int]
    """The indexes of all recorded results that were served so far."""
    missing_ids: tuple[str, ...]
    """The ids of calls without a recorded result, even if another result was served."""


def canonical_arguments(arguments: JsonValue) -> str:
    """Encode arguments so that equivalent ones are equal."""
    return json.dumps(_canonical(arguments), sort_keys=True, separators=(",", ":"))


def collect_results(turns: Sequence[Turn]) -> tuple[RecordedResult, ...]:
    """Return all tool results of a conversation, oldest first. Results without a call are left out."""
    return tuple(_collect(turns))


def serve_results(
    recorded: Sequence[RecordedResult],
    calls: Sequence[ToolCallBlock],
    *,
    used: frozenset[int],
    exchange: int,
    on_missing: OnMissingResult,
) -> ServedResults:
    """Return the results for the calls of one answer. `used`: the indexes of results served before."""
    served = set(used)
    blocks: list[ToolResultBlock] = []
    missing: list[str] = []
    for call in calls:
        key = canonical_arguments(call.arguments)
        index = _find_equal(recorded, call.name, key, served, exchange)
        if index is None:
            missing.append(call.id)
            index = _find_nearest(recorded, call.name, key, served) if on_missing is OnMissingResult.NEAREST else None
        if index is not None:
            served.add(index)
            result = recorded[index]
            blocks.append(ToolResultBlock(tool_call_id=call.id, output=result.output, is_error=result.is_error))
        elif on_missing is OnMissingResult.SYNTHETIC_ERROR:
            blocks.append(ToolResultBlock(tool_call_id=call.id, output=NO_RESULT, is_error=True))
    is_whole = len(blocks) == len(calls)
    return ServedResults(blocks=tuple(blocks) if is_whole else (), used=frozenset(served), missing_ids=tuple(missing))


def _collect(turns: Sequence[Turn]) -> Iterator[RecordedResult]:
    exchange = -1
    calls: Mapping[str, ToolCallBlock] = {}
    for turn in turns:
        match turn:
            case UserTaskTurn():
                exchange += 1
            case ModelResponseTurn():
                calls = {block.id: block for block in turn.blocks if isinstance(block, ToolCallBlock)}
            case ToolResponseTurn():
                for block in turn.blocks:
                    call = calls.get(block.tool_call_id) if isinstance(block, ToolResultBlock) else None
                    if call is not None and isinstance(block, ToolResultBlock):
                        yield RecordedResult(
                            exchange=max(0, exchange),
                            name=call.name,
                            arguments=canonical_arguments(call.arguments),
                            output=block.output,
                            is_error=block.is_error,
                        )


def _find_equal(recorded: Sequence[RecordedResult], name: str, key: str, served: set[int], exchange: int) -> int | None:
    """Return the index of the recorded result for a call, or None.

    Unserved results of this exchange come first, then the newest of earlier exchanges, then the oldest of later ones.
    Earlier ones are preferred, because a candidate delays a call more often than it anticipates one. If all are served,
    it is the newest result up to this exchange, or the first of all.
    """
    equal = [index for index, result in enumerate(recorded) if (result.name, result.arguments) == (name, key)]
    free = [index for index in equal if index not in served]
    same = [index for index in free if recorded[index].exchange == exchange]
    before = [index for index in free if recorded[index].exchange < exchange]
    after = [index for index in free if recorded[index].exchange > exchange]
    again = [index for index in equal if recorded[index].exchange <= exchange]
    return next(iter((*same, *reversed(before), *after, *reversed(again), *equal)), None)


def _find_nearest(recorded: Sequence[RecordedResult], name: str, key: str, served: set[int]) -> int | None:
    """Return the result of the same tool with the most similar arguments; of equal ones, an unserved one."""
    shortened = key[:_MAX_COMPARED_CHARS]
    ranked = [
        (measure_similarity(shortened, result.arguments[:_MAX_COMPARED_CHARS]), index not in served, -index)
        for index, result in enumerate(recorded)
        if result.name == name
    ]
    return -max(ranked)[2] if ranked else None


def _canonical(value: JsonValue) -> JsonValue:
    match value:
        case Number() if any(mark in value for mark in ".eE"):
            return _canonical_number(float(value))
        case Number():
            return int(value) if len(value) <= _MAX_DIGITS else str(value)
        case bool() | None | str() | int():
            return value
        case float():
            return _canonical_number(value)
        case Mapping():
            return {str(key): _canonical(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_canonical(inner) for inner in value]
        case _:
            return str(value)


def _canonical_number(value: float) -> JsonValue:
    """Encode `1.0` as `1`, and infinities and NaN by name."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() else value
