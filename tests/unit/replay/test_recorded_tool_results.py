from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.exact_json import loads_exact
from server.conversation.turn import ModelResponseTurn, StopReason, ToolResponseTurn, Turn, TurnState, UserTaskTurn
from server.conversation.usage import Usage
from server.replay.rerun.recorded_tool_results import NO_RESULT, canonical_arguments, collect_results, serve_results
from server.replay.rerun.replay import OnMissingResult

NOW = datetime(2026, 1, 1, tzinfo=UTC)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def call(name: str, number: int = 1, **arguments: Any) -> ToolCallBlock:
    return ToolCallBlock(id=f"{name}{number}", name=name, arguments=arguments)


def exchange(seq: int, *pairs: tuple[ToolCallBlock, Any]) -> list[Turn]:
    """A task, all calls at once, and their results."""
    calls = tuple(block for block, _ in pairs)
    results = tuple(ToolResultBlock(tool_call_id=block.id, output=output) for block, output in pairs)
    return [
        UserTaskTurn(seq=seq, created_at=NOW, blocks=(TextBlock(text="Hi"),)),
        answer(seq + 1, *calls),
        ToolResponseTurn(seq=seq + 2, created_at=NOW, blocks=results),
        answer(seq + 3),
    ]


def answer(seq: int, *calls: ToolCallBlock) -> ModelResponseTurn:
    return ModelResponseTurn(
        seq=seq,
        created_at=NOW,
        blocks=calls or (TextBlock(text="Done."),),
        state=TurnState.COMPLETE,
        stop_reason=StopReason.TOOL_USE if calls else StopReason.END_TURN,
        error_code=None,
        provider="gemini",
        model="gemini-3.1-pro-preview",
        usage=Usage(),
        cost_usd=Decimal(0),
        attempt=1,
        revision=None,
    )


RECORDED = collect_results(
    [
        *exchange(1, (call("look", 1, city="Oslo"), 1), (call("look", 2, city="Oslo"), 2), (call("ring", 3), 3)),
        *exchange(5, (call("look", 4, city="Oslo"), 4), (call("look", 5, city="Rome", days=[1, 2]), 5)),
    ]
)


def serve(
    *calls: ToolCallBlock, exchange: int = 0, on_missing: OnMissingResult = OnMissingResult.STOP
) -> tuple[list[Any], tuple[str, ...]]:
    served = serve_results(RECORDED, calls, used=frozenset(), exchange=exchange, on_missing=on_missing)
    assert [block.tool_call_id for block in served.blocks] in ([], [block.id for block in calls])
    return [block.output for block in served.blocks], served.missing_ids


class TestCanonicalArguments:
    @given(value=values)
    def test_neither_the_order_of_keys_nor_the_spelling_of_numbers_matters(self, value: Any) -> None:
        def turned(inner: Any) -> Any:
            match inner:
                case bool():
                    return inner
                case int():
                    return float(inner)
                case Mapping():
                    return {key: turned(inner[key]) for key in reversed(list(inner))}
                case list():
                    return [turned(one) for one in inner]
                case _:
                    return inner

        assert canonical_arguments(turned(value)) == canonical_arguments(value)

    @given(one=values, other=values)
    def test_what_differs_stays_different(self, one: Any, other: Any) -> None:
        assert (canonical_arguments(one) == canonical_arguments(other)) is (_typed(one) == _typed(other))

    def test_numbers_kept_as_text_count_as_numbers(self) -> None:
        assert canonical_arguments(loads_exact('{"a": 1.0, "b": [2]}')) == canonical_arguments({"b": [2.0], "a": 1})
        assert canonical_arguments({"a": "1"}) != canonical_arguments({"a": 1})
        # Python parses no longer numbers.
        assert canonical_arguments(loads_exact("9" * 5000)) != canonical_arguments(loads_exact("9" * 5001))


def _typed(value: Any) -> Any:
    """Equality of JSON: true is not 1."""
    match value:
        case bool():
            return ("bool", value)
        case Mapping():
            return {key: _typed(inner) for key, inner in value.items()}
        case list():
            return [_typed(inner) for inner in value]
        case _:
            return value


class TestServing:
    def test_equal_calls_get_their_results_in_order_and_then_the_last_again(self) -> None:
        calls = [call("look", number, city="Oslo") for number in range(5)]
        assert serve(*calls) == ([1, 2, 4, 2, 2], ())

    def test_the_same_exchange_is_preferred(self) -> None:
        assert serve(call("look", 1, city="Oslo"), exchange=1)[0] == [4]
        assert serve(call("ring"), exchange=1)[0] == [3]

    def test_served_results_are_tracked_by_position(self) -> None:
        first = serve_results(
            RECORDED, [call("look", city="Oslo")], used=frozenset(), exchange=0, on_missing=OnMissingResult.STOP
        )
        second = serve_results(
            RECORDED, [call("look", city="Oslo")], used=first.used, exchange=0, on_missing=OnMissingResult.STOP
        )
        assert [block.output for block in (*first.blocks, *second.blocks)] == [1, 2]

    @pytest.mark.parametrize(
        ("policy", "outputs"),
        [
            (OnMissingResult.STOP, []),
            (OnMissingResult.NEAREST, [3, 5]),
            (OnMissingResult.SYNTHETIC_ERROR, [3, NO_RESULT]),
        ],
    )
    def test_a_call_that_was_never_made_has_no_result(self, policy: OnMissingResult, outputs: list[Any]) -> None:
        calls = [call("ring"), call("look", 2, city="Rome", days=[1, 3])]
        assert serve(*calls, on_missing=policy) == (outputs, ("look2",))

    def test_a_tool_that_was_never_called_has_no_similar_result(self) -> None:
        assert serve(call("sing"), on_missing=OnMissingResult.NEAREST) == ([], ("sing1",))
