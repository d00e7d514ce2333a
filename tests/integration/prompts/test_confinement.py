"""Templates from the network are parsed, checked and rendered in a confined process only, never in that of the
server.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import TextBlock, ToolCallBlock
from server.conversation.errors import TemplateInvalid, ValidationFailed
from server.conversation.turn import StopReason, UserTaskTurn
from server.conversation.usage import Usage
from server.payload.transcript import build_transcript
from server.prompts.assertions import ConfinedAssertions
from server.prompts.environment import Sandbox
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits, WorkerPool
from server.replay.rerun import assertion_evaluation
from server.replay.rerun.assertions import Subject
from server.replay.rerun.comparison import AnswerContent
from server.replay.rerun.replay import Assertion
from server.replay.rerun.result import AnswerFacts
from server.replay.rerun.source import list_turns
from tests.conftest import StrataServer
from tests.support.builders import A_TIME, definition
from tests.support.conversation_driver import start_driver, text_reply
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import ApiClient, open_api
from tests.support.replay_driver import arm_again

FREEZING = "{{ (7**6000000)|string }}"
"""Jinja evaluates it while it compiles, and converting it to text takes seconds at least."""
SOURCES = {
    "gemini_static_prompt.j2": "For {{ args.name }}: {{ roles }}",
    "anthropic_static_prompt.j2": "{{ roles }} {{ procedure }}{{ cached_history }}\n",
    "gemini_dynamic_prompt.j2": '{"now": {{ current_datetime | tojson }}, "name": {{ args.name | tojson }}}',
    "anthropic_dynamic_prompt.j2": "Not {{ args.name }}",
    "history_segment.j2": "{% for turn in turns %}{{ turn.speaker }} {{ turn.pieces[0].text | quoted }}{% endfor %}",
    "history_summary.j2": "Sum up {{ first_seq }} to {{ last_seq }}.",
}
PROVIDERS = ("gemini", "anthropic")


def arguments(name: str = "Kari") -> dict[str, Any]:
    return {
        "assistant": {"name": "helper", "id": "asst_1", "language": "en", "description": ""},
        "conversation": {"id": "conv_1"},
        "system": {"current_datetime": "2026-11-18T12:00:00Z"},
        "args": {"name": name},
    }


def make(directory: Path | None = None, **limits: Any) -> JinjaRenderer:
    return JinjaRenderer(load_templates(directory), RenderLimits(**limits))


@pytest.fixture(scope="module")
async def server_renderer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JinjaRenderer]:
    """One whose own templates are `SOURCES`."""
    directory = tmp_path_factory.mktemp("templates")
    for name, source in SOURCES.items():
        (directory / name).write_text(source, encoding="utf-8")
    renderer = make(directory)
    yield renderer
    await renderer.close()


@pytest.fixture
def closed_engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that reach Jinja in this process from now on; there must be none."""
    reached: list[str] = []

    def refuse(_: Sandbox, source: Any, *_more: Any, **_options: Any) -> None:
        reached.append(str(source))
        raise AssertionError("This is compiled in a worker only.")

    for name in ("parse", "compile", "from_string"):
        monkeypatch.setattr(Sandbox, name, refuse)
    return reached


async def render_all(renderer: JinjaRenderer, text: str) -> Sequence[Any]:
    """Every layer of both providers."""
    turns = [UserTaskTurn(seq=1, created_at=A_TIME, blocks=(TextBlock(text=text),))]
    rendered: list[Any] = []
    for provider in PROVIDERS:
        rendered.append(await renderer.render_static("acme", provider, definition(), arguments(text)))
        rendered.append(await renderer.render_dynamic("acme", provider, {"todos": [text]}, arguments(text)))
    rendered.append(await renderer.render_segment("acme", build_transcript(turns)))
    rendered.append(await renderer.render_summary_request("acme", 1, 9, 500))
    return rendered


@given(text=st.text(max_size=20))
async def test_templates_of_a_candidate_render_in_a_worker_as_those_of_the_server_do_here(
    server_renderer: JinjaRenderer, text: str
) -> None:
    candidate = server_renderer.with_templates(SOURCES)

    assert await render_all(candidate, text) == await render_all(server_renderer, text)


async def test_templates_of_a_candidate_never_reach_the_engine_of_this_process(
    server_renderer: JinjaRenderer, closed_engine: list[str]
) -> None:
    candidate = server_renderer.with_templates(SOURCES)
    await candidate.check_templates("acme")
    await render_all(candidate, "Kari")
    await candidate.check_instructions("acme", definition())
    for name in SOURCES:
        with pytest.raises(ValidationFailed):
            await server_renderer.with_templates({name: "{{"}).check_templates("acme")

    assert closed_engine == []


@pytest.mark.parametrize("name", SOURCES)
async def test_a_template_of_a_candidate_has_the_limits_of_an_instruction(name: str) -> None:
    renderer = make(seconds=0.5)
    try:
        candidate = renderer.with_templates({name: FREEZING})
        with pytest.raises(ValidationFailed, match=r"longer than 0\.5 seconds") as caught:
            await candidate.check_templates("acme")
        assert caught.value.details["errors"] == [
            {"path": f"candidate.templates.{name}", "source": "body", "message": str(caught.value.message)[21:]}
        ]
        await renderer.with_templates({name: SOURCES[name]}).check_templates("acme")
    finally:
        await renderer.close()


