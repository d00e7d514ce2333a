"""The layers' templates: files of whoever runs the server, one static and one dynamic per provider, and two for the
history that has left the buffer.

They are read once, at start, and what is wrong with one is said then. A file that is not in the user's directory comes
from the built-in ones, which lie in `templates/`: beside the package in a checkout, inside it in an installed wheel.

`{{ cached_history }}` stands at the very end of a static template, or nowhere. The compactor adds frozen segments at
that place, and the static text of one epoch has to begin with that of the last, byte for byte: nothing can follow the
history, and nothing before it may depend on it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, nodes

from server.conversation.bundled import find_bundled
from server.conversation.errors import SettingsInvalid, ValidationFailed
from server.payload.renderer import TemplateFailure
from server.payload.transcript import quote
from server.prompts.analysis import Fault, find_fault, find_loading
from server.prompts.environment import RENDER_ERRORS, Sandbox, TextTooLong, describe, line_of, render_within, to_json
from server.providers.choice import ANTHROPIC, GEMINI

HISTORY: Final = "cached_history"
_STATIC_NAMES: Final = {provider: f"{provider}_static_prompt.j2" for provider in (GEMINI, ANTHROPIC)}
_DYNAMIC_NAMES: Final = {provider: f"{provider}_dynamic_prompt.j2" for provider in (GEMINI, ANTHROPIC)}
_SEGMENT_NAME: Final = "history_segment.j2"
_SUMMARY_NAME: Final = "history_summary.j2"
_KNOWN_NAMES: Final = frozenset({*_STATIC_NAMES.values(), *_DYNAMIC_NAMES.values(), _SEGMENT_NAME, _SUMMARY_NAME})
_HINT: Final = "docs/guides/templates.md says what a template may do."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTemplate:
    """A template that is ready to be rendered."""

    name: str
    """Of the file."""
    source: str
    compiled: Template | None
    """A static one without its `{{ cached_history }}` and the white space behind it. None for one that came over the
    network: only a worker compiles it.
    """
    ends_in_history: bool = False

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.source.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSet:
    """All templates of a server, by provider."""

    static: Mapping[str, LayerTemplate]
    dynamic: Mapping[str, LayerTemplate]
    segment: LayerTemplate
    """Tells turns that have left the buffer. It alone has the filter `quoted`."""
    summary: LayerTemplate
    """Asks for a summary of them."""


def load_templates(directory: Path | None) -> TemplateSet:
    """The user's templates where there are some, the built-in ones for the rest. Raises `SettingsInvalid`."""
    if directory is None:
        return _load_built_in()
    directory = directory.expanduser()
    _require_known_names(directory)
    return _load(directory)


def override_templates(templates: TemplateSet, sources: Mapping[str, str]) -> TemplateSet:
    """The set with other sources for some files, by their names, which nothing here parses: `read_layer` does that, in
    a worker. Raises `ValidationFailed` for a name that no file has.
    """
    for name, source in sources.items():
        if name not in _KNOWN_NAMES:
            raise refuse_template(name, f"{name} is never read; those read are {', '.join(sorted(_KNOWN_NAMES))}.")
        layer = LayerTemplate(name=name, source=source, compiled=None)
        templates = TemplateSet(
            static={key: layer if _STATIC_NAMES[key] == name else old for key, old in templates.static.items()},
            dynamic={key: layer if _DYNAMIC_NAMES[key] == name else old for key, old in templates.dynamic.items()},
            segment=layer if name == _SEGMENT_NAME else templates.segment,
            summary=layer if name == _SUMMARY_NAME else templates.summary,
        )
    return templates


def refuse_template(name: str, message: str) -> ValidationFailed:
    """The error for a source in place of a file."""
    told = [{"path": f"candidate.templates.{name}", "source": "body", "message": message}]
    return ValidationFailed(f"candidate.templates: {message}", hint=_HINT, errors=told)


def read_layer(name: str, source: str) -> LayerTemplate:
    """A template for the file of this name. Raises `SettingsInvalid` for one that cannot be used there."""
    if name in _STATIC_NAMES.values():
        return _read_static(Sandbox(), Path(name), source)
    return _read_dynamic(_telling_sandbox() if name == _SEGMENT_NAME else Sandbox(), Path(name), source)


@cache
def _load_built_in() -> TemplateSet:
    return _load(None)


def _load(directory: Path | None) -> TemplateSet:
    sandbox = Sandbox()
    return TemplateSet(
        static={name: _load_static(sandbox, _find(directory, file)) for name, file in _STATIC_NAMES.items()},
        dynamic={name: _load_dynamic(sandbox, _find(directory, file)) for name, file in _DYNAMIC_NAMES.items()},
        segment=_load_dynamic(_telling_sandbox(), _find(directory, _SEGMENT_NAME)),
        summary=_load_dynamic(sandbox, _find(directory, _SUMMARY_NAME)),
    )


def _telling_sandbox() -> Sandbox:
    sandbox = Sandbox()
    sandbox.filters["quoted"] = quote
    return sandbox


