"""The request for a summary: a question behind the very prefix that the conversation has just been talking behind."""

from dataclasses import dataclass, replace
from typing import Final

from server.conversation.assistant import AssistantDefinition
from server.conversation.block import TextBlock
from server.conversation.payload import Layer, Payload, PayloadMessage
from server.payload.settings import read_settings
from server.providers.provider import Provider

SUMMARY: Final = "summary"
"""The `kind` of the note that is kept with the call."""
_SPARE: Final = 2
"""How many times the limit the answer may have: one that is cut off is of no use, and thinking counts too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryQuestion:
    """What is asked beside the prefix."""

    task: str
    limit_tokens: int
    """How long the summary may be."""


def build_summary_payload(
    provider: Provider, definition: AssistantDefinition, static_text: str, question: SummaryQuestion
) -> Payload:
    """The request. The same values give the same bytes."""
    data = provider.user_message((TextBlock(text=question.task),), {})
    return Payload(
        model=definition.model,
        static_text=static_text,
        tools=definition.tools,
        messages=(PayloadMessage(layer=Layer.TRIGGER, data=data, role="user"),),
        settings=replace(
            read_settings(definition.settings),
            max_output_tokens=_SPARE * question.limit_tokens,
            stop_sequences=(),
        ),
    )
