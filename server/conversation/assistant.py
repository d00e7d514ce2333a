"""Assistants: a configured persona. An assistant is changed by adding a version; a version never changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from server.conversation.block import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """The texts of the static layer. Each is a template and may be empty."""

    roles: str = ""
    procedure: str = ""
    constraints: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the client runs when the model calls it."""

    name: str
    description: str
    parameters: Mapping[str, JsonValue]
    """A JSON schema. The order of its keys is preserved, because models read it and caches compare it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantDefinition:
    """The configuration of an assistant."""

    name: str
    provider: str
    model: str
    language: str = ""
    description: str = ""
    instructions: Instructions = field(default_factory=Instructions)
    variables: Mapping[str, JsonValue] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    settings: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """One version of an assistant."""

    id: str
    version: int
    created_at: datetime
    definition: AssistantDefinition
