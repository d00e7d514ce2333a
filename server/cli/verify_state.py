"""The state of a verification, stored in a file from which `--resume` continues.

The state is not stored in the database, because a verification writes nothing into it: it also runs on a standby, on a
restored backup, and with a read-only role. To continue on another machine, copy the file.

The file is complete at any time, because it is written under another name and then renamed. Its counts cover exactly
the conversations up to its `place`, so no conversation is counted twice or left out, however the previous run ended.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

from server import __version__
from server.postgres.replay.conversation_choice import ConversationChoice
from server.replay.verify.recorded_calls import CallFilter
from server.replay.verify.verification import UNREADABLE, Verified, verified_from_json, verified_to_json

_FORMAT: Final = 2
_TIMES: Final = ("started_after", "started_before")


class CannotWrite(click.ClickException):
    """A file of the command cannot be written. The exit code is not 1, which means that a mismatch was found."""

    exit_code = 74

    def __init__(self, file: Path, error: OSError) -> None:
        super().__init__(f"{file} cannot be written: {error.strerror}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyState:
    """The options of a run, and its progress."""

    database_mark: str
    """Identifies the database, see `server.postgres.replay.conversation_choice`."""
    choice: ConversationChoice
    named: Sequence[str] | None = None
    """The ids of the conversations, if they were named or drawn at random; otherwise `choice` applies."""
    requests: bool = True
    answers: bool = True
    place: str | None = None
    """The last verified conversation, in the order of ids. None at the start."""
    turns_passed: int = 0
    seconds: float = 0.0
    verified: Verified = field(default_factory=Verified)


def save_state(file: Path, state: VerifyState) -> None:
    """Write the state atomically. Raises `CannotWrite`."""
    stored = {
        "format": _FORMAT,
        "release": __version__,
        "database": state.database_mark,
        "choice": asdict(state.choice),
        "named": state.named,
        "requests": state.requests,
        "answers": state.answers,
        "place": state.place,
        "turns_passed": state.turns_passed,
        "seconds": state.seconds,
        **verified_to_json(state.verified),
    }
    temporary = file.with_name(f"{file.name}.part")
    try:
        temporary.write_text(json.dumps(stored, default=_write_time), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise CannotWrite(file, error) from error


def load_state(file: Path) -> VerifyState:
    """Read the state of a run. Raises `click.UsageError` if it cannot be continued."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise click.UsageError(f"There is no run to continue: {file} does not exist.") from None
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file} cannot be read: {error}") from error
    try:
        if (stored["format"], stored["release"]) != (_FORMAT, __version__):
            raise click.UsageError(f"{file} was written by another release and cannot be continued. Start a new run.")
        return _state_from(stored)
    except UNREADABLE as error:
        raise click.UsageError(f"{file} is damaged, or not the state of a run. Start a new run.") from error


def _state_from(stored: Mapping[str, Any]) -> VerifyState:
    choice = stored["choice"]
    calls: dict[str, Any] = {
        name: datetime.fromisoformat(value) if value and name in _TIMES else value
        for name, value in choice["calls"].items()
    }
    return VerifyState(
        database_mark=stored["database"],
        choice=ConversationChoice(**{**choice, "calls": CallFilter(**calls)}),
        named=stored["named"],
        requests=stored["requests"],
        answers=stored["answers"],
        place=stored["place"],
        turns_passed=stored["turns_passed"],
        seconds=stored["seconds"],
        verified=verified_from_json(stored),
    )


def _write_time(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(type(value))
