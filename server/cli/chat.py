"""`strata chat`: a conversation in the terminal.

This module reads the options, opens the conversation and reads lines. `chat_session` runs what was typed, and
`chat_screen` shows the result.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import click
from rich.console import Console

from server.app.settings import ClientSettings, read_client_settings
from server.cli.chat_screen import ChatPrompt, PipeScreen, Screen, TerminalScreen, describe_error
from server.cli.chat_session import ChatSession, parse_command
from server.cli.exit_codes import exit_code_of
from server.cli.run import run
from server.cli.terminal import one_line
from server.conversation.errors import SettingsInvalid, Unavailable, every_error
from server.providers.choice import KEY_VARIABLES
from server.web.client import (
    Assistant,
    AssistantDefinition,
    AssistantDraft,
    ClientError,
    Conversation,
    ConversationDraft,
    Instructions,
    RetryBudget,
    StrataClient,
    StrataProblem,
    Tool,
    ToolFunction,
)

_TURN_FAILED: Final = 1
_INTERRUPTED: Final = 130
_QUESTION: Final = "> "
_ASSISTANT_NAME: Final = "chat"
_MAX_LISTED_ASSISTANTS: Final = 1000
"""Maximum number of assistants to search for one that matches. Creating another one is cheaper than reading more."""


@click.command()
@click.option("--url", help="URL of the server.  [STRATA_URL, http://127.0.0.1:8400]")
@click.option("--key", help="API key. Prefer the variable: other users can see options.  [STRATA_API_KEY]")
@click.option("--assistant", metavar="ID", help="Assistant to use.  [one named chat, created if necessary]")
@click.option("--conversation", metavar="ID", help="Continue this conversation, and follow its running turn.")
@click.option("--provider", type=click.Choice(list(KEY_VARIABLES)), help="For a new assistant.  [the server's]")
@click.option("--model", help="For a new assistant.  [the provider's default]")
@click.option("--instructions", help="For a new assistant: its instructions.")
@click.option("--tools", type=click.Choice(["demo"]), help="Run a few harmless tools locally, such as get_time.")
@click.option("--no-thinking", is_flag=True, help="Do not show the model's reasoning.")
def chat(*, url: str | None, key: str | None, no_thinking: bool, **choice: Any) -> None:
    """Hold a conversation in the terminal.

    Enter sends a message, /help lists the commands. Ctrl-C cancels the running turn without ending the program. The
    conversation is stored by the server and can be continued with --conversation.

    If standard input is a pipe, each line is a turn, and standard output contains only the answers. If a turn fails,
    the command ends with exit code 1.
    """
    chosen = Choice(**choice)
    chosen.check()
    settings = read_client_settings(url=url, api_key=key)
    if settings.api_key is None:
        raise SettingsInvalid("No API key is set.", hint="Set STRATA_API_KEY. `strata keys create` creates a key.")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        code = run(_chat(settings, chosen, interactive=interactive, thinking=not no_thinking))
    except ClientError as error:
        click.secho(f"strata: {describe_error(error)}", fg="red", err=True)
        code = _exit_code(error)
    sys.exit(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The options that choose the conversation."""

    assistant: str | None = None
    conversation: str | None = None
    provider: str | None = None
    model: str | None = None
    instructions: str | None = None
    tools: str | None = None

    def check(self) -> None:
        """Raise `click.UsageError` if the options contradict each other."""
        if self.conversation and self.assistant:
            raise click.UsageError("--conversation and --assistant exclude each other.")
        if (self.conversation or self.assistant) and (self.provider or self.model or self.instructions):
            raise click.UsageError("--provider, --model and --instructions apply only to a new assistant.")


def _get_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _roll_dice(sides: int = 6) -> int:
    return secrets.randbelow(sides) + 1


DEMO_FUNCTIONS: Final[Mapping[str, ToolFunction]] = {"get_time": _get_time, "roll_dice": _roll_dice}
"""The tools of `--tools demo`, which run in this process."""

DEMO_TOOLS: Final = (
    Tool(
        name="get_time",
        description="The date and time now, in UTC.",
        parameters={"type": "object", "properties": {}},
    ),
    Tool(
        name="roll_dice",
        description="Rolls one die.",
        parameters={"type": "object", "properties": {"sides": {"type": "integer", "minimum": 2, "maximum": 1000}}},
    ),
)


