"""Every turn is in exactly one exchange, and only the newest exchange can wait for results."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.compaction.state import BufferTurn, Exchange, split_exchanges
from server.conversation.turn import TurnKind, TurnState

KINDS = {"u": TurnKind.USER_TASK, "m": TurnKind.MODEL_RESPONSE, "t": TurnKind.TOOL_RESPONSE}


def turns_of(outline: str) -> list[BufferTurn]:
    """Build turns from words such as `u`, `m:a,b`, `t:a`: the ids are those of calls or of results. `!` marks a
    failed answer.
    """
    turns = []
    for seq, word in enumerate(outline.split(), start=1):
        kind, _, ids = word.removesuffix("!").partition(":")
        named = tuple(filter(None, ids.split(",")))
        turns.append(
            BufferTurn(
                seq=seq,
                kind=KINDS[kind],
                state=TurnState.INTERRUPTED if word.endswith("!") else TurnState.COMPLETE,
                call_ids=named if kind == "m" else (),
                result_ids=named if kind == "t" else (),
                sent_tokens=10 * seq,
                segment_tokens=seq,
            )
        )
    return turns


def spans(exchanges: tuple[Exchange, ...]) -> list[tuple[int, int]]:
    return [(exchange.first_seq, exchange.last_seq) for exchange in exchanges]


@pytest.mark.parametrize(
    ("outline", "expected"),
    [
        ("u m", [(1, 2)]),
        ("u m u m", [(1, 2), (3, 4)]),
        ("u m:a t:a m u m", [(1, 4), (5, 6)]),
        ("u u m", [(1, 1), (2, 3)]),
        ("m u m", [(1, 1), (2, 3)]),
        ("u m t:x u", [(1, 3), (4, 4)]),
        ("", []),
    ],
)
def test_an_exchange_ends_before_the_next_task(outline: str, expected: list[tuple[int, int]]) -> None:
    assert spans(split_exchanges(turns_of(outline))) == expected


@pytest.mark.parametrize(
    ("outline", "is_open", "is_whole"),
    [
        ("u m", False, True),
        ("u m:a", True, False),
        ("u m:a,b t:a", True, False),
        ("u m:a,b t:a t:b", False, False),
        ("u m:a t:a m", False, True),
        ("u m:a t:a m:b", True, False),
        ("u m:a!", False, True),
        ("u", False, False),
    ],
)
def test_the_newest_exchange_is_open_while_calls_are_pending_and_complete_afterwards(
    outline: str, *, is_open: bool, is_whole: bool
) -> None:
    newest = split_exchanges(turns_of(outline))[-1]
    assert (newest.is_open, newest.is_whole) == (is_open, is_whole)


def test_a_following_task_abandons_open_calls() -> None:
    first, second = split_exchanges(turns_of("u m:a u m"))
    assert not first.is_open
    assert second.is_whole


def test_the_size_of_an_exchange_is_the_sum_of_its_turns() -> None:
    exchange = split_exchanges(turns_of("u m:a t:a m"))[0]
    assert exchange.sent_tokens == 100
    assert exchange.segment_tokens == 10
    assert exchange.answer_count == 2
    assert exchange.unsent_tokens == 40


@given(st.lists(st.sampled_from(["u", "m", "m:a", "m:a,b", "t:a", "t:b", "m:a!"]), max_size=20))
def test_any_turns_are_split_without_loss(words: list[str]) -> None:
    turns = turns_of(" ".join(words))
    exchanges = split_exchanges(turns)
    covered = [seq for first, last in spans(exchanges) for seq in range(first, last + 1)]
    assert covered == [turn.seq for turn in turns]
    assert sum(exchange.sent_tokens for exchange in exchanges) == sum(turn.sent_tokens for turn in turns)
    assert not any(exchange.is_open for exchange in exchanges[:-1])
    tasks = {turn.seq for turn in turns if turn.kind is TurnKind.USER_TASK}
    assert tasks <= {exchange.first_seq for exchange in exchanges}
