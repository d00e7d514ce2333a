"""The Jinja environment of templates: Jinja's defaults in a sandbox.

It differs from plain Jinja as follows:

- Access to an attribute that the sandbox forbids is an error. Jinja would print nothing.
- `a.name` is the member of that name if `a` has one, else a method, because data may have members such as `items`.
- Text, numbers, lists and objects can be printed. A function, a generator or a loop is an error, because Jinja would
  print its memory address. None prints nothing.
- `tojson` gives compact JSON without escapes for HTML, and `null` for undefined values.
- The same values give the same text: `random` and `lipsum` do not exist.
- Templates cannot be included, imported or extended.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from jinja2 import Template, Undefined
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_ERRORS: Final = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""The errors that an invalid template can raise when it is compiled or rendered, besides MemoryError."""
_COMPILED_TEXT: Final = "<template>"
"""Jinja's file name for a template that is not from a file."""
_MESSAGE_CHARS: Final = 300
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class TextTooLong(Exception):
    """The text has too many characters."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of prompts. Nothing is escaped, and no template is loaded."""

    def __init__(self) -> None:
        super().__init__(autoescape=False, keep_trailing_newline=True, finalize=_printable)
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        del self.filters["random"]
        self.filters["tojson"] = to_json

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Prefer a member to a method."""
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise an error instead of printing an empty text."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")


def to_json(value: Any, indent: int | None = None) -> str:
    """Encode as JSON without sorting keys, compact unless indented. NUL and lone surrogates are written as escapes."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        allow_nan=False,
        indent=indent,
        separators=(",", ":" if indent is None else ": "),
        default=_undefined_as_null,
    )
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def render_within(template: Template, values: Mapping[str, Any], max_chars: int) -> str:
    """Render the template. Raises `TextTooLong` as soon as the limit is exceeded, and any of `RENDER_ERRORS`."""
    pieces: list[str] = []
    length = 0
    for piece in template.generate(values):
        if piece:
            pieces.append(piece)
            length += len(piece)
        if length > max_chars:
            raise TextTooLong(f"The text is longer than {max_chars} characters.")
    return "".join(pieces)


def describe(error: Exception) -> str:
    """Return the message of an error, shortened: it may quote a long value."""
    match error:
        case RecursionError():
            message = "It is nested too deeply, or calls itself endlessly."
        case TemplateSyntaxError():
            message = error.message or ""
        case SyntaxError():  # in the Python code that the template was compiled to
            message = error.msg
        case _:
            message = str(error)
    return (message or type(error).__name__)[:_MESSAGE_CHARS]


def line_of(error: BaseException) -> int | None:
    """Return the line of the template that raised the error, if it is known."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    found = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _COMPILED_TEXT:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


def _undefined_as_null(value: Any) -> None:
    if not isinstance(value, Undefined):
        raise TypeError(f"a {type(value).__name__} cannot be written as JSON; `|list` converts it to a list")


def _printable(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, str | int | float | list | tuple | dict | Undefined):
        return value
    raise SecurityError(f"a {type(value).__name__} cannot be printed.")
