"""The typical length of conversations is available without waiting, and is loaded in the background."""

import asyncio
from dataclasses import dataclass, field

import pytest

from server.compaction.typical_lengths import TypicalLengths
from server.conversation.errors import DatabaseUnavailable


@dataclass(slots=True)
class Lengths:
    """A source that answers when the test allows it."""

    length: float | None = 40.0
    broken: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    at_once: int = 0
    max_at_once: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def load_typical_length(self, tenant_id: str, assistant_id: str) -> float | None:
        self.asked.append((tenant_id, assistant_id))
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        await self.gate.wait()
        self.at_once -= 1
        if self.broken:
            raise DatabaseUnavailable
        return self.length


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def open_lengths() -> Lengths:
    lengths = Lengths()
    lengths.gate.set()
    return lengths


async def test_a_lookup_does_not_wait_and_a_later_one_finds_the_value() -> None:
    lengths = Lengths()
    typical = TypicalLengths(lengths)
    assert typical.find("tenant", "asst") is None
    assert typical.find("tenant", "asst") is None
    lengths.gate.set()
    assert await typical.load("tenant", "asst") == 40
    assert typical.find("tenant", "asst") == 40
    assert lengths.asked == [("tenant", "asst")]


async def test_an_old_value_is_returned_and_loaded_again() -> None:
    lengths, clock = open_lengths(), Clock()
    typical = TypicalLengths(lengths, max_age_seconds=100, clock=clock)
    assert await typical.load("tenant", "asst") == 40
    lengths.length = 50
    clock.now = 99
    assert await typical.load("tenant", "asst") == 40
    clock.now = 100
    assert typical.find("tenant", "asst") == 40
    assert await typical.load("tenant", "asst") == 50
    assert len(lengths.asked) == 2


async def test_too_few_ended_conversations_are_a_value_too() -> None:
    lengths = open_lengths()
    lengths.length = None
    typical = TypicalLengths(lengths)
    for _ in range(3):
        assert await typical.load("tenant", "asst") is None
    assert len(lengths.asked) == 1


async def test_without_a_database_the_last_value_stays(caplog: pytest.LogCaptureFixture) -> None:
    lengths, clock = open_lengths(), Clock()
    typical = TypicalLengths(lengths, max_age_seconds=100, clock=clock)
    assert await typical.load("tenant", "asst") == 40
    lengths.broken = True
    clock.now = 1_000
    assert await typical.load("tenant", "asst") == 40
    # It is not loaded again at once.
    assert await typical.load("tenant", "asst") == 40
    assert len(lengths.asked) == 2
    assert [record.message for record in caplog.records] == ["compaction.length_not_read"]


async def test_many_values_are_loaded_one_after_the_other() -> None:
    lengths = Lengths()
    typical = TypicalLengths(lengths)
    for number in range(5):
        typical.find("tenant", f"asst_{number}")
    lengths.gate.set()
    await asyncio.gather(*(typical.load("tenant", f"asst_{number}") for number in range(5)))
    assert (len(lengths.asked), lengths.max_at_once) == (5, 1)


async def test_the_least_recently_used_value_is_evicted() -> None:
    lengths = open_lengths()
    typical = TypicalLengths(lengths, max_assistants=2)
    for assistant_id in ("a", "b", "a", "c"):
        await typical.load("tenant", assistant_id)
    assert typical.find("tenant", "a") == 40
    assert typical.find("tenant", "c") == 40
    assert typical.find("tenant", "b") is None
    await typical.close()


async def test_closing_cancels_what_is_being_loaded() -> None:
    lengths = Lengths()
    typical = TypicalLengths(lengths)
    typical.find("tenant", "asst")
    await asyncio.sleep(0)
    await typical.close()
    assert lengths.asked == [("tenant", "asst")]
    assert typical.find("tenant", "asst") is None
    await typical.close()
