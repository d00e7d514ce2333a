"""Plans of synthetic conversations for seeding a database: assistants, tasks, answers and failures.

A plan is made with a seeded random number generator, so the same seed gives the same plan. The frequencies are those of
typical use: most answers are plain text, some need tools, few fail.
"""

import struct
import zlib
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from random import Random
from typing import Final
from uuid import UUID

from server.conversation.assistant import AssistantDefinition, Instructions, Tool

_MAX_SAMPLE: Final = 240
"""The maximum number of distinct conversations; the others are copies of them."""
_MIN_SAMPLE: Final = 12
_TURNS_PER_SAMPLE: Final = 60
_MODELS: Final = (
    ("gemini", "gemini-3.1-pro-preview"),
    ("gemini", "gemini-3.8-flash"),
    ("gemini", "gemini-2.5-flash"),
    ("anthropic", "claude-opus-5-5"),
    ("anthropic", "claude-sonnet-5-5"),
    ("anthropic", "claude-haiku-4-5"),
)
_TRADES: Final = (
    "travel",
    "kitchen",
    "garden",
    "library",
    "workshop",
    "harbour",
    "clinic",
    "school",
    "railway",
    "bakery",
)
_TOOLS: Final = ("get_weather", "find_order", "search_documents", "book_table", "read_meter")
_LANGUAGES: Final = ("en", "en", "en", "de", "fr", "")
_VOCABULARY: Final = (
    "amber anchor apple autumn basket bell blue bread bridge candle carpet castle cedar chalk cloud coast copper "
    "cotton crane crystal dawn desk drum dune ember falcon feather fern field flute forest fountain fox garden glass "
    "grain granite harbour hazel heron hill honey ink iron island ivory ivy kettle lake lamp lantern leaf ledger "
    "lemon linen maple marble market meadow mill mirror moon moss needle north oak ocean olive orchard otter paper "
    "pearl pepper pine plum pond quartz quill rain raven reed ribbon river robin rope saddle salt sand silver sky "
    "slate snow spring spruce star stone storm straw sugar summer swan table tea thistle tide timber tower valley "
    "velvet violet walnut water wheel willow wind winter wolf wool"
)
_WORDS: Final = _VOCABULARY.split()
_HOUR_WEIGHTS: Final = (1, 1, 1, 1, 1, 2, 4, 8, 14, 18, 20, 18, 14, 16, 18, 18, 16, 12, 9, 8, 7, 5, 3, 2)
_WEEKEND: Final = 5
_WEEKEND_SHARE: Final = 0.3
_PICTURE_SHARE: Final = 0.06
_COMPACTED_AFTER: Final = 6
"""A conversation is compacted each time after this many exchanges."""


class Happening(StrEnum):
    """The outcome of a user task."""

    ANSWERED = "answered"
    TOOLS = "tools"
    RETRIED = "retried"
    REFUSED = "refused"
    LENGTH = "length"
    CUT = "cut"
    OVERLOADED = "overloaded"
    UNAUTHENTICATED = "unauthenticated"
    EMPTY = "empty"
    CANCELLED = "cancelled"


