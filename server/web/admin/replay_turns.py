"""One answer of a replay beside the recorded one, as its page shows it: words, calls, and what each took."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, TypeVar

from server.conversation.block import Block, TextBlock, ToolCallBlock
from server.payload.arguments import clone
from server.replay.rerun.comparison import Said
from server.replay.rerun.full_results import FullResult
from server.replay.rerun.result import AnswerFacts
from server.replay.rerun.sides import CallPair, Piece, PieceKind, diff_words, lay_side_by_side

_LONGEST: Final = 12_000
"""Characters of an answer on a page; the export has the whole."""
_SECOND_MS: Final = 1000
_NOTHING: Final = "\u2013"
_MANY: Final = 10
_TIMES: Final = "\u00d7"
_MINUS: Final = "\u2212"
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one of them took, of both."""

    name: str
    recorded: str
    candidate: str
    change: str = ""
    """From the recorded one; empty where there is nothing to compare."""
    is_other: bool = False
    """It differs where it should not: a stop reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """A tool call of one side, its arguments in pieces."""

    name: str
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPair:
    """A recorded call and the candidate's."""

    recorded: ShownCall | None
    candidate: ShownCall | None
    is_same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """A result as its page shows it."""

    full: FullResult
    pieces: Sequence[Piece]
    pairs: Sequence[ShownPair]
    figures: Sequence[Figure]
    task: str
    is_cut: bool


def show_turn(full: FullResult) -> ShownTurn:
    """Pure, and of bounded size."""
    recorded = Said(blocks=(), stop_reason=None) if full.recorded is None else full.recorded
    sides = lay_side_by_side(_cut(recorded), _cut(full.candidate))
    result = full.stored.result
    return ShownTurn(
        full=full,
        pieces=sides.pieces,
        pairs=[_show_pair(pair) for pair in sides.calls],
        figures=compare_facts(result.recorded, result.candidate),
        task=full.task[:_LONGEST],
        is_cut=any(len(said.text) > _LONGEST for said in (recorded, full.candidate)),
    )


def compare_facts(recorded: AnswerFacts | None, candidate: AnswerFacts | None) -> tuple[Figure, ...]:
    """What both took, measure by measure."""
    one, other = _stop_of(recorded), _stop_of(candidate)
    is_other = recorded is not None and candidate is not None and one != other
    return (
        Figure(name="Stop reason", recorded=one, candidate=other, is_other=is_other),
        _count("Input", *_both(recorded, candidate, lambda facts: facts.usage.input_tokens)),
        _share("From the cache", *_both(recorded, candidate, lambda facts: facts.cache_share)),
        # With those of the thinking, as in the report.
        _count(
            "Output",
            *_both(recorded, candidate, lambda facts: facts.usage.output_tokens + facts.usage.reasoning_tokens),
        ),
        _cost(recorded, candidate),
        _latency(*_both(recorded, candidate, lambda facts: facts.latency_ms)),
    )


def show_latency(milliseconds: float) -> str:
    """As people read it."""
    return f"{milliseconds / _SECOND_MS:,.2f} s" if milliseconds >= _SECOND_MS else f"{milliseconds:,.0f} ms"


def _cut(said: Said) -> Said:
    text = TextBlock(text=said.text[:_LONGEST])
    calls: Sequence[Block] = said.calls
    return Said(blocks=(text, *calls), stop_reason=said.stop_reason)


def _show_pair(pair: CallPair) -> ShownPair:
    """Of calls of the same tool only the arguments differ, and it is shown where."""
    one, other = pair.recorded, pair.candidate
    pieces: Sequence[Piece] = ()
    if one is not None and other is not None and not pair.is_same:
        pieces = diff_words(_write_arguments(one), _write_arguments(other))
    return ShownPair(
        recorded=None if one is None else ShownCall(name=one.name, pieces=pieces or _whole(one)),
        candidate=None if other is None else ShownCall(name=other.name, pieces=pieces or _whole(other)),
        is_same=pair.is_same,
    )


def _whole(call: ToolCallBlock) -> tuple[Piece, ...]:
    return (Piece(kind=PieceKind.SAME, text=_write_arguments(call)),)


def _write_arguments(call: ToolCallBlock) -> str:
    """Bounded, and by name: in what order they came says nothing."""
    text = json.dumps(clone(call.arguments), ensure_ascii=False, sort_keys=True)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _stop_of(facts: AnswerFacts | None) -> str:
    if facts is None:
        return _NOTHING
    return facts.error_code or facts.stop_reason or "none"


def _both(
    recorded: AnswerFacts | None, candidate: AnswerFacts | None, read: Callable[[AnswerFacts], Value | None]
) -> tuple[Value | None, Value | None]:
    return None if recorded is None else read(recorded), None if candidate is None else read(candidate)


def _count(name: str, one: int | None, other: int | None) -> Figure:
    shown = [_NOTHING if value is None else f"{value:,}" for value in (one, other)]
    return Figure(name=name, recorded=shown[0], candidate=shown[1], change=_relate(one, other))


def _share(name: str, one: float | None, other: float | None) -> Figure:
    shown = [_NOTHING if value is None else f"{value:.0%}" for value in (one, other)]
    change = "" if one is None or other is None else _sign(round(other * 100) - round(one * 100), " points")
    return Figure(name=name, recorded=shown[0], candidate=shown[1], change=change)


def _cost(recorded: AnswerFacts | None, candidate: AnswerFacts | None) -> Figure:
    one, other = _both(recorded, candidate, lambda facts: facts.cost_usd)
    return Figure(name="Cost", recorded=_price(recorded), candidate=_price(candidate), change=_relate(one, other))


def _price(facts: AnswerFacts | None) -> str:
    if facts is None:
        return _NOTHING
    return "unknown" if facts.cost_usd is None else f"${facts.cost_usd:,.5f}"


def _latency(one: int | None, other: int | None) -> Figure:
    shown = [_NOTHING if value is None else show_latency(value) for value in (one, other)]
    return Figure(name="Latency", recorded=shown[0], candidate=shown[1], change=_relate(one, other))


def _relate(one: Decimal | int | None, other: Decimal | int | None) -> str:
    """By how many of a hundred, or how many times as much; of nothing nobody can say."""
    if one is None or other is None or not one:
        return ""
    if (times := float(other) / float(one)) >= _MANY:
        return f"{_TIMES}{times:,.0f}"
    return _sign(round((float(other) / float(one) - 1) * 100), " %")


def _sign(number: int, unit: str) -> str:
    return "±0" if not number else f"{'+' if number > 0 else _MINUS}{abs(number):,}{unit}"
