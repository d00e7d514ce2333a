"""A result of a replay on its page: both answers side by side, with their differences marked."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.conversation.block import ToolCallBlock
from server.inspection.differences import LinePart
from server.payload.arguments import clone
from server.replay.rerun.comparison import CallPair, pair_calls
from server.replay.rerun.figures import Figure, compare_facts
from server.replay.rerun.full_results import FullResult
from server.replay.rerun.similarity import diff_words

_MAX_CHARS: Final = 12_000
"""Characters of an answer on a page. The export has the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """A tool call, with its arguments as JSON."""

    name: str
    parts: Sequence[LinePart]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPair:
    """A recorded tool call and the candidate's counterpart."""

    recorded: ShownCall | None
    candidate: ShownCall | None
    is_same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResult:
    """A result with the parts of both texts."""

    full: FullResult
    recorded: Sequence[LinePart]
    candidate: Sequence[LinePart]
    pairs: Sequence[ShownPair]
    figures: Sequence[Figure]
    task: str
    is_cut: bool


def build_shown_result(full: FullResult) -> ShownResult:
    """Compare the answers of a result. Texts are truncated, so the time and the size are bounded."""
    recorded_text = "" if full.recorded is None else full.recorded.text
    recorded, candidate = diff_words(recorded_text[:_MAX_CHARS], full.candidate.text[:_MAX_CHARS])
    pairs = pair_calls(() if full.recorded is None else full.recorded.calls, full.candidate.calls)
    return ShownResult(
        full=full,
        recorded=recorded,
        candidate=candidate,
        pairs=[_show_pair(pair) for pair in pairs],
        figures=compare_facts(full.stored.result.recorded, full.stored.result.candidate),
        task=full.task[:_MAX_CHARS],
        is_cut=max(len(recorded_text), len(full.candidate.text)) > _MAX_CHARS,
    )


def _show_pair(pair: CallPair) -> ShownPair:
    """Mark the differences of the arguments if both calls are there."""
    one, other = pair.recorded, pair.candidate
    if one is not None and other is not None and not pair.is_same:
        recorded, candidate = diff_words(_write_arguments(one), _write_arguments(other))
    else:
        recorded, candidate = (() if call is None else _whole(call) for call in (one, other))
    return ShownPair(
        recorded=None if one is None else ShownCall(name=one.name, parts=recorded),
        candidate=None if other is None else ShownCall(name=other.name, parts=candidate),
        is_same=pair.is_same,
    )


def _whole(call: ToolCallBlock) -> tuple[LinePart, ...]:
    return (LinePart(text=_write_arguments(call)),)


def _write_arguments(call: ToolCallBlock) -> str:
    """Encode the arguments sorted by name, because their order has no meaning."""
    text = json.dumps(clone(call.arguments), ensure_ascii=False, sort_keys=True)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"
