"""The templates of the layers: files of the operator, one static and one dynamic per provider, and two for compacted
history.

They are read once, at start, and errors are reported then. If a file is not in the operator's directory, the built-in
one is used. Built-in templates are in `templates/`: next to the package in a checkout, inside it in an installed wheel.

`{{ cached_history }}` may only be the last thing in a static template. The compactor appends frozen segments there, and
the static text of an epoch must begin with that of the previous one, byte for byte: no text can follow the history, and
no text before it may depend on it.
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
_HINT: Final = "docs/guides/templates.md describes what a template may contain."


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTemplate:
    """A template of a layer."""

    name: str
    """The name of the file."""
    source: str
    compiled: Template | None
    """The compiled template, without a final `{{ cached_history }}` and the white space after it. None for a template
    from the network, which only a worker compiles.
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
    """Renders compacted turns. Only this template has the filter `quoted`."""
    summary: LayerTemplate
    """The request for a summary of compacted turns."""


def load_templates(directory: Path | None) -> TemplateSet:
    """Load the templates of the directory, and the built-in ones for files that it lacks. Raises `SettingsInvalid`."""
    if directory is None:
        return _load_built_in()
    directory = directory.expanduser()
    _require_known_names(directory)
    return _load_all(directory)


def override_templates(templates: TemplateSet, sources: Mapping[str, str]) -> TemplateSet:
    """Return the set with other sources for some files, by file name. They are parsed by `read_layer` in a worker.

    Raises `ValidationFailed` for an unknown file name.
    """
    for name, source in sources.items():
        if name not in _KNOWN_NAMES:
            raise refuse_template(
                name, f"{name} is not the name of a template; the names are {', '.join(sorted(_KNOWN_NAMES))}."
            )
        layer = LayerTemplate(name=name, source=source, compiled=None)
        templates = TemplateSet(
            static={key: layer if _STATIC_NAMES[key] == name else old for key, old in templates.static.items()},
            dynamic={key: layer if _DYNAMIC_NAMES[key] == name else old for key, old in templates.dynamic.items()},
            segment=layer if name == _SEGMENT_NAME else templates.segment,
            summary=layer if name == _SUMMARY_NAME else templates.summary,
        )
    return templates


def refuse_template(name: str, message: str) -> ValidationFailed:
    """Build the error for an invalid source."""
    errors = [{"path": f"candidate.templates.{name}", "source": "body", "message": message}]
    return ValidationFailed(f"candidate.templates: {message}", hint=_HINT, errors=errors)


def read_layer(name: str, source: str) -> LayerTemplate:
    """Compile a source for the file of this name. Raises `SettingsInvalid` if it cannot be used there."""
    if name in _STATIC_NAMES.values():
        return _read_static(Sandbox(), Path(name), source)
    return _read_dynamic(_segment_sandbox() if name == _SEGMENT_NAME else Sandbox(), Path(name), source)


@cache
def _load_built_in() -> TemplateSet:
    return _load_all(None)


def _load_all(directory: Path | None) -> TemplateSet:
    sandbox = Sandbox()
    return TemplateSet(
        static={name: _read_static(sandbox, *_load(directory, file)) for name, file in _STATIC_NAMES.items()},
        dynamic={name: _read_dynamic(sandbox, *_load(directory, file)) for name, file in _DYNAMIC_NAMES.items()},
        segment=_read_dynamic(_segment_sandbox(), *_load(directory, _SEGMENT_NAME)),
        summary=_read_dynamic(sandbox, *_load(directory, _SUMMARY_NAME)),
    )


def _segment_sandbox() -> Sandbox:
    sandbox = Sandbox()
    sandbox.filters["quoted"] = quote
    return sandbox


def _require_known_names(directory: Path) -> None:
    if not directory.is_dir():
        raise SettingsInvalid(f"STRATA_TEMPLATES_DIR: {directory} is not a directory.", hint=_HINT)
    found = [*directory.glob("*_prompt.j2"), *directory.glob("history_*.j2")]
    unknown = sorted(path.name for path in found if path.name not in _KNOWN_NAMES)
    if unknown:
        names = ", ".join(sorted(_KNOWN_NAMES))
        raise SettingsInvalid(f"{directory / unknown[0]} is not the name of a template; the names are {names}.")


