import pytest

from server.conversation.assistant import Instructions
from server.conversation.errors import ValidationFailed
from server.conversation.payload import LayerOrder
from server.replay.rerun.candidate import build_definition, keeps_dynamic, keeps_static
from server.replay.rerun.replay import Candidate
from tests.support.builders import definition

GEMINI = definition(provider="gemini", model="gemini-3.1-pro-preview", settings={"thinking": "low", "temperature": 1})


def test_an_empty_candidate_changes_nothing() -> None:
    assert build_definition(GEMINI, Candidate()) == GEMINI


def test_the_candidate_overrides_what_was_recorded() -> None:
    candidate = Candidate(
        provider="anthropic",
        model="claude-opus-5-5",
        settings={"temperature": None, "max_output_tokens": 9},
        instructions=Instructions(roles="Be brief."),
        compaction={"policy": "threshold"},
        layer_order=LayerOrder.APPEND_ONLY,
    )
    built = build_definition(GEMINI, candidate)
    assert (built.provider, built.model, built.tools) == ("anthropic", "claude-opus-5-5", GEMINI.tools)
    assert built.instructions == Instructions(roles="Be brief.")
    assert dict(built.settings) == {
        "thinking": "low",
        "max_output_tokens": 9,
        "layer_order": "append_only",
        "compaction": {"policy": "threshold"},
    }


@pytest.mark.parametrize(
    ("candidate", "path"),
    [
        (Candidate(provider="anthropic"), "candidate.model"),
        (Candidate(provider="nobody", model="x"), "candidate.provider"),
        (Candidate(model="claude-opus-5-5"), "candidate.model"),
        (Candidate(provider="anthropic", model="claude-opus-5-5"), "candidate.settings.temperature"),
        (Candidate(settings={"thinking": "loud"}), "candidate.settings.thinking"),
        (Candidate(settings={"volume": 3}), "candidate.settings.volume"),
    ],
)
def test_a_setting_that_the_model_does_not_support_is_refused_with_its_field(candidate: Candidate, path: str) -> None:
    with pytest.raises(ValidationFailed) as caught:
        build_definition(GEMINI, candidate)
    assert caught.value.details["errors"][0]["path"] == path  # type: ignore[index]  # reason: details are objects


def test_layers_stay_as_recorded_if_nothing_they_depend_on_changes() -> None:
    assert keeps_static(Candidate(model="gemini-3.8-flash", settings={"thinking": "high"}), "gemini")
    assert not keeps_static(Candidate(provider="anthropic", model="m"), "gemini")
    assert not keeps_static(Candidate(templates={"gemini_static_prompt.j2": "x"}), "gemini")
    assert not keeps_static(Candidate(assistant_version=2), "gemini")
    assert keeps_dynamic(Candidate(provider="anthropic", model="m"), "anthropic")
    assert not keeps_dynamic(Candidate(templates={"anthropic_dynamic_prompt.j2": "{}"}), "anthropic")
