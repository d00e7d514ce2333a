"""Static analysis of templates: what a text that is rendered once may not use, and which arguments it refers to.

The static layer is rendered when an epoch begins and is sent unchanged with every call until it ends. A clock or a
message in it would keep the value from the beginning of the epoch.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from jinja2 import meta, nodes

from server.payload.arguments import NAMESPACES

VOLATILE_NAMESPACES: Final = ("system", "message")
VOLATILE_MEMBERS: Final = {"conversation": frozenset({"updated_date", "duration"})}
_LOADING: Final = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A violation: a sentence, and the line of the template."""

    message: str
    line: int


def find_fault(tree: nodes.Template) -> Fault | None:
    """Return the first violation of a template, or None."""
    return next(find_faults(tree), None)


def find_faults(tree: nodes.Template) -> Iterator[Fault]:
    """Iterate over all violations of a template, grouped by kind."""
    yield from _find_loading(tree)
    yield from _find_volatile_namespaces(tree)
    yield from _find_volatile_members(tree)


def find_loading(tree: nodes.Template) -> Fault | None:
    """Return the first tag that loads another template, which none may do."""
    return next(_find_loading(tree), None)


def find_members(tree: nodes.Template) -> Iterator[tuple[str, str, int]]:
    """Iterate over every `name.member` and `name["member"]`, with its line."""
    reached: list[tuple[nodes.Expr, str, int]] = [
        (node.node, node.attr, node.lineno) for node in tree.find_all(nodes.Getattr)
    ]
    reached += [
        (node.node, node.arg.value, node.lineno)
        for node in tree.find_all(nodes.Getitem)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)
    ]
    for owner, member, line in reached:
        if isinstance(owner, nodes.Name):
            yield owner.name, member, line


def _find_loading(tree: nodes.Template) -> Iterator[Fault]:
    for kind in _LOADING:
        for node in tree.find_all(kind):
            yield Fault(message="There are no other templates to include, import or extend.", line=node.lineno)


def _find_volatile_namespaces(tree: nodes.Template) -> Iterator[Fault]:
    # Names that the template does not bind itself.
    from_outside = meta.find_undeclared_variables(tree)
    for name in VOLATILE_NAMESPACES:
        if name in from_outside:
            for node in tree.find_all(nodes.Name):
                if node.name == name and node.ctx == "load":
                    message = f"`{name}` changes with every turn, and this text is written once."
                    yield Fault(message=message, line=node.lineno)


def _find_volatile_members(tree: nodes.Template) -> Iterator[Fault]:
    for owner, member, line in find_members(tree):
        if member in VOLATILE_MEMBERS.get(owner, ()):
            message = f"`{owner}.{member}` changes with every turn, and this text is written once."
            yield Fault(message=message, line=line)


_GUARDING_FILTERS: Final = frozenset({"default", "d"})
_GUARDING_TESTS: Final = frozenset({"defined", "undefined", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A name, and the line of its first occurrence."""

    path: str
    line: int
    is_guarded: bool


def find_referenced_names(tree: nodes.Template, provided: Collection[str]) -> list[Reference]:
    """List the names in the order of the text, each once, without those that the engine provides, such as `range`."""
    from_outside = meta.find_undeclared_variables(tree) - set(provided)
    guarded = set(_guarded(tree))
    first: dict[str, int] = {}
    for path, line in _paths(tree, from_outside):
        first[path] = min(line, first.get(path, line))
    return [
        Reference(path=path, line=line, is_guarded=path in guarded or path.partition(".")[0] in guarded)
        for path, line in sorted(first.items(), key=lambda item: item[1])
    ]


def _paths(tree: nodes.Template, from_outside: Collection[str]) -> Iterator[tuple[str, int]]:
    """Iterate over the members of namespaces, the namespaces that are used without a member, and all other names."""
    members = [(owner, member, line) for owner, member, line in find_members(tree) if owner in from_outside]
    for owner, member, line in members:
        yield (f"{owner}.{member}" if owner in NAMESPACES else owner), line
    with_members = {owner for owner, _, _ in members}
    for node in tree.find_all(nodes.Name):
        is_used_directly = node.name not in NAMESPACES or node.name not in with_members
        if node.ctx == "load" and node.name in from_outside and is_used_directly:
            yield node.name, node.lineno


def _guarded(tree: nodes.Template) -> Iterator[str]:
    """Iterate over the names that may be missing: `x is defined`, `x | default("")`, `{% if x %}`."""
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
