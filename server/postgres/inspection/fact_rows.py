"""Facts about conversations to columns and back, and the labels by which they are found."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Final
from uuid import UUID

from server.conversation.conversation import ConversationFacts
from server.postgres.codec import decode_text, encode_text
from server.postgres.rows import Row, usage_from

_LISTS: Final = ("models", "providers", "states", "stop_reasons", "error_codes", "tool_names")
_BUCKETS: Final = (
    "fresh_input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
)
_PLAIN: Final = tuple(
    field.name for field in fields(ConversationFacts) if field.name not in {*_LISTS, "usage", "excerpt"}
)

LABEL_KINDS: Final = {
    "models": "model",
    "providers": "provider",
    "states": "state",
    "stop_reasons": "stop",
    "error_codes": "error",
    "tool_names": "tool",
}
FLAGS: Final = (
    "has_repairs",
    "has_missing_signature",
    "has_withheld_signature",
    "has_prefix_break",
    "was_recovered",
)


def facts_from(row: Row) -> ConversationFacts:
    """A row of `conversation_facts`."""
    values: dict[str, Any] = {name: row[name] for name in _PLAIN}
    values |= {name: tuple(decode_text(value) for value in row[name]) for name in _LISTS}
    return ConversationFacts(**values, usage=usage_from(row), excerpt=decode_text(row["excerpt"]))


def fact_values(facts: ConversationFacts) -> dict[str, Any]:
    """The columns of the facts, by name."""
    return {
        **{name: getattr(facts, name) for name in _PLAIN},
        **{name: [encode_text(value) for value in getattr(facts, name)] for name in _LISTS},
        **{name: getattr(facts.usage, name) for name in _BUCKETS},
        "excerpt": facts.excerpt,
    }


def labels_of(tenant: UUID, assistant: UUID, facts: ConversationFacts | None) -> list[str]:
    """All that the conversation can be found by."""
    labels = [tenant_label(tenant), label("assistant", str(assistant))]
    return labels if facts is None else [*labels, *_labels_of_facts(facts)]


def tenant_label(tenant: UUID) -> str:
    """The label that all conversations of a tenant have."""
    return label("tenant", str(tenant))


def label(kind: str, value: str) -> str:
    """One label, storable."""
    return encode_text(f"{kind}:{value}")


def tenant_word(tenant: UUID) -> str:
    """The word that all texts of a tenant have, so that a search never leaves it. No text is split into such a word."""
    return f"tenant:{tenant}"


def _labels_of_facts(facts: ConversationFacts) -> Iterator[str]:
    for name, kind in LABEL_KINDS.items():
        values: Iterable[str] = getattr(facts, name)
        yield from (label(kind, value) for value in values)
    yield from (label("has", flag) for flag in FLAGS if getattr(facts, flag))
