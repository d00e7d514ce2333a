"""Recorded tool results, served to a candidate that makes calls of its own.

A call is known by its signature: the tool's name and the arguments in a canonical form, in which neither the order of
keys nor the spelling of a number matters. Equal calls get their results in the order in which they were recorded, those
of the same exchange first: what a tool says may change while a conversation goes on. Where all of them are served, the
last one is served again.

Pure, and a function of what was called before: a process that goes on with a conversation finds out what was served by
asking for it again.
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
"""What a synthetic error says."""
_MAX_DIGITS: Final = 4_000
"""Of numbers that are read as such."""
_LONGEST_COMPARED: Final = 20_000
"""Characters of arguments that are looked at for the nearest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResult:
    """A result, and the call that it was recorded for."""

    exchange: int
    """From 0: how many user tasks came before the one that it belongs to."""
    name: str
    arguments: str
    """Canonical."""
    output: JsonValue
    is_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedResults:
    """What a candidate's calls are answered with."""

    blocks: tuple[ToolResultBlock, ...]
    """In the order of the calls. Empty where the conversation has to stop here."""
    used: frozenset[int]
    """The recorded results that are served by now, by their places."""
    missing_ids: tuple[str, ...]
    """The calls that nothing was recorded for, whatever they were given instead."""


def canonical_arguments(arguments: JsonValue) -> str:
    """Equal for arguments that mean the same."""
    return json.dumps(_canonical(arguments), sort_keys=True, separators=(",", ":"))


def collect_results(turns: Sequence[Turn]) -> tuple[RecordedResult, ...]:
    """All results of a conversation, oldest first. A result whose call is not there belongs to nothing."""
    return tuple(_collect(turns))


def serve_results(
    recorded: Sequence[RecordedResult],
    calls: Sequence[ToolCallBlock],
    *,
    used: frozenset[int],
    exchange: int,
    on_missing: OnMissingResult,
) -> ServedResults:
    """The results for calls that were made together. `used`: what was served before."""
    served = set(used)
    blocks: list[ToolResultBlock] = []
    missing: list[str] = []
    for call in calls:
        key = canonical_arguments(call.arguments)
        place = _find_equal(recorded, call.name, key, served, exchange)
        if place is None:
            missing.append(call.id)
            place = _find_nearest(recorded, call.name, key, served) if on_missing is OnMissingResult.NEAREST else None
        if place is not None:
            served.add(place)
            result = recorded[place]
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
    """The first of this exchange that is left, else the nearest in time: of what came before the last, of what came
    after the first. Where nothing is left, the newest up to this exchange, or else the first there is.

    What came before is preferred: the candidate may have put a call off, and can hardly be ahead of its time.
    """
    equal = [place for place, result in enumerate(recorded) if (result.name, result.arguments) == (name, key)]
    free = [place for place in equal if place not in served]
    same = [place for place in free if recorded[place].exchange == exchange]
    before = [place for place in free if recorded[place].exchange < exchange]
    after = [place for place in free if recorded[place].exchange > exchange]
    again = [place for place in equal if recorded[place].exchange <= exchange]
    return next(iter((*same, *reversed(before), *after, *reversed(again), *equal)), None)


def _find_nearest(recorded: Sequence[RecordedResult], name: str, key: str, served: set[int]) -> int | None:
    """Of the same tool the one with the most similar arguments; one that was not served yet where they are alike."""
    shortened = key[:_LONGEST_COMPARED]
    ranked = [
        (measure_similarity(shortened, result.arguments[:_LONGEST_COMPARED]), place not in served, -place)
        for place, result in enumerate(recorded)
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
    """`1.0` is `1`. What is no number any more is told by its name."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if value.is_integer() else value