async def test_a_template_of_a_candidate_that_fails_later_reports_its_error() -> None:
    renderer = make(seconds=0.5)
    try:
        loops = "{% for a in range(10 ** 5) %}{% for b in range(10 ** 5) %}{% endfor %}{% endfor %}"
        candidate = renderer.with_templates(dict.fromkeys(SOURCES, loops))
        static = await candidate.render_static("acme", "gemini", definition(), arguments())
        dynamic = await candidate.render_dynamic("acme", "gemini", {}, arguments())
        with pytest.raises(TemplateInvalid, match=r"history_segment\.j2: .* longer than"):
            await candidate.render_segment("acme", [])
        with pytest.raises(TemplateInvalid, match=r"history_summary\.j2: .* longer than"):
            await candidate.render_summary_request("acme", 1, 2, 3)
    finally:
        await renderer.close()

    assert (static.text, dynamic.text) == (loops, loops)
    assert [(failure.template, failure.kind) for failure in (*static.failures, *dynamic.failures)] == [
        ("gemini_static_prompt.j2", "too_long"),
        ("gemini_dynamic_prompt.j2", "too_long"),
    ]


# --- assertions


def doubled(times: int, first: str = "text", name: str = "a") -> tuple[str, str]:
    """Loops that build a list of two lists of two lists and so on, and the name of the outermost."""
    loops = "".join(f" for {name}{n} in [[{name}{n - 1}, {name}{n - 1}]]" for n in range(1, times + 1))
    return f" for {name}0 in [{first}]{loops}", f"{name}{times}"


def slow_expression() -> str:
    """Two equal structures of a few dozen lists each, which are compared member by member."""
    one, left = doubled(40, "text", "a")
    other, right = doubled(40, "text + ''", "b")
    return f"any([{left} == {right}{one}{other}])"


def large_expression() -> str:
    """A text of 2^40 characters."""
    loops, last = doubled(40)
    return f"[len(str({last})){loops}] == []"


def growing_expression() -> str:
    """Nineteen doublings of a text: each is short enough, and all of them are kept."""
    return "[t + t" + "".join(f" for x{n} in [0, 1]" for n in range(19)) + " for t in [text]] == []"


SAID = Subject(
    candidate=AnswerContent(
        blocks=(TextBlock(text="It is warm. " * 40), ToolCallBlock(id="1", name="look", arguments={"city": "Rome"})),
        stop_reason=StopReason.TOOL_USE,
    ),
    recorded=None,
    similarity=None,
    facts=AnswerFacts(usage=Usage(fresh_input_tokens=10, output_tokens=3)),
)


def asserting(*expressions: str) -> list[Assertion]:
    return [Assertion(name=f"a{n}", expression=expression) for n, expression in enumerate(expressions)]


@pytest.fixture(scope="module")
async def checker() -> AsyncIterator[ConfinedAssertions]:
    pool = WorkerPool(RenderLimits(seconds=0.5, memory_bytes=128 * 1024 * 1024))
    yield ConfinedAssertions(pool)
    await pool.close()


@pytest.mark.parametrize(
    ("expression", "codes"),
    [
        (slow_expression(), {"evaluation_timed_out"}),
        (large_expression(), {"evaluation_too_large", "evaluation_timed_out"}),
        (growing_expression(), {"evaluation_too_large", "evaluation_timed_out", "evaluation_failed"}),
        ("sum([[1] for x in text.split()])", {"evaluation_failed"}),
        ("[0 for a in text for b in text for c in text] == []", {"evaluation_failed"}),
    ],
    ids=["slow", "large", "growing", "wrong", "many steps"],
)
async def test_an_assertion_above_its_limits_is_reported_and_fails_no_other(
    checker: ConfinedAssertions, expression: str, codes: set[str]
) -> None:
    assertions = asserting("'warm' in text", expression, "'cold' in text")
    await checker.read("acme", assertions)

    first, second, third = await checker.check("acme", assertions, SAID)

    assert (first.passed, first.error_code) == (True, None)
    assert (third.passed, third.message, third.error_code) == (False, "The expression is false.", None)
    assert not second.passed
    assert second.error_code in codes
    assert 0 < len(second.message) <= 500


async def test_after_three_assertions_above_their_limits_the_others_are_not_evaluated(
    checker: ConfinedAssertions,
) -> None:
    results = await checker.check("acme", asserting("True", *[slow_expression()] * 4, "True"), SAID)

    assert [result.error_code for result in results] == [
        None,
        *["evaluation_timed_out"] * 3,
        *["not_evaluated"] * 2,
    ]