def _require_known_names(directory: Path) -> None:
    if not directory.is_dir():
        raise SettingsInvalid(f"STRATA_TEMPLATES_DIR: {directory} is no directory.", hint=_HINT)
    found = [*directory.glob("*_prompt.j2"), *directory.glob("history_*.j2")]
    strange = sorted(path.name for path in found if path.name not in _KNOWN_NAMES)
    if strange:
        names = ", ".join(sorted(_KNOWN_NAMES))
        raise SettingsInvalid(f"{directory / strange[0]} has a name that is never read; those read are {names}.")


def _find(directory: Path | None, name: str) -> Path:
    if directory is not None and (directory / name).exists():
        return directory / name
    return find_bundled("templates") / name


def _load_static(sandbox: Sandbox, path: Path) -> LayerTemplate:
    return _read_static(sandbox, path, _read(path))


def _read_static(sandbox: Sandbox, path: Path, source: str) -> LayerTemplate:
    tree = _parse(sandbox, path, source)
    _refuse(path, find_fault(tree))
    ends_in_history = _cut_history(tree)
    _refuse(path, _find_stray_history(tree))
    return LayerTemplate(
        name=path.name, source=source, compiled=sandbox.from_string(tree), ends_in_history=ends_in_history
    )


def _load_dynamic(sandbox: Sandbox, path: Path) -> LayerTemplate:
    return _read_dynamic(sandbox, path, _read(path))


def _read_dynamic(sandbox: Sandbox, path: Path, source: str) -> LayerTemplate:
    tree = _parse(sandbox, path, source)
    _refuse(path, find_loading(tree))
    return LayerTemplate(name=path.name, source=source, compiled=sandbox.from_string(tree))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SettingsInvalid(f"{path} cannot be read: {error.strerror}.", hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"{path} is not UTF-8: byte {error.start} cannot be read.", hint=_HINT) from error


def _parse(sandbox: Sandbox, path: Path, source: str) -> nodes.Template:
    """The tree of a template that also compiles: a filter that does not exist is noticed only then."""
    try:
        tree = sandbox.parse(source)
        sandbox.compile(source)
    except RENDER_ERRORS as error:
        raise _invalid(path, Fault(message=describe(error), line=line_of(error) or 1)) from error
    return tree


def _cut_history(tree: nodes.Template) -> bool:
    """Takes `{{ cached_history }}` off the end. False where it is not there."""
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, nodes.Output):
        return False
    kept = list(last.nodes)
    while kept and isinstance(kept[-1], nodes.TemplateData) and not kept[-1].data.strip():
        kept.pop()
    if not kept or not _is_history(kept[-1]):
        return False
    last.nodes = kept[:-1]
    return True


def _find_stray_history(tree: nodes.Template) -> Fault | None:
    line = next((node.lineno for node in tree.find_all(nodes.Name) if _is_history(node)), None)
    if line is None:
        return None
    message = (
        f"`{{{{ {HISTORY} }}}}` has to be the very end of the template, or not be in it: "
        "history grows there, and all before it must stay as it is."
    )
    return Fault(message=message, line=line)


def _is_history(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == HISTORY


def _refuse(path: Path, fault: Fault | None) -> None:
    if fault is not None:
        raise _invalid(path, fault)


def _invalid(path: Path, fault: Fault) -> SettingsInvalid:
    return SettingsInvalid(f"{path}, line {fault.line}: {fault.message}", hint=_HINT, line=fault.line)


UNLIMITED_CHARS: Final = 2**62


class LayerFailed(Exception):
    """A template that gave no text."""

    def __init__(self, failure: TemplateFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def render_static_layer(template: LayerTemplate, values: Mapping[str, Any], max_chars: int) -> str:
    """The text up to where the history begins. Raises `LayerFailed`.

    If the template does not mention the history, a blank line stands between its text and the history.
    """
    text = render_layer(template, values, max_chars)
    if template.ends_in_history:
        return text
    stripped = text.rstrip()
    return f"{stripped}\n\n" if stripped else ""


def render_dynamic_layer(
    template: LayerTemplate, values: Mapping[str, Any], max_chars: int
) -> tuple[str, TemplateFailure | None]:
    """Compact JSON; a text that is no JSON comes as it is, with a failure. Raises `LayerFailed`."""
    text = render_layer(template, values, max_chars)
    try:
        return to_json(json.loads(text, parse_constant=_refuse_constant)), None
    except (ValueError, RecursionError) as error:
        return text, describe_failure(template.name, "not_json", error)


def render_layer(template: LayerTemplate, values: Mapping[str, Any], max_chars: int = UNLIMITED_CHARS) -> str:
    """The text. Raises `LayerFailed`."""
    if template.compiled is None:
        raise ValueError(f"{template.name} is compiled in a worker only.")
    try:
        return render_within(template.compiled, values, max_chars)
    except (TextTooLong, OverflowError) as error:  # a range, a repetition or a number beyond all measure
        raise LayerFailed(describe_failure(template.name, "too_large", error)) from error
    except RENDER_ERRORS as error:
        raise LayerFailed(describe_failure(template.name, "render", error)) from error


def describe_failure(template: str, kind: str, error: Exception) -> TemplateFailure:
    """The failure as it is recorded."""
    line = error.lineno if isinstance(error, json.JSONDecodeError) else line_of(error)
    return TemplateFailure(template=template, kind=kind, message=describe(error), line=line)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
