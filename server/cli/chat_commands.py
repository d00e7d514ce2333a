"""What a user can type in a chat. Pure."""

from dataclasses import dataclass
from typing import Final, TypeAlias

HELP: Final = """\
Enter sends; Esc Enter, or a backslash at the end of a line, begins a new line.
Ctrl-C cancels a running turn, or clears the line; Ctrl-D leaves.

/image PATH TEXT   send an image with a text; a path with spaces goes into quotes
/context FILE      replace the conversation's context with the JSON object in a file
/fork N            go on in a new conversation that has the turns up to number N
/result            answer the tool calls that wait
/cancel            cancel a turn that runs without being shown
/exit              leave; the conversation stays
A message that begins with a slash begins with two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendImage:
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceContext:
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    at_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCalls:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTurn:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowHelp:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Misspelt:
    """Nothing is sent."""

    sentence: str


Command: TypeAlias = Say | SendImage | ReplaceContext | Fork | AnswerCalls | CancelTurn | ShowHelp | Leave | Misspelt

_BARE: Final[dict[str, Command]] = {
    "/result": AnswerCalls(),
    "/cancel": CancelTurn(),
    "/help": ShowHelp(),
    "/exit": Leave(),
    "/quit": Leave(),
}


def parse_command(line: str) -> Command | None:
    """What a line means; None where it is blank.

    Without a slash at its beginning it is a message, with two it is one that begins with one.
    """
    if not line.strip():
        return None
    if not line.startswith("/"):
        return Say(text=line)
    if line.startswith("//"):
        return Say(text=line[1:])
    name, _, rest = line.strip().partition(" ")
    return _BARE[name] if name in _BARE else _parse_with_argument(name, rest.strip())


def _parse_with_argument(name: str, rest: str) -> Command:
    match name:
        case "/fork":
            if rest.isdecimal():
                return Fork(at_seq=int(rest))
            return Misspelt(sentence="/fork needs the number of a turn.")
        case "/image":
            path, text = _split_path(rest)
            return SendImage(path=path, text=text) if path else Misspelt(sentence="/image needs the path of a file.")
        case "/context":
            path, _ = _split_path(rest)
            return ReplaceContext(path=path) if path else Misspelt(sentence="/context needs the path of a JSON file.")
        case _:
            return Misspelt(sentence=f"There is no {name}; /help lists what there is.")


def _split_path(text: str) -> tuple[str, str]:
    """A path, in quotes where it has spaces, and what stands behind it."""
    quote = text[:1]
    if quote in {'"', "'"} and quote in text[1:]:
        path, _, rest = text[1:].partition(quote)
    else:
        path, _, rest = text.partition(" ")
    return path, rest.strip()