async def test_an_assertion_that_cannot_be_checked_is_refused_with_its_field(checker: ConfinedAssertions) -> None:
    for wrong in (Assertion(name="b", expression="import os"), Assertion(name="b", schema={"pattern": "(a+)+$"})):
        with pytest.raises(ValidationFailed, match=r"^assertions\.1: ") as caught:
            await checker.read("acme", [*asserting("True"), wrong])
        assert caught.value.details["errors"][0]["path"] == "assertions.1"  # type: ignore[index]  # reason: details are objects


async def test_a_schema_is_checked_in_the_worker(checker: ConfinedAssertions) -> None:
    schema = {"type": "object", "properties": {"city": {"const": "Oslo"}}}
    results = await checker.check(
        "acme", [Assertion(name="text", schema=schema), Assertion(name="tool", schema=schema, tool_name="look")], SAID
    )

    assert [(result.passed, result.message) for result in results] == [
        (False, "The text is not JSON."),
        (False, "Arguments of look, $.city: 'Oslo' was expected"),
    ]


async def test_no_assertion_holds_for_a_missing_answer(checker: ConfinedAssertions) -> None:
    lost = replace(SAID, facts=AnswerFacts(error_code="provider_disconnected"))
    (result,) = await checker.check("acme", asserting("True"), lost)

    assert (result.passed, result.message) == (False, "There is no answer: provider_disconnected.")


# --- the server


@pytest.fixture
def closed_evaluator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is evaluated in this process from now on; there must be nothing."""
    reached: list[str] = []

    def refuse(*given: Any, **_: Any) -> None:
        reached.append(str(given))
        raise AssertionError("This is evaluated in a worker only.")

    for name in ("read_expression", "evaluate", "check_value", "find_schema_fault"):
        monkeypatch.setattr(assertion_evaluation, name, refuse)
    return reached


async def test_a_replay_with_hostile_assertions_ends(
    strata_server: StrataServer, emulated: EmulatedProviders, closed_evaluator: list[str]
) -> None:
    program, tenant_id = strata_server.program, strata_server.tenant.id
    driver = await start_driver(program, tenant_id, emulated, "gemini")
    await driver.task("How is Oslo?", text_reply("It is warm."))
    turns = await list_turns(program.store, tenant_id, driver.conversation_id)
    arm_again(emulated, turns)
    draft = {
        "name": "Nightly",
        "selection": {"conversation_ids": [driver.conversation_id]},
        "assertions": [
            {"name": "warm", "expression": "'warm' in text"},
            {"name": "slow", "expression": slow_expression()},
            {"name": "json", "schema": {"type": "object"}},
        ],
    }
    async with open_api(strata_server, strata_server.admin_key) as admin:
        made = await admin.expect(201, "POST", "/admin/api/replays", draft)
        await program.replays.items.run_all(made["id"])
        done = await admin.expect(200, "GET", f"/admin/api/replays/{made['id']}")
        (result,) = (await admin.expect(200, "GET", f"/admin/api/replays/{made['id']}/results"))["data"]

    assert (done["state"], done["items"]["done"]) == ("done", 1)
    assert [(one["name"], one["passed"], one["error_code"]) for one in result["assertions"]] == [
        ("warm", True, None),
        ("slow", False, "evaluation_timed_out"),
        ("json", False, None),
    ]
    assert result["assertions"][1]["message"] == "It took more than 2 seconds of processor time."
    assert closed_evaluator == []


@pytest.fixture
async def admin(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server, strata_server.admin_key) as api:
        yield api


async def test_nothing_from_the_network_reaches_the_engine_of_the_server(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient, closed_engine: list[str]
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, "gemini")
    await driver.task("How is Oslo?", text_reply("It is cold."))
    instructions = {"roles": "Be {{ tone }}.", "procedure": "{{ session.mode }}", "constraints": "{{ args.x }}"}
    assistant = {"name": "a", "provider": "gemini", "instructions": instructions}
    async with open_api(strata_server) as client:
        made = await client.expect(201, "POST", "/v1/assistants", assistant)
        await client.expect(422, "POST", "/v1/assistants", {**assistant, "instructions": {"roles": "{{"}})
        await client.expect(200, "PUT", f"/v1/assistants/{made['id']}", {**assistant, "name": "b"})
    url = f"/admin/api/assistants/{made['id']}"
    assert (await admin.expect(200, "POST", f"{url}/check", {"instructions": instructions}))["is_valid"] is True
    rendered = await admin.expect(200, "POST", f"{url}/render", {"args": {"tone": "kind"}})
    assert "Be kind." in rendered["text"]
    draft: Mapping[str, Any] = {
        "name": "Nightly",
        "selection": {"conversation_ids": [driver.conversation_id]},
        "candidate": {"templates": SOURCES, "instructions": instructions},
    }
    await admin.expect(200, "POST", "/admin/api/replays", {**draft, "dry_run": True})
    frozen = {**draft, "candidate": {"templates": {"gemini_dynamic_prompt.j2": FREEZING}}}
    refused = await admin.expect(422, "POST", "/admin/api/replays", frozen)
    assert refused["errors"][0]["path"] == "candidate.templates.gemini_dynamic_prompt.j2"

    assert closed_engine == []