_FREQUENCIES: Final = {
    Happening.ANSWERED: 60,
    Happening.TOOLS: 24,
    Happening.RETRIED: 3,
    Happening.REFUSED: 2,
    Happening.LENGTH: 2,
    Happening.CUT: 2,
    Happening.OVERLOADED: 2,
    Happening.UNAUTHENTICATED: 1,
    Happening.EMPTY: 1,
    Happening.CANCELLED: 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedExchange:
    """A task and its answer."""

    happening: Happening
    task: str
    thinking: str
    reply: str
    tool_names: tuple[str, ...] = ()
    """The tools that are called in parallel; for `tools` only."""
    picture: bytes | None = None
    """A PNG that is sent with the task."""
    compacts: bool = False
    """Whether the conversation is compacted afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedConversation:
    """A conversation of the sample."""

    assistant: int
    """The index of its assistant."""
    identifier: str
    language: str | None
    exchanges: tuple[SeedExchange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedPlan:
    """The assistants, and the conversations that are run with them."""

    assistants: tuple[AssistantDefinition, ...]
    sample: tuple[SeedConversation, ...]


def plan_seed(random: Random, turn_count: int) -> SeedPlan:
    """Plan a database with the given number of turns."""
    assistants = tuple(_plan_assistant(random, trade, index) for index, trade in enumerate(_TRADES))
    size = min(_MAX_SAMPLE, max(_MIN_SAMPLE, turn_count // _TURNS_PER_SAMPLE))
    conversations = [_plan_conversation(random, len(assistants), number) for number in range(size)]
    # The first conversation has each outcome once, so that a sample of any size has all of them.
    every = tuple(_plan_exchange(random, happening) for happening in Happening)
    return SeedPlan(assistants=assistants, sample=(replace(conversations[0], exchanges=every), *conversations[1:]))


def plan_moment(random: Random, until: datetime, days: int) -> datetime:
    """Choose when a conversation begins, within `days` before `until`; mostly at daytime and on weekdays."""
    while True:
        midnight = until - timedelta(days=1 + random.randrange(days))
        if midnight.weekday() < _WEEKEND or random.random() < _WEEKEND_SHARE:
            break
    (hour,) = random.choices(range(24), _HOUR_WEIGHTS)
    return midnight + timedelta(hours=hour, seconds=random.uniform(0, 3600))


def plan_id(random: Random, moment: datetime) -> UUID:
    """Build an id as if it had been created at that time."""
    milliseconds = int(moment.timestamp() * 1000)
    return UUID(int=milliseconds << 80 | 0x7 << 76 | random.getrandbits(12) << 64 | 0b10 << 62 | random.getrandbits(62))


def _plan_assistant(random: Random, trade: str, index: int) -> AssistantDefinition:
    provider, model = _MODELS[index % len(_MODELS)]
    tools = random.sample(_TOOLS, random.randint(1, 3))
    return AssistantDefinition(
        name=f"{trade} helper",
        provider=provider,
        model=model,
        language=random.choice(_LANGUAGES),
        description=f"Answers what people ask about the {trade}.",
        instructions=Instructions(
            roles=f"You are the helper of a {trade}. Your tone is {{{{ tone }}}}. {_sentences(random, 6)}",
            procedure=f"Think, ask the tools, then answer in a few sentences. {_sentences(random, 6)}",
            constraints=f"Do not invent facts. {_sentences(random, 4)}",
        ),
        variables={"tone": random.choice(("friendly", "brief", "formal"))},
        tools=tuple(_plan_tool(name) for name in tools),
    )


def _plan_tool(name: str) -> Tool:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return Tool(name=name, description=f"{name.replace('_', ' ').capitalize()}, now.", parameters=schema)


def _plan_conversation(random: Random, assistant_count: int, number: int) -> SeedConversation:
    length = min(24, 1 + int(random.expovariate(1 / 3.5)))
    happenings = random.choices(list(_FREQUENCIES), list(_FREQUENCIES.values()), k=length)
    exchanges = [_plan_exchange(random, happening) for happening in happenings]
    return SeedConversation(
        assistant=random.randrange(assistant_count),
        identifier=f"{random.choice(_WORDS)}-{number}",
        language=random.choice(_LANGUAGES) or None,
        exchanges=tuple(
            replace(exchange, compacts=number % _COMPACTED_AFTER == 0) for number, exchange in enumerate(exchanges, 1)
        ),
    )


def _plan_exchange(random: Random, happening: Happening) -> SeedExchange:
    return SeedExchange(
        happening=happening,
        task=_sentences(random, random.randint(1, 3)),
        thinking=_sentences(random, random.randint(1, 4)),
        reply=_sentences(random, 2 + int(random.expovariate(1 / 4))),
        tool_names=tuple(_TOOLS[random.randrange(len(_TOOLS))] for _ in range(random.randint(1, 3)))
        if happening is Happening.TOOLS
        else (),
        picture=_picture(random) if random.random() < _PICTURE_SHARE else None,
    )


def _sentences(random: Random, count: int) -> str:
    drawn = (" ".join(random.choices(_WORDS, k=random.randint(4, 12))) for _ in range(count))
    return " ".join(f"{sentence.capitalize()}." for sentence in drawn)


def _picture(random: Random) -> bytes:
    """Build a small PNG of one colour."""
    side = 16
    row = b"\x00" + bytes(random.randrange(256) for _ in range(3)) * side
    pieces = (
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * side)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in pieces
    )
