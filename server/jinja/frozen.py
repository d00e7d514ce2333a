"""What a text that is rendered once and then frozen may not do.

The static layer is rendered when an epoch begins and sent with every call until it ends. A clock or a message in it
would show the moment at which somebody happened to begin, for ever.
"""

from dataclasses import dataclass
from typing import Final

from jinja2 import meta, nodes

VOLATILE_NAMESPACES: Final = ("system", "message")
VOLATILE_MEMBERS: Final = {"conversation": frozenset({"updated_date", "duration"})}
_LOADING: Final = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is not allowed, as a sentence, and where it stands."""

    message: str
    line: int


def find_fault(tree: nodes.Template) -> Fault | None:
    """The first thing in a template that its text may not depend on, or that there is not."""
    return find_loading(tree) or _find_volatile_namespace(tree) or _find_volatile_member(tree)


def find_loading(tree: nodes.Template) -> Fault | None:
    """A tag that asks for another template. Every template stands alone."""
    node = next((node for kind in _LOADING for node in tree.find_all(kind)), None)
    if node is None:
        return None
    return Fault(message="There are no other templates to include, import or extend.", line=node.lineno)


def _find_volatile_namespace(tree: nodes.Template) -> Fault | None:
    # Jinja itself says which names come from outside; one that the template binds is the template's own.
    from_outside = meta.find_undeclared_variables(tree)
    for name in VOLATILE_NAMESPACES:
        if name in from_outside:
            line = next(node.lineno for node in tree.find_all(nodes.Name) if node.name == name and node.ctx == "load")
            return Fault(message=f"`{name}` changes with every turn, and this text is written once.", line=line)
    return None


def _find_volatile_member(tree: nodes.Template) -> Fault | None:
    reached = [(node.node, node.attr, node.lineno) for node in tree.find_all(nodes.Getattr)]
    reached += [
        (node.node, node.arg.value, node.lineno)
        for node in tree.find_all(nodes.Getitem)
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)
    ]
    for owner, member, line in reached:
        if isinstance(owner, nodes.Name) and member in VOLATILE_MEMBERS.get(owner.name, ()):
            return Fault(
                message=f"`{owner.name}.{member}` changes with every turn, and this text is written once.", line=line
            )
    return None
