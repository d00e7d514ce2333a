"""How far a verification has come, as a file: what `--resume` goes on from.

A file, and no table: verifying writes nothing into the database, so that it can be run on a standby, on a restored
backup, or with a role that may only read. Whoever wants to go on from another machine takes the file there.

The file is whole at any moment: it is written beside its place and then moved there. What it counts is all that stands
before its place and nothing else, so nothing is counted twice or left out, however the run before ended.
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
    """A file of the command's own cannot be written. Not 1: that is a check that has found something."""

    exit_code = 74

    def __init__(self, file: Path, error: OSError) -> None:
        super().__init__(f"{file} cannot be written: {error.strerror}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyState:
    """A run, as far as it has come."""

    database_mark: str
    """Of the database that it is about, see `server.postgres.replay.conversation_choice`."""
    choice: ConversationChoice
    named: Sequence[str] | None = None
    """The conversations, where they were named or drawn; else the choice says which."""
    requests: bool = True
    answers: bool = True
    place: str | None = None
    """The last conversation that is done, in the order of ids. None at the beginning."""
    turns_passed: int = 0
    seconds: float = 0.0
    verified: Verified = field(default_factory=Verified)


def save_state(file: Path, state: VerifyState) -> None:
    """Whole or not at all. Raises `CannotWrite`."""
    kept = {
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
    beside = file.with_name(f"{file.name}.part")
    try:
        beside.write_text(json.dumps(kept, default=_write_time), encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        raise CannotWrite(file, error) from error


def load_state(file: Path) -> VerifyState:
    """The run that was begun. Says as a `UsageError` why it cannot be gone on with."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise click.UsageError(f"There is nothing to go on with: {file} is not there.") from None
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file} cannot be read: {error}") from error
    try:
        if (kept["format"], kept["release"]) != (_FORMAT, __version__):
            raise click.UsageError(f"{file} is of another release: its counts cannot be added to. Begin anew.")
        return _state_from(kept)
    except UNREADABLE as error:
        raise click.UsageError(f"{file} is damaged, or no file of a run. Begin anew.") from error


def _state_from(kept: Mapping[str, Any]) -> VerifyState:
    choice = kept["choice"]
    calls: dict[str, Any] = {
        name: datetime.fromisoformat(value) if value and name in _TIMES else value
        for name, value in choice["calls"].items()
    }
    return VerifyState(
        database_mark=kept["database"],
        choice=ConversationChoice(**{**choice, "calls": CallFilter(**calls)}),
        named=kept["named"],
        requests=kept["requests"],
        answers=kept["answers"],
        place=kept["place"],
        turns_passed=kept["turns_passed"],
        seconds=kept["seconds"],
        verified=verified_from_json(kept),
    )


def _write_time(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(type(value))
