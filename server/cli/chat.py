"""`strata chat`: a conversation in the terminal."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, TextIO

import click
from rich.console import Console

from server.app.settings import ClientSettings, read_client_settings
from server.cli.chat_commands import parse_command
from server.cli.chat_opening import Choice, open_conversation
from server.cli.chat_prompt import ChatPrompt
from server.cli.chat_screen import PipeScreen, Screen, TerminalScreen
from server.cli.chat_session import ChatSession
from server.cli.chat_text import describe_error, one_line
from server.cli.chat_tools import DEMO_FUNCTIONS
from server.cli.exit_codes import exit_code_of
from server.cli.run import run
from server.conversation.errors import SettingsInvalid, Unavailable, every_error
from server.providers.choice import KEY_VARIABLES
from server.web.client import Assistant, ClientError, Conversation, RetryBudget, StrataClient, StrataProblem

_TURN_FAILED: Final = 1
_INTERRUPTED: Final = 130
_QUESTION: Final = "> "


@click.command()
@click.option("--url", help="The server.  [STRATA_URL, http://127.0.0.1:8400]")
@click.option("--key", help="Its key; rather set the variable, which other users cannot see.  [STRATA_API_KEY]")
@click.option("--assistant", metavar="ID", help="Whom to talk to.  [one called chat, made where there is none]")
@click.option("--conversation", metavar="ID", help="Go on with this one; a turn that runs is joined.")
@click.option("--provider", type=click.Choice(list(KEY_VARIABLES)), help="For a new assistant.  [the server's]")
@click.option("--model", help="For a new assistant.  [the provider's default]")
@click.option("--instructions", help="For a new assistant: what it is to be.")
@click.option("--tools", type=click.Choice(["demo"]), help="Run a few harmless tools here, such as get_time.")
@click.option("--no-thinking", is_flag=True, help="Leave the model's reasoning out.")
def chat(*, url: str | None, key: str | None, no_thinking: bool, **choice: Any) -> None:
    """Hold a conversation in the terminal.

    Enter sends, /help lists the rest. Ctrl-C cancels the running turn and not the program; the conversation stays on
    the server, and --conversation takes it up again.

    With a pipe on standard input each line is a turn, the answers go to standard output and nothing else does; a turn
    that fails ends it with exit code 1.
    """
    chosen = Choice(**choice)
    chosen.check()
    settings = read_client_settings(url=url, api_key=key)
    if settings.api_key is None:
        raise SettingsInvalid("There is no API key.", hint="Set STRATA_API_KEY; `strata keys create` makes a key.")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        code = run(_chat(settings, chosen, interactive=interactive, thinking=not no_thinking))
    except ClientError as error:
        click.secho(f"strata: {describe_error(error)}", fg="red", err=True)
        code = _exit_code(error)
    sys.exit(code)


async def _chat(settings: ClientSettings, choice: Choice, *, interactive: bool, thinking: bool) -> int:
    key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
    # The beginning is impatient: a wrong address should be said at once.
    async with StrataClient(settings.url, key, retry_budget=RetryBudget(seconds=0)) as client:
        conversation, assistant = await open_conversation(client, choice)
    screen = _open_screen(interactive=interactive, thinking=thinking)

    def tell(error: ClientError, _wait_seconds: float) -> None:
        screen.note(f"{one_line(error.detail)} Trying again.")

    async with StrataClient(settings.url, key, on_retry=tell) as client:
        tools = DEMO_FUNCTIONS if choice.tools else {}
        prompt = ChatPrompt() if interactive else None
        session = ChatSession(client, conversation, screen=screen, asker=prompt, tools=tools)
        try:
            if prompt is None:
                return await _read_lines(session, _reopen(sys.stdin, "r"))
            screen.note(_greeting(conversation, assistant))
            await _talk(session, prompt, conversation, resumes=choice.conversation is not None)
        finally:
            screen.note(f"Go on with: strata chat --conversation {session.conversation_id}{_url_option(settings)}")
    return 0


async def _talk(session: ChatSession, prompt: ChatPrompt, conversation: Conversation, *, resumes: bool) -> None:
    """Until the user leaves."""
    with _ctrl_c_interrupts(session):
        if resumes:
            prompt.remember(await session.resume(conversation))
        while (line := await prompt.ask(_QUESTION)) is not None:
            command = parse_command(line)
            if command is not None and not await session.obey(command):
                return


async def _read_lines(session: ChatSession, lines: TextIO) -> int:
    """Each line a turn, until one fails."""
    with _ctrl_c_interrupts(session):
        while line := await asyncio.to_thread(lines.readline):
            if line.strip() and not await session.say(line.rstrip("\r\n")):
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
    """The same stream, in which a character that the terminal's encoding lacks is no error."""
    return os.fdopen(stream.fileno(), mode, errors="replace", closefd=False)


def _greeting(conversation: Conversation, assistant: Assistant) -> str:
    definition = assistant.definition
    return f"{conversation.id} · {one_line(definition.name)} · {one_line(definition.model)} · /help"


def _url_option(settings: ClientSettings) -> str:
    default = ClientSettings.model_fields["url"].default
    return "" if settings.url == default else f" --url {settings.url}"


def _exit_code(error: ClientError) -> int:
    """The one that the server's own commands have for the same code."""
    code = error.code if isinstance(error, StrataProblem) else ""
    return exit_code_of(next((kind for kind in every_error() if kind.code == code), Unavailable))
