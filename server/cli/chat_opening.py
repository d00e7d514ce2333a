"""Which conversation a chat is about."""

from dataclasses import dataclass
from typing import Final

import click

from server.cli.chat_tools import DEMO_TOOLS
from server.web.client import (
    Assistant,
    AssistantDefinition,
    AssistantDraft,
    Conversation,
    ConversationDraft,
    Instructions,
    StrataClient,
)

_NAME: Final = "chat"
_LOOKED_THROUGH: Final = 1000
"""Most assistants that are looked at for one of ours; making another costs less than reading more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the command line says about the conversation."""

    assistant: str | None = None
    conversation: str | None = None
    provider: str | None = None
    model: str | None = None
    instructions: str | None = None
    tools: str | None = None

    def check(self) -> None:
        """An assistant that exists is what it is; a conversation has one."""
        if self.conversation and self.assistant:
            raise click.UsageError("--conversation has its assistant; leave --assistant out.")
        if (self.conversation or self.assistant) and (self.provider or self.model or self.instructions):
            raise click.UsageError("--provider, --model and --instructions are for a new assistant.")


async def open_conversation(client: StrataClient, choice: Choice) -> tuple[Conversation, Assistant]:
    """The conversation that was asked for, or a new one of the assistant that was asked for, or of one called chat."""
    if choice.conversation is not None:
        conversation = await client.load_conversation(choice.conversation)
        return conversation, await client.load_assistant(conversation.assistant_id, conversation.assistant_version)
    if choice.assistant is not None:
        assistant = await client.load_assistant(choice.assistant)
    else:
        assistant = await _find_or_make_assistant(client, choice)
    return await client.create_conversation(ConversationDraft(assistant_id=assistant.id, source="chat")), assistant


async def _find_or_make_assistant(client: StrataClient, choice: Choice) -> Assistant:
    draft = AssistantDraft(
        name=_NAME,
        provider=choice.provider,
        model=choice.model,
        instructions=Instructions(roles=choice.instructions or ""),
        tools=DEMO_TOOLS if choice.tools else (),
    )
    looked_at = 0
    async for assistant in client.list_assistants():
        if _fits(assistant.definition, draft):
            return assistant
        looked_at += 1
        if looked_at == _LOOKED_THROUGH:
            break
    return await client.create_assistant(draft)


def _fits(definition: AssistantDefinition, draft: AssistantDraft) -> bool:
    return (
        definition.name == draft.name
        and draft.provider in {None, definition.provider}
        and draft.model in {None, definition.model}
        and definition.instructions == draft.instructions
        and definition.tools == draft.tools
    )
