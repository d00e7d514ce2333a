"""The language that templates are written in: Jinja with its own defaults, sandboxed, and without surprises.

Where it differs from Jinja as everybody knows it:

- Reaching for what the sandbox forbids is an error. Jinja would print nothing.
- `a.name` is the member of that name where `a` has one, and only then a method: data may call its members `items`.
- What is printed is text, a number, a list or an object. A function, a generator or a loop is an error: Jinja would
  print where in memory it lies. None prints nothing.
- `tojson` gives compact JSON as it is, without escapes for HTML, and is for undefined values `null`.
- The same values give the same text: `random` and `lipsum` are not there.
- There is nothing to include, import or extend.
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
"""What a template can raise when it is compiled or rendered, beside MemoryError. Each stands for a mistake in it."""
_COMPILED_TEXT: Final = "<template>"
"""What Jinja calls the file of a template that came from none."""
_MESSAGE_CHARS: Final = 300
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class TextTooLong(Exception):
    """The text has more characters than it may have."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one kind of text: prompts. Nothing is escaped, nothing is loaded."""

    def __init__(self) -> None:
        super().__init__(autoescape=False, keep_trailing_newline=True, finalize=_printable)
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        del self.filters["random"]
        self.filters["tojson"] = to_json

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A member before a method."""
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """An attempt to get out is an error and not an empty text."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON with the keys in their order, compact unless indented. NUL and lone surrogates are written as escapes."""
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
    """The text. Raises `TextTooLong` as soon as it is, and any of `RENDER_ERRORS`."""
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
    """What went wrong, in few words: a message may quote a value, and a value may be long."""
    match error:
        case RecursionError():
            message = "It is nested too deeply, or calls itself without end."
        case TemplateSyntaxError():
            message = error.message or ""
        case SyntaxError():  # of the Python that the template became
            message = error.msg
        case _:
            message = str(error)
    return (message or type(error).__name__)[:_MESSAGE_CHARS]


def line_of(error: BaseException) -> int | None:
    """The line of the template that raised it, as far as it is known."""
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
        raise TypeError(f"a {type(value).__name__} is no JSON; a list is, `|list` makes one")


def _printable(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, str | int | float | list | tuple | dict | Undefined):
        return value
    raise SecurityError(f"a {type(value).__name__} cannot be printed.")
