"""The language of templates: Jinja, and every difference from it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError, TemplateAssertionError, UndefinedError

from server.prompts.environment import (
    RENDER_ERRORS,
    Sandbox,
    TextTooLong,
    describe,
    line_of,
    render_within,
    to_json,
)
from tests.support.builders import NASTY
from tests.support.strategies import any_text, json_values

SANDBOX = Sandbox()
VALUES = {"args": {"items": "three", "class": "first"}, "xs": [1, 2], "nothing": None}


def render(source: str, **values: Any) -> str:
    return SANDBOX.from_string(source).render({**VALUES, **values})


def error_of(source: str) -> Exception:
    try:
        text = render(source)
    except RENDER_ERRORS as error:
        return error
    raise AssertionError(text)


# The patterns of the second seed file, unchanged.
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ name }}", "Kari"),
        ("{% if age > 20 %}old{% else %}young{% endif %}", "old"),
        ("{% for message in messages %}[{{ message }}]{% endfor %}", "[a][b]"),
        ("{% autoescape off %}{{ html }}{% endautoescape %}", "<b>"),
        ("{{ args.name }} {{ name }}", "Kari Kari"),
    ],
    ids=["variable", "conditional", "loop", "autoescape", "namespaced and at the root"],
)
def test_the_usual_patterns_work(source: str, text: str) -> None:
    values = {"name": "Kari", "age": 21, "messages": ["a", "b"], "html": "<b>", "args": {"name": "Kari"}}

    assert render(source, **values) == text


def test_an_undefined_name_is_empty_and_so_is_null() -> None:
    assert render("[{{ unknown }}{{ args.unknown }}{{ nothing }}]") == "[]"


def test_a_member_of_an_undefined_value_is_an_error() -> None:
    assert isinstance(error_of("{{ unknown.member }}"), UndefinedError)


def test_nothing_is_escaped_and_no_newline_is_lost() -> None:
    assert render("{{ '<&\"' }}\n") == '<&"\n'


def test_a_member_has_precedence_over_a_method() -> None:
    assert render("{{ args.items }} {{ args.keys() | list }}") == "three ['items', 'class']"


def test_members_with_any_name_can_be_iterated() -> None:
    assert (
        render("{% for key, value in args | items %}{{ key }}={{ value }} {% endfor %}") == "items=three class=first "
    )


@pytest.mark.parametrize("source", ["{{ args.keys }}", "{{ xs | map('string') }}", "{{ range }}", "{{ self }}"])
def test_only_values_are_printed(source: str) -> None:
    assert isinstance(error_of(source), SecurityError)


@pytest.mark.parametrize("source", ["{{ xs | random }}", "{{ xs | shuffle }}"])
def test_no_filter_is_random(source: str) -> None:
    with pytest.raises(TemplateAssertionError):
        SANDBOX.from_string(source)


@pytest.mark.parametrize("name", ["lipsum", "cycler", "joiner"])
def test_unneeded_features_are_not_available(name: str) -> None:
    assert render(f"{{{{ {name} is defined }}}}") == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ args.__class__ }}",
        "{{ args['__class__'] }}",
        "{{ args | attr('__class__') }}",
        "{{ xs | map(attribute='__class__') | list }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range.__init__.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0[a].__class__}'.format({'a': 1}) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ ('{0.__class__}' | string).format(1) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
        "{{ [''] | map('attr', '__class__') | list }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
        "{% macro m() %}{% endmacro %}{{ m._func }}",
        "{{ ((1).__class__) }}",
        "{% for x in xs %}{{ loop.__class__ }}{% endfor %}",
    ],
)
def test_nothing_escapes_from_the_sandbox(source: str) -> None:
    assert isinstance(error_of(source), SecurityError)


@pytest.mark.parametrize(
    "source", ["{{ xs.append(3) }}", "{{ xs.clear() }}", "{{ args.update(a=1) }}", "{{ args.pop('class') }}"]
)
def test_no_value_can_be_changed(source: str) -> None:
    before = json.dumps(VALUES)

    assert isinstance(error_of(source), SecurityError)
    assert json.dumps(VALUES) == before


@pytest.mark.parametrize(
    "source", ["{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as x %}", "{% from 'x' import y %}"]
)
def test_other_templates_cannot_be_loaded(source: str) -> None:
    assert "no loader" in str(error_of(source))


def test_a_range_has_a_maximum() -> None:
    assert isinstance(error_of("{{ range(10 ** 9) | list }}"), OverflowError)


# --- JSON


@given(json_values)
def test_any_value_survives_as_json(value: Any) -> None:
    text = to_json(value)

    text.encode()
    assert json.loads(text) == json.loads(json.dumps(value))


def test_json_is_compact_keeps_its_order_and_escapes_only_what_it_must() -> None:
    assert to_json({"z": "<é&'>", "a": ["\x00", "\ud83d", 1.0]}) == '{"z":"<é&\'>","a":["\\u0000","\\ud83d",1.0]}'


def test_indented_json_is_available() -> None:
    assert render("{{ {'a': [1]} | tojson(indent=2) }}") == '{\n  "a": [\n    1\n  ]\n}'


def test_an_undefined_value_is_null_in_json() -> None:
    assert render("{{ unknown | tojson }} {{ {'a': unknown} | tojson }}") == 'null {"a":null}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), iter([1])])
def test_a_value_that_is_not_json_is_an_error(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        to_json(value)


# --- text, length and line


@given(any_text | st.just(NASTY))
def test_a_value_is_printed_unchanged(value: str) -> None:
    assert render("{{ value }}", value=value) == value
    assert render("{% set copy = value %}{{ copy }}", value=value) == value


@pytest.mark.parametrize("text", ["\x00", "\ud83d", "\ud83d\ude00", "😀 \u2028"])
def test_a_template_may_contain_any_characters(text: str) -> None:
    assert render(text + "{{ '" + text + "' }}") == text + text


def test_a_text_may_be_as_long_as_its_limit() -> None:
    template = SANDBOX.from_string("{% for _ in range(10) %}ab{% endfor %}")

    assert render_within(template, {}, 20) == "ab" * 10
    with pytest.raises(TextTooLong, match="19"):
        render_within(template, {}, 19)


@pytest.mark.parametrize(
    "source", ["a\n{{ 1 // 0 }}", "\n{% if %}", "\n{{ x | nope }}", "\n{% for x in [1] %}\n{{ x.y.z }}{% endfor %}"]
)
def test_an_error_has_its_line(source: str) -> None:
    expected = source.count("\n") + 1

    assert line_of(error_of(source)) == expected


def test_an_error_is_described_briefly() -> None:
    assert describe(ValueError("x" * 5000)) == "x" * 300
    assert describe(ValueError()) == "ValueError"
    assert "nested" in describe(RecursionError("maximum recursion depth exceeded"))
    assert describe(error_of("{% for i in [1] %}" * 40 + "{% endfor %}" * 40)) == "too many statically nested blocks"
