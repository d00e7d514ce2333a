"""Both folds give the same events and the same answer for any split of the bytes, and never fail on unexpected
input.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.errors import ProviderFailed
from server.conversation.event import ProviderEvent, UsageReported
from server.providers.anthropic.stream import AnthropicFold
from server.providers.anthropic.stream import fold_body as fold_anthropic
from server.providers.gemini.stream import GeminiFold
from server.providers.gemini.stream import fold_body as fold_gemini
from server.providers.provider import Fold, ProviderAnswer
from tests.recordings.catalogue import RECORDINGS, Recorded
from tests.support.strategies import json_values
from tests.unit.providers.wire.generated import anthropic_bodies, gemini_bodies
from tests.unit.providers.wire.splitting import split

FOLDS: dict[str, tuple[Callable[[], Fold], Callable[[bytes], ProviderAnswer]]] = {
    "gemini": (GeminiFold, fold_gemini),
    "anthropic": (AnthropicFold, fold_anthropic),
}
BODIES = {"gemini": gemini_bodies, "anthropic": anthropic_bodies}


def run(fold: Fold, pieces: list[bytes]) -> tuple[list[ProviderEvent], ProviderAnswer, type[ProviderFailed] | None]:
    events: list[ProviderEvent] = []
    try:
        for piece in pieces:
            events.extend(fold.feed(piece))
        fold.finish()
    except ProviderFailed as failure:
        return events, fold.answer, type(failure)
    return events, fold.answer, None


def test_every_recording_is_in_the_catalogue() -> None:
    folder = Path(__file__).parents[3] / "recordings"
    assert {f"{path.parent.name}-{path.stem}" for path in folder.rglob("*.sse")} == {str(one) for one in RECORDINGS}


@pytest.mark.parametrize("recorded", RECORDINGS, ids=str)
def test_a_recording_ends_as_the_catalogue_states(recorded: Recorded) -> None:
    build, fold_body = FOLDS[recorded.vendor]
    events, answer, failure = run(build(), [recorded.body])
    assert failure is recorded.failure
    if recorded.failure is None:
        assert answer.stop_reason is recorded.stop_reason
    assert fold_body(recorded.body) == answer
    reported = [event.usage for event in events if isinstance(event, UsageReported)]
    if reported or recorded.failure is None:
        assert (reported[-1] if reported else ProviderAnswer().usage) == answer.usage


@pytest.mark.parametrize("recorded", RECORDINGS, ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_any_split_of_a_recording_gives_the_same_answer(recorded: Recorded, data: st.DataObject) -> None:
    build, _ = FOLDS[recorded.vendor]
    assert run(build(), data.draw(split(recorded.body))) == run(build(), [recorded.body])


@pytest.mark.parametrize("recorded", RECORDINGS, ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_every_beginning_of_a_recording_gives_an_answer(recorded: Recorded, data: st.DataObject) -> None:
    _, fold_body = FOLDS[recorded.vendor]
    answer = fold_body(recorded.body[: data.draw(st.integers(0, len(recorded.body)))])
    if answer.native is not None:
        json.loads(answer.native.data)


@pytest.mark.parametrize("vendor", FOLDS)
@given(data=st.data())
def test_any_split_of_any_stream_gives_the_same_answer(vendor: str, data: st.DataObject) -> None:
    build, fold_body = FOLDS[vendor]
    body = data.draw(BODIES[vendor])
    whole = run(build(), [body])
    assert run(build(), data.draw(split(body))) == whole
    assert fold_body(body) == whole[1]


@pytest.mark.parametrize("vendor", FOLDS)
@settings(max_examples=150)
@given(data=st.data())
def test_no_json_breaks_a_fold(vendor: str, data: st.DataObject) -> None:
    build, _ = FOLDS[vendor]
    documents = data.draw(st.lists(mutated(vendor), max_size=4))
    body = b"".join(b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents)
    run(build(), [body])


def mutated(vendor: str) -> st.SearchStrategy[Any]:
    """An event of a recording with one value replaced."""
    frames = [
        json.loads(line.removeprefix(b"data: "))
        for one in RECORDINGS
        if one.vendor == vendor and one.failure is None
        for line in one.body.splitlines()
        if line.startswith(b"data: ")
    ]
    return st.sampled_from(frames).flatmap(
        lambda frame: st.sampled_from(list(places(frame))).flatmap(
            lambda place: st.builds(lambda value: put(frame, place, value), json_values)
        )
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: put(value[path[0]], path[1:], new)}
    return [*value[: path[0]], put(value[path[0]], path[1:], new), *value[path[0] + 1 :]]
