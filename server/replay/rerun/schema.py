"""JSON schemas of people who write assertions: the words of the specification that say what a value looks like.

No references, no patterns and no formats: nothing here may take longer than the value is large. A word that is not
known is refused when the assertion is read, for a check that checks nothing is worse than none.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}
_ANNOTATIONS: Final = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples"})
_LIMITS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LENGTHS: Final[Mapping[str, type[str | list[Any] | dict[str, Any]]]] = {
    "minLength": str,
    "maxLength": str,
    "minItems": list,
    "maxItems": list,
    "minProperties": dict,
    "maxProperties": dict,
}
_CHOICES: Final = frozenset({"anyOf", "allOf", "oneOf"})
_WORDS: Final = frozenset(
    {"type", "enum", "const", "properties", "required", "additionalProperties", "items", "not"}
    | _LIMITS
    | _LENGTHS.keys()
    | _CHOICES
)
DEEPEST: Final = 20


def find_schema_fault(schema: Any, *, depth: int = 0) -> str | None:
    """What cannot be checked about a schema, or None."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return "A schema is an object, true or false."
    if depth > DEEPEST:
        return "The schema is nested too deeply."
    unknown = sorted(word for word in schema if word not in _WORDS | _ANNOTATIONS)
    if unknown:
        return f"`{unknown[0]}` is not known here; known are {', '.join(sorted(_WORDS))}."
    return next((fault for fault in _find_word_faults(schema, depth) if fault is not None), None)


def check_value(schema: Any, value: Any, path: str = "") -> str | None:
    """What is wrong with a value, or None. The schema has no faults."""
    if isinstance(schema, bool):
        return None if schema else f"{path or 'the value'} must not be there."
    return next((f"{path or 'the value'} {fault}" for fault in _find_faults(schema, value)), None) or next(
        _find_inner_faults(schema, value, path), None
    )


def _find_word_faults(schema: Mapping[str, Any], depth: int) -> Iterator[str | None]:
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        yield None if name in _TYPES else f"There is no type {name!r}."
    if "enum" in schema and not isinstance(schema["enum"], list):
        yield "`enum` is a list."
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield "`required` is a list of names."
    for word in _LIMITS & schema.keys():
        yield None if _is_number(schema[word]) else f"`{word}` is a number."
    for word in _LENGTHS.keys() & schema.keys():
        yield None if isinstance(schema[word], int) and schema[word] >= 0 else f"`{word}` is a whole number."
    for word in _CHOICES & schema.keys():
        yield None if isinstance(schema[word], list) and schema[word] else f"`{word}` is a list of schemas."
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        yield "`properties` is an object of schemas."
        return
    inner = [
        *properties.values(),
        *(schema[word] for word in ("items", "additionalProperties", "not") if word in schema),
    ]
    for word in sorted(_CHOICES & schema.keys()):
        inner.extend(schema[word] if isinstance(schema[word], list) else [])
    for part in inner:
        yield find_schema_fault(part, depth=depth + 1)


def _find_faults(schema: Mapping[str, Any], value: Any) -> Iterator[str]:
    types = schema.get("type", [])
    names = types if isinstance(types, list) else [types]
    if names and not any(_TYPES[name](value) for name in names):
        yield f"is not of type {' or '.join(names)}."
    if "enum" in schema and not any(_are_equal(value, choice) for choice in schema["enum"]):
        yield "is none of the values that are allowed."
    if "const" in schema and not _are_equal(value, schema["const"]):
        yield "is not the value that it has to be."
    if _is_number(value):
        yield from _find_limit_faults(schema, value)
    yield from _find_length_faults(schema, value)
    if isinstance(value, Mapping):
        for name in schema.get("required", []):
            if name not in value:
                yield f"has no {name!r}."


def _find_length_faults(schema: Mapping[str, Any], value: Any) -> Iterator[str]:
    for word, kind in _LENGTHS.items():
        if word in schema and isinstance(value, kind):
            is_least, limit = word.startswith("min"), schema[word]
            if (len(value) < limit) if is_least else (len(value) > limit):
                yield f"has a length of {len(value)}, and {'at least' if is_least else 'at most'} {limit} is asked for."


def _find_limit_faults(schema: Mapping[str, Any], value: float) -> Iterator[str]:
    if "minimum" in schema and value < schema["minimum"]:
        yield f"is less than {schema['minimum']}."
    if "maximum" in schema and value > schema["maximum"]:
        yield f"is more than {schema['maximum']}."
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"is not more than {schema['exclusiveMinimum']}."
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        yield f"is not less than {schema['exclusiveMaximum']}."


def _find_inner_faults(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    if isinstance(value, Mapping):
        others = schema.get("additionalProperties", True)
        for name, inner in value.items():
            fault = check_value(properties.get(name, others), inner, f"{path}.{name}")
            if fault is not None:
                yield fault
    if isinstance(value, list) and "items" in schema:
        for place, inner in enumerate(value):
            fault = check_value(schema["items"], inner, f"{path}[{place}]")
            if fault is not None:
                yield fault
    yield from _find_choice_faults(schema, value, path)


def _find_choice_faults(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    for part in schema.get("allOf", []):
        fault = check_value(part, value, path)
        if fault is not None:
            yield fault
    where = path or "the value"
    if "anyOf" in schema and all(check_value(part, value, path) is not None for part in schema["anyOf"]):
        yield f"{where} fits none of anyOf."
    if "oneOf" in schema and sum(check_value(part, value, path) is None for part in schema["oneOf"]) != 1:
        yield f"{where} does not fit exactly one of oneOf."
    if "not" in schema and check_value(schema["not"], value, path) is None:
        yield f"{where} is what it must not be."


def _are_equal(one: Any, other: Any) -> bool:
    """As JSON has it: `1` is `1.0`, and `true` is not `1`."""
    if _is_number(one) and _is_number(other):
        return bool(one == other)
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
