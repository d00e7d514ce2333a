"""The JSON schemas of assertions: a subset of JSON Schema 2020-12, validated by `jsonschema`.

The subset has no `$ref`, `pattern`, `format` or `uniqueItems`: nothing is fetched, and no regular expression runs. A
schema with a keyword outside the subset is refused when the assertion is created. The specification would ignore the
keyword, and the assertion would check less than it says.
"""

from collections.abc import Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import create

_SCHEMA: Final = {"$ref": "#"}
_SCHEMAS: Final = {"type": "array", "items": _SCHEMA, "minItems": 1}
_NUMBER: Final = {"type": "number"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TYPE: Final = {"enum": ["null", "boolean", "integer", "number", "string", "array", "object"]}
_KEYWORDS: Final[Mapping[str, Any]] = {
    "type": {"if": {"type": "array"}, "then": {"items": _TYPE}, "else": _TYPE},
    "enum": {"type": "array"},
    "const": True,
    "properties": {"type": "object", "additionalProperties": _SCHEMA},
    "required": {"type": "array", "items": {"type": "string"}},
    "additionalProperties": _SCHEMA,
    "items": _SCHEMA,
    "not": _SCHEMA,
    **dict.fromkeys(("anyOf", "allOf", "oneOf"), _SCHEMAS),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
}
_ANNOTATIONS: Final = ("$id", "$comment", "title", "description", "default", "examples")
_META_SCHEMA: Final[Mapping[str, Any]] = {
    "type": ["object", "boolean"],
    "properties": {**_KEYWORDS, **dict.fromkeys(_ANNOTATIONS, True)},
    "additionalProperties": False,
}
_META_VALIDATOR: Final = Draft202012Validator(_META_SCHEMA)
_Validator: Final = create(
    meta_schema=_META_SCHEMA,
    validators={keyword: Draft202012Validator.VALIDATORS[keyword] for keyword in _KEYWORDS},
    type_checker=Draft202012Validator.TYPE_CHECKER,
)


def find_schema_fault(schema: Any) -> str | None:
    """Return why a schema cannot be used, or None."""
    try:
        error = best_match(_META_VALIDATOR.iter_errors(_without_dialect(schema)))
    except RecursionError:
        return "The schema is nested too deeply."
    if error is None:
        return None
    if error.validator == "additionalProperties" and isinstance(error.instance, Mapping):
        unknown = min(keyword for keyword in error.instance if keyword not in _META_SCHEMA["properties"])
        return f"{error.json_path}: `{unknown}` is not supported. Supported keywords: {', '.join(sorted(_KEYWORDS))}."
    return f"{error.json_path}: {error.message}"


def check_value(schema: Any, value: Any) -> str | None:
    """Return why a value does not match a schema without faults, or None if it does."""
    error = best_match(_Validator(_without_dialect(schema)).iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"


def _without_dialect(schema: Any) -> Any:
    """Drop `$schema`, which would make `jsonschema` switch to the validator of another draft."""
    return {key: value for key, value in schema.items() if key != "$schema"} if isinstance(schema, Mapping) else schema
