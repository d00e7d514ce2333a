import json
import sys
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from server.conversation.block import TextBlock, ToolCallBlock
from server.conversation.turn import StopReason
from server.conversation.usage import Usage
from server.replay.rerun.assertion_evaluation import (
    NAMES,
    check_assertions,
    check_value,
    find_fault,
    find_schema_fault,
)
from server.replay.rerun.assertions import Subject, describe_subject
from server.replay.rerun.comparison import AnswerContent
from server.replay.rerun.expression import ExpressionFailed, ExpressionRefused, evaluate, read_expression
from server.replay.rerun.replay import Assertion
from server.replay.rerun.result import AnswerFacts

SUBJECT = Subject(
    candidate=AnswerContent(
        blocks=(TextBlock(text='{"city": "Oslo"}'), ToolCallBlock(id="1", name="look", arguments={"city": "Rome"})),
        stop_reason=StopReason.TOOL_USE,
    ),
    recorded=AnswerContent(blocks=(TextBlock(text="Hi"),), stop_reason=StopReason.END_TURN),
    similarity=0.5,
    facts=AnswerFacts(usage=Usage(fresh_input_tokens=10, output_tokens=3), cost_usd=Decimal("0.01"), latency_ms=7),
)

VALUES = describe_subject(SUBJECT)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "bb"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
schemas = st.recursive(
    st.booleans()
    | st.fixed_dictionaries({}, optional={"type": types, "enum": st.lists(values, min_size=1, max_size=2)})
    | st.fixed_dictionaries(
        {}, optional={"minimum": st.integers(-2, 2), "maxLength": st.integers(0, 2), "minItems": st.integers(0, 2)}
    )
    | st.fixed_dictionaries({"const": values}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "required": st.lists(st.sampled_from("ab"), max_size=1),
            "additionalProperties": inner,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
        },
    ),
    max_leaves=6,
)


class TestExpressions:
    @pytest.mark.parametrize(
        "source",
        [
            "'Oslo' in text and stop_reason == 'tool_use'",
            "tool_calls[0]['arguments']['city'].lower() == 'rome'",
            "any(call['name'] == 'look' for call in tool_calls)",
            "len([word for word in text.split() if word]) <= 2 < input_tokens",
            "similarity >= 0.5 and cost_usd < 0.02 and latency_ms / 1000 < 1",
            "recorded_text[:1] == 'H' if recorded_tool_calls == [] else False",
            "not (max(1, 2) - 2) and sum([1, 2]) == 3",
        ],
    )
    def test_useful_expressions_can_be_written(self, source: str) -> None:
        assert [result.passed for result in check_assertions([Assertion(name="a", expression=source)], VALUES)] == [
            True
        ]

    @pytest.mark.parametrize(
        "source",
        [
            "__import__('os')",
            "text.__class__",
            "text.format(1)",
            "(lambda: 1)()",
            "open('x')",
            "[x := 1]",
            "f'{text}'",
            "text if",
            "len(text, key=1)",
            "a" * 3000,
        ],
    )
    def test_expressions_that_leave_the_sandbox_are_refused_when_parsed(self, source: str) -> None:
        with pytest.raises(ExpressionRefused):
            read_expression(source, NAMES)

    @pytest.mark.parametrize(
        "source",
        [
            "'a' * 1000000000",
            "[0 for a in text for b in text for c in text for d in text for e in text]",
            "text + 1",
            "tool_calls[9]",
            "1 / 0",
            "'%1000000000d' % 1",
            "text('x')",
            "latency_ms.lower()",
            "[1, 2] < 3",
            "round(7, -1000000000)",
        ],
    )
    def test_a_failing_expression_is_reported_without_delay(self, source: str) -> None:
        subject = {"text": "x" * 100, "tool_calls": [], "latency_ms": 1}
        with pytest.raises(ExpressionFailed):
            evaluate(read_expression(source, NAMES), subject)

    @example(source="len")
    @example(source="[max]")
    @example(source="len if text else text")
    @example(source="text.isdigit")
    @given(source=st.text(st.sampled_from("tex()[]{}.,:'\"_ =<>+*%0123 forinlambda"), max_size=30))
    def test_any_expression_is_refused_or_fails_or_has_a_value(self, source: str) -> None:
        subject = {"text": "abc"} | dict.fromkeys(NAMES - {"text"})
        with suppress(ExpressionRefused, ExpressionFailed):
            json.dumps(evaluate(read_expression(source, NAMES), subject))


