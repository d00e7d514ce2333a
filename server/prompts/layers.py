"""Rendering the templates of the layers: in this process those of the server, in a worker those of a candidate."""

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from server.payload.renderer import TemplateFailure
from server.prompts.environment import RENDER_ERRORS, TextTooLong, describe, line_of, render_within, to_json
from server.prompts.templates import LayerTemplate

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
