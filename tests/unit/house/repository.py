"""The commands and settings that the files of the repository name, with their positions."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[3]

_CALL = re.compile(
    r"(?:^[ \t]*|[`$] ?|(?:bin|BIN\))/|&& |\| |exec (?:\S+ )?|docker run [^`\n]* )strata( [^`\n]+)"
    r"|docker compose run (?:-\S+ )*(?:server|worker|migrate)( [^`\n]+)",
    re.MULTILINE,
)
_WORD = re.compile(r"[a-z][a-z0-9-]*")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the `strata` command as written in a file."""

    words: tuple[str, ...]
    options: tuple[str, ...] = ()


def pyproject() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def words_of(path: str) -> str:
    """The text of a file that a reader sees: all of it, or the string constants of a Python module."""
    if not path.endswith(".py"):
        return read(path)
    texts = (node.value for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.Constant))
    return "\n".join(text for text in texts if isinstance(text, str))


def written_files() -> list[str]:
    """Every file that names a command for a person to type or a machine to run."""
    names = ["README.md", "CONTRIBUTING.md", "Makefile", "compose.yaml", "Dockerfile", ".ci/run"]
    found = [ROOT / name for name in names if (ROOT / name).exists()]
    found += sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "server").rglob("*.py"))
    return [str(path.relative_to(ROOT)) for path in found]


def calls_in(text: str) -> Iterator[Call]:
    """The calls in shell lines and between backticks."""
    for match in _CALL.finditer(text.replace("\\\n", " ")):
        arguments = match[1] or match[2]
        words = tuple(takewhile(_WORD.fullmatch, arguments.split()))
        yield Call(words=words, options=tuple(_OPTION.findall(arguments)))


def settings_in(text: str) -> set[str]:
    return set(re.findall(r"\bSTRATA_[A-Z][A-Z0-9_]*", text))


def fault_of(call: Call, root: click.Command) -> str | None:
    """The mistake in a call: an unknown command or option, or a group without its command."""
    command = root
    known = {"--help"} | _options(command)
    for word in call.words:
        if not isinstance(command, click.Group):
            if any(isinstance(parameter, click.Argument) for parameter in command.params):
                break
            return f"`{command.name}` takes no argument, and it got `{word}`"
        below = command.get_command(click.Context(command), word)
        if below is None:
            return f"`{command.name}` has no command `{word}`"
        command = below
        known |= _options(command)
    unknown = [option for option in call.options if option not in known]
    return f"`{command.name}` has no option {', '.join(unknown)}" if unknown else None


def _options(command: click.Command) -> set[str]:
    return {spelling for parameter in command.params for spelling in (*parameter.opts, *parameter.secondary_opts)}
