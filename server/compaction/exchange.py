"""Exchanges: the pieces in which a history is compacted.

An exchange is a user task up to the last model response before the next user task. Every turn belongs to exactly one:
what stands before the first task is an exchange of its own, and what follows an answer without a new task belongs to
the exchange of that answer. A cut between exchanges therefore loses nothing and parts no call from its result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from server.conversation.turn import TurnKind, TurnState


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTurn:
    """A turn of the buffer as the compactor sees it: what it weighs, and which calls hang on it."""

    seq: int
    kind: TurnKind
    state: TurnState = TurnState.COMPLETE
    call_ids: tuple[str, ...] = ()
    result_ids: tuple[str, ...] = ()
    sent_tokens: int
    """As it goes to the provider: with signatures, thinking, and the dynamic block where that stays in its input."""
    segment_tokens: int
    """As it will be in the transcript, without reasoning."""
    thinking_tokens: int = 0
    """Of the sent ones: those that a prefix-bound model loses when what stands before them changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A user task and everything up to the next one."""

    first_seq: int
    last_seq: int
    sent_tokens: int
    segment_tokens: int
    thinking_tokens: int
    answer_count: int
    """How often the model answered in it: the calls that carried the buffer."""
    unsent_tokens: int
    """Of its last answer: no request has carried them yet, as long as the exchange is the newest."""
    is_open: bool
    """Calls wait for results. A following user task declares them dead, so only the newest exchange can be open."""
    is_whole: bool
    """It ends with an answer, and nothing waits: the next turn begins a new exchange."""


def split_exchanges(turns: Sequence[BufferTurn]) -> tuple[Exchange, ...]:
    """The exchanges of the turns, in order. Each turn is in exactly one."""
    groups = list(_group(turns))
    last = len(groups) - 1
    return tuple(_read(group, is_newest=place == last) for place, group in enumerate(groups))


def _group(turns: Sequence[BufferTurn]) -> Iterator[Sequence[BufferTurn]]:
    start = 0
    for place, turn in enumerate(turns):
        if turn.kind is TurnKind.USER_TASK and place > start:
            yield turns[start:place]
            start = place
    if turns:
        yield turns[start:]


def _read(turns: Sequence[BufferTurn], *, is_newest: bool) -> Exchange:
    last = turns[-1]
    answered = last.kind is TurnKind.MODEL_RESPONSE
    is_open = is_newest and bool(_waiting(turns))
    return Exchange(
        first_seq=turns[0].seq,
        last_seq=last.seq,
        sent_tokens=sum(turn.sent_tokens for turn in turns),
        segment_tokens=sum(turn.segment_tokens for turn in turns),
        thinking_tokens=sum(turn.thinking_tokens for turn in turns),
        answer_count=sum(turn.kind is TurnKind.MODEL_RESPONSE for turn in turns),
        unsent_tokens=last.sent_tokens if answered else 0,
        is_open=is_open,
        is_whole=answered and not is_open,
    )


def _waiting(turns: Sequence[BufferTurn]) -> set[str]:
    """The calls of the last answer that have no result. Of an answer that broke off nothing waits."""
    place = max((place for place, turn in enumerate(turns) if turn.kind is TurnKind.MODEL_RESPONSE), default=None)
    if place is None or turns[place].state is not TurnState.COMPLETE:
        return set()
    results = {id_ for turn in turns[place + 1 :] for id_ in turn.result_ids}
    return set(turns[place].call_ids) - results
