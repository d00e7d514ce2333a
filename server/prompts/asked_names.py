"""What a template asks for: the names in it that stand for something outside it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from jinja2 import meta, nodes

from server.payload.arguments import NAMESPACES
from server.prompts.frozen import find_members

_GUARDING_FILTERS: Final = frozenset({"default", "d"})
_GUARDING_TESTS: Final = frozenset({"defined", "undefined", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A name and the line where it first stands."""

    path: str
    line: int
    is_guarded: bool


def find_asked_names(tree: nodes.Template, provided: Collection[str]) -> list[Asked]:
    """In the order of the text, each once. What the engine provides, `range` and its like, is not asked for."""
    from_outside = meta.find_undeclared_variables(tree) - set(provided)
    guarded = set(_guarded(tree))
    first: dict[str, int] = {}
    for path, line in _paths(tree, from_outside):
        first[path] = min(line, first.get(path, line))
    return [
        Asked(path=path, line=line, is_guarded=path in guarded or path.partition(".")[0] in guarded)
        for path, line in sorted(first.items(), key=lambda item: item[1])
    ]


def _paths(tree: nodes.Template, from_outside: Collection[str]) -> Iterator[tuple[str, int]]:
    """Of a namespace its members, unless it is taken as a whole; of anything else the name."""
    members = [(owner, member, line) for owner, member, line in find_members(tree) if owner in from_outside]
    for owner, member, line in members:
        yield (f"{owner}.{member}" if owner in NAMESPACES else owner), line
    with_members = {owner for owner, _, _ in members}
    for node in tree.find_all(nodes.Name):
        is_whole = node.name not in NAMESPACES or node.name not in with_members
        if node.ctx == "load" and node.name in from_outside and is_whole:
            yield node.name, node.lineno


def _guarded(tree: nodes.Template) -> Iterator[str]:
    """What the template expects to be missing: `x is defined`, `x | default("")`, `{% if x %}`."""
    for filter_ in tree.find_all(nodes.Filter):
        if filter_.name in _GUARDING_FILTERS and filter_.node is not None:
            yield from _path_of(filter_.node)
    for test in tree.find_all(nodes.Test):
        if test.name in _GUARDING_TESTS:
            yield from _path_of(test.node)
    for branch in tree.find_all(nodes.If):
        yield from _path_of(branch.test)
    for choice in tree.find_all(nodes.CondExpr):
        yield from _path_of(choice.test)


def _path_of(node: nodes.Node) -> Iterator[str]:
    if isinstance(node, nodes.Name):
        yield node.name
    elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        yield f"{node.node.name}.{node.attr}"
    elif isinstance(node, nodes.Not):
        yield from _path_of(node.node)