def _load(directory: Path | None, name: str) -> tuple[Path, str]:
    """Return the path and the content of a file. Raises `SettingsInvalid`."""
    path = find_bundled("templates") / name
    if directory is not None and (directory / name).exists():
        path = directory / name
    try:
        return path, path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SettingsInvalid(f"{path} cannot be read: {error.strerror}.", hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise SettingsInvalid(f"{path} is not UTF-8: byte {error.start} cannot be read.", hint=_HINT) from error


def _read_static(sandbox: Sandbox, path: Path, source: str) -> LayerTemplate:
    tree = _parse(sandbox, path, source)
    _refuse(path, find_fault(tree))
    ends_in_history = _cut_history(tree)
    _refuse(path, _find_stray_history(tree))
    return LayerTemplate(
        name=path.name, source=source, compiled=sandbox.from_string(tree), ends_in_history=ends_in_history
    )


def _read_dynamic(sandbox: Sandbox, path: Path, source: str) -> LayerTemplate:
    tree = _parse(sandbox, path, source)
    _refuse(path, find_loading(tree))
    return LayerTemplate(name=path.name, source=source, compiled=sandbox.from_string(tree))


def _parse(sandbox: Sandbox, path: Path, source: str) -> nodes.Template:
    """Parse a template and compile it, because only compiling detects a filter that does not exist."""
    try:
        tree = sandbox.parse(source)
        sandbox.compile(source)
    except RENDER_ERRORS as error:
        raise _invalid(path, Fault(message=describe(error), line=line_of(error) or 1)) from error
    return tree


def _cut_history(tree: nodes.Template) -> bool:
    """Remove `{{ cached_history }}` from the end. Returns whether it was there."""
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
        f"`{{{{ {HISTORY} }}}}` may only be the last thing in the template: "
        "history is appended there, and the text before it must not change."
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
    """A template could not be rendered."""

    def __init__(self, failure: TemplateFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def render_static_layer(template: LayerTemplate, values: Mapping[str, Any], max_chars: int) -> str:
    """Render the text before the history. Raises `LayerFailed`.

    If the template does not contain the history, a blank line separates its text from the history.
    """
    text = render_layer(template, values, max_chars)
    if template.ends_in_history:
        return text
    stripped = text.rstrip()
    return f"{stripped}\n\n" if stripped else ""


def render_dynamic_layer(
    template: LayerTemplate, values: Mapping[str, Any], max_chars: int
) -> tuple[str, TemplateFailure | None]:
    """Render compact JSON. A text that is not JSON is returned unchanged, with a failure. Raises `LayerFailed`."""
    text = render_layer(template, values, max_chars)
    try:
        return to_json(json.loads(text, parse_constant=_refuse_constant)), None
    except (ValueError, RecursionError) as error:
        return text, describe_failure(template.name, "not_json", error)


def render_layer(template: LayerTemplate, values: Mapping[str, Any], max_chars: int = UNLIMITED_CHARS) -> str:
    """Render the text. Raises `LayerFailed`."""
    if template.compiled is None:
        raise ValueError(f"{template.name} is compiled in a worker only.")
    try:
        return render_within(template.compiled, values, max_chars)
    except (TextTooLong, OverflowError) as error:  # a range, a repetition or a number is too large
        raise LayerFailed(describe_failure(template.name, "too_large", error)) from error
    except RENDER_ERRORS as error:
        raise LayerFailed(describe_failure(template.name, "render", error)) from error


def describe_failure(template: str, kind: str, error: Exception) -> TemplateFailure:
    """Build the failure that is recorded with the call."""
    line = error.lineno if isinstance(error, json.JSONDecodeError) else line_of(error)
    return TemplateFailure(template=template, kind=kind, message=describe(error), line=line)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
