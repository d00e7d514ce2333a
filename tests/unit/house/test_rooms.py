"""Rules about modules that import-linter cannot express. The layers themselves are in .importlinter."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.house.repository import ROOT, pyproject

SERVER = ROOT / "server"
ROOMS = ("conversation", "caching", "payload", "compaction", "turns", "inspection", "archive", "replay")
"""These rooms do no I/O. The modules of `providers` itself do none either; the vendors and the transport in it do."""
DOMAIN = sorted(
    str(path.relative_to(SERVER))
    for path in [
        *(path for room in ROOMS for path in (SERVER / room).rglob("*.py")),
        *(SERVER / "providers").glob("*.py"),
    ]
)
PURE_LIBRARIES = {"replay/rerun/assertion_evaluation.py": {"jsonschema"}}
"""Libraries without I/O that single modules of the domain may import."""
MEANINGLESS = {"base", "common", "constants", "core", "helpers", "manager", "misc", "shared", "types", "util", "utils"}


def imported_by(module: Path) -> Iterator[str]:
    """The top-level packages that a module imports, at any place in it."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("name", DOMAIN)
def test_the_domain_imports_the_standard_library_and_itself(name: str) -> None:
    foreign = set(imported_by(SERVER / name)) - sys.stdlib_module_names - {"server"} - PURE_LIBRARIES.get(name, set())

    assert foreign == set()


def test_the_root_contains_only_rooms() -> None:
    assert {path.name for path in SERVER.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_every_room_has_a_docstring() -> None:
    rooms = [path.parent for path in SERVER.glob("*/__init__.py")]
    assert rooms
    silent = [
        room.name for room in rooms if not ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8")))
    ]
    assert silent == []


def public_modules(room: Path) -> set[str]:
    """The modules in the bulleted list of the room's docstring, dotted for those of a sub-package."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
    heads = re.findall(r"^- ((?:`[a-z_.]+`,?\s+)*`[a-z_.]+`):", docstring, re.MULTILINE)
    return {name for head in heads for name in re.findall(r"`([a-z_.]+)`", head)}


@cache
def imports_between_rooms() -> tuple[tuple[str, str, str], ...]:
    """The room and module that a module of another room imports, and that module."""
    return tuple(_imports_between_rooms())


def _imports_between_rooms() -> Iterator[tuple[str, str, str]]:
    for path in sorted(SERVER.rglob("*.py")):
        own = path.relative_to(SERVER).parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("server."):
                continue
            room, *inside = str(node.module).split(".")[1:]
            for alias in node.names:
                found = list(inside)
                if (SERVER / room / "/".join([*inside, alias.name])).with_suffix(".py").exists():
                    found.append(alias.name)
                if room != own and found:
                    yield room, ".".join(found), str(path.relative_to(ROOT))


def test_rooms_use_only_the_public_modules_of_others() -> None:
    public = {room.parent.name: public_modules(room.parent) for room in SERVER.glob("*/__init__.py")}
    hidden = {
        f"{importer} imports server.{room}.{module}"
        for room, module, importer in imports_between_rooms()
        if module not in public[room] and module.split(".")[0] not in public[room]
    }
    assert hidden == set()


@pytest.mark.parametrize("room", sorted(path.parent.name for path in SERVER.glob("*/__init__.py")))
def test_every_public_module_exists_and_is_used(room: str) -> None:
    named = public_modules(SERVER / room)
    for name in named:
        path = SERVER / room / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name
    used = {module for other, module, _ in imports_between_rooms() if other == room}
    assert {
        name for name in named if not any(module == name or module.startswith(f"{name}.") for module in used)
    } == set()


def test_every_imported_package_is_a_declared_dependency() -> None:
    declared = {canonicalize_name(Requirement(text).name) for text in pyproject()["project"]["dependencies"]}
    distributions = packages_distributions()
    imported = {name for module in SERVER.rglob("*.py") for name in imported_by(module)}

    undeclared = {
        name
        for name in imported - sys.stdlib_module_names - {"server"}
        if not declared & {canonicalize_name(owner) for owner in distributions.get(name, ())}
    }

    assert undeclared == set()


def test_no_module_has_a_meaningless_name() -> None:
    named = {path for path in SERVER.rglob("*") if path.is_dir() or path.suffix == ".py"}

    assert [str(path.relative_to(ROOT)) for path in named if path.stem in MEANINGLESS] == []


def test_no_annotation_is_postponed() -> None:
    postponed = [str(path.relative_to(ROOT)) for path in SERVER.rglob("*.py") if "__future__" in set(imported_by(path))]

    assert postponed == [], "Litestar and pydantic read annotations at run time"