class TestSchemas:
    @given(schema=schemas, value=values)
    def test_schemas_follow_the_specification(self, schema: Any, value: Any) -> None:
        assert find_schema_fault(schema) is None
        assert (check_value(schema, value) is None) is Draft202012Validator(schema).is_valid(value)

    @pytest.mark.parametrize(
        "schema",
        [
            {"pattern": "(a+)+$"},
            {"properties": {"a": {"pattern": "(a+)+$"}}},
            {"patternProperties": {"(a+)+$": {}}},
            {"format": "regex"},
            {"$ref": "#"},
            {"items": {"$ref": "http://127.0.0.1/schema"}},
            {"$dynamicRef": "#a"},
            {"items": {"$schema": "http://json-schema.org/draft-04/schema#"}},
            {"type": "text"},
            {"type": ["string", "text"]},
            {"properties": {"a": 1}},
            {"enum": 1},
            {"anyOf": []},
            {"minLength": -1},
            [],
        ],
    )
    def test_what_cannot_be_checked_is_refused(self, schema: Any) -> None:
        assert find_schema_fault(schema) is not None

    def test_a_refusal_names_the_position_and_the_keyword(self) -> None:
        fault = find_schema_fault({"properties": {"a": {"pattern": "x"}}})
        assert fault is not None
        assert fault.startswith(
            "$.properties.a: `pattern` is not supported. Supported keywords: additionalProperties, "
        )

    def test_a_schema_that_is_nested_too_deeply_is_refused(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(sys.getrecursionlimit()):
            schema = {"not": schema}
        assert find_schema_fault(schema) == "The schema is nested too deeply."

    @pytest.mark.parametrize("dialect", ["http://json-schema.org/draft-04/schema#", "urn:unknown"])
    def test_the_dialect_of_a_schema_does_not_change_its_meaning(self, dialect: str) -> None:
        schema = {"$schema": dialect, "$id": "http://127.0.0.1/schema", "type": "integer", "exclusiveMinimum": 1}
        assert find_schema_fault(schema) is None
        assert check_value(schema, 2.0) is None
        assert check_value(schema, 1) == "$: 1 is less than or equal to the minimum of 1"

    def test_a_reference_or_a_pattern_is_never_followed(self) -> None:
        schema = {"items": {"$ref": "http://127.0.0.1:9/schema", "pattern": "(a+)+$"}}
        assert check_value(schema, ["a" * 100 + "!"]) is None

    def test_the_text_is_parsed_as_json_and_arguments_by_tool(self) -> None:
        city = {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
        checked = check_assertions(
            [
                Assertion(name="text", schema=city),
                Assertion(name="tool", schema=city, tool_name="look"),
                Assertion(name="other tool", schema={"not": {}}, tool_name="sing"),
            ],
            VALUES,
        )
        assert [result.passed for result in checked] == [True, False, True]
        assert checked[1].message == "Arguments of look, $.city: 'Oslo' was expected"

    def test_every_value_of_an_answer_can_be_named(self) -> None:
        assert set(VALUES) == NAMES


class TestReading:
    @pytest.mark.parametrize(
        "assertion",
        [
            Assertion(name="none"),
            Assertion(name="both", expression="True", schema={}),
            Assertion(name="tool", expression="True", tool_name="look"),
            Assertion(name="bad", expression="import os"),
            Assertion(name="bad", schema={"format": "email"}),
        ],
    )
    def test_what_cannot_be_checked_is_refused_with_its_position(self, assertion: Assertion) -> None:
        good = Assertion(name="good", expression="True")
        found = find_fault([good, assertion])
        assert found is not None
        assert found[0] == 1
        assert find_fault([good, good]) == (1, "Another assertion has this name.")