async def open_conversation(client: StrataClient, choice: Choice) -> tuple[Conversation, Assistant]:
    """Load the chosen conversation, or create one with the chosen assistant or with one named `chat`."""
    if choice.conversation is not None:
        conversation = await client.load_conversation(choice.conversation)
        return conversation, await client.load_assistant(conversation.assistant_id, conversation.assistant_version)
    if choice.assistant is not None:
        assistant = await client.load_assistant(choice.assistant)
    else:
        assistant = await _find_or_create_assistant(client, choice)
    return await client.create_conversation(ConversationDraft(assistant_id=assistant.id, source="chat")), assistant


async def _find_or_create_assistant(client: StrataClient, choice: Choice) -> Assistant:
    draft = AssistantDraft(
        name=_ASSISTANT_NAME,
        provider=choice.provider,
        model=choice.model,
        instructions=Instructions(roles=choice.instructions or ""),
        tools=DEMO_TOOLS if choice.tools else (),
    )
    count = 0
    async for assistant in client.list_assistants():
        if _matches(assistant.definition, draft):
            return assistant
        count += 1
        if count == _MAX_LISTED_ASSISTANTS:
            break
    return await client.create_assistant(draft)


def _matches(definition: AssistantDefinition, draft: AssistantDraft) -> bool:
    return (
        definition.name == draft.name
        and draft.provider in {None, definition.provider}
        and draft.model in {None, definition.model}
        and definition.instructions == draft.instructions
        and definition.tools == draft.tools
    )


async def _chat(settings: ClientSettings, choice: Choice, *, interactive: bool, thinking: bool) -> int:
    key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
    # The first requests are not retried, so that a wrong URL is reported at once.
    async with StrataClient(settings.url, key, retry_budget=RetryBudget(seconds=0)) as client:
        conversation, assistant = await open_conversation(client, choice)
    screen = _open_screen(interactive=interactive, thinking=thinking)

    def on_retry(error: ClientError, _wait_seconds: float) -> None:
        screen.note(f"{one_line(error.detail)} Retrying.")

    async with StrataClient(settings.url, key, on_retry=on_retry) as client:
        tools = DEMO_FUNCTIONS if choice.tools else {}
        prompt = ChatPrompt() if interactive else None
        session = ChatSession(client, conversation, screen=screen, prompt=prompt, tools=tools)
        try:
            with _ctrl_c_interrupts(session):
                if prompt is None:
                    return await _read_lines(session, _reopen(sys.stdin, "r"))
                definition = assistant.definition
                screen.note(f"{conversation.id} · {one_line(definition.name)} · {one_line(definition.model)} · /help")
                if choice.conversation is not None:
                    prompt.remember(await session.resume(conversation))
                while (line := await prompt.ask(_QUESTION)) is not None:
                    command = parse_command(line)
                    if command is not None and not await session.run_command(command):
                        break
        finally:
            default_url = ClientSettings.model_fields["url"].default
            url_option = "" if settings.url == default_url else f" --url {settings.url}"
            screen.note(f"Continue with: strata chat --conversation {session.conversation_id}{url_option}")
    return 0


async def _read_lines(session: ChatSession, lines: TextIO) -> int:
    """Take a turn for each line, until one fails. Returns the exit code."""
    while line := await asyncio.to_thread(lines.readline):
        if line.strip() and not await session.send(line.rstrip("\r\n")):
            return _INTERRUPTED if session.interrupted else _TURN_FAILED
    return 0


@contextmanager
def _ctrl_c_interrupts(session: ChatSession) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, session.interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _open_screen(*, interactive: bool, thinking: bool) -> Screen:
    if interactive:
        return TerminalScreen(Console(file=_reopen(sys.stdout, "w"), highlight=False), thinking=thinking)
    return PipeScreen(_reopen(sys.stdout, "w"), _reopen(sys.stderr, "w"))


def _reopen(stream: TextIO, mode: Literal["r", "w"]) -> TextIO:
    """Reopen a stream so that characters outside the terminal's encoding are replaced and raise no error."""
    return os.fdopen(stream.fileno(), mode, errors="replace", closefd=False)


def _exit_code(error: ClientError) -> int:
    """Return the exit code that commands of the server have for the same error code."""
    code = error.code if isinstance(error, StrataProblem) else ""
    return exit_code_of(next((kind for kind in every_error() if kind.code == code), Unavailable))
