"""What came over the network is parsed, checked and rendered in a confined process only, never in the server's own."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.block import TextBlock
from server.errors import TemplateInvalid, ValidationFailed
from server.jinja.environment import Sandbox
from server.jinja.limits import RenderLimits
from server.jinja.renderer import JinjaRenderer
from server.jinja.templates import load_templates
from server.transcript import build_transcript
from server.turn import UserTaskTurn
from tests.builders import A_TIME, definition
from tests.conftest import StrataServer
from tests.emulated import EmulatedProviders
from tests.http_talk import Talk, open_talk
from tests.turn_walk import begin_walk, tells

FREEZING = "{{ (7**6000000)|string }}"
"""Jinja calculates it while it compiles, and turning it into text takes seconds in the least."""
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
    """Sources that reach Jinja in this process from now on; none may."""
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
async def test_a_candidates_templates_render_in_a_worker_as_the_servers_own_do_here(
    server_renderer: JinjaRenderer, text: str
) -> None:
    candidate = server_renderer.with_templates(SOURCES)

    assert await render_all(candidate, text) == await render_all(server_renderer, text)


async def test_a_candidates_templates_never_reach_the_engine_of_this_process(
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
async def test_a_candidates_template_has_the_limits_of_an_instruction(name: str) -> None:
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


async def test_a_candidates_template_that_fails_later_says_how() -> None:
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


@pytest.fixture
async def admin(strata_server: StrataServer) -> AsyncIterator[Talk]:
    async with open_talk(strata_server, strata_server.admin_key) as talk:
        yield talk


async def test_nothing_that_comes_over_http_reaches_the_engine_of_the_server(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: Talk, closed_engine: list[str]
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, "gemini")
    await walk.task("How is Oslo?", tells("It is cold."))
    instructions = {"roles": "Be {{ tone }}.", "procedure": "{{ session.mode }}", "constraints": "{{ args.x }}"}
    assistant = {"name": "a", "provider": "gemini", "instructions": instructions}
    async with open_talk(strata_server) as client:
        made = await client.expect(201, "POST", "/v1/assistants", assistant)
        await client.expect(422, "POST", "/v1/assistants", {**assistant, "instructions": {"roles": "{{"}})
        await client.expect(200, "PUT", f"/v1/assistants/{made['id']}", {**assistant, "name": "b"})
    url = f"/admin/api/assistants/{made['id']}"
    assert (await admin.expect(200, "POST", f"{url}/check", {"instructions": instructions}))["is_valid"] is True
    rendered = await admin.expect(200, "POST", f"{url}/render", {"args": {"tone": "kind"}})
    assert "Be kind." in rendered["text"]
    draft: Mapping[str, Any] = {
        "name": "Nightly",
        "selection": {"conversation_ids": [walk.conversation_id]},
        "candidate": {"templates": SOURCES, "instructions": instructions},
    }
    await admin.expect(200, "POST", "/admin/api/replays", {**draft, "dry_run": True})
    frozen = {**draft, "candidate": {"templates": {"gemini_dynamic_prompt.j2": FREEZING}}}
    refused = await admin.expect(422, "POST", "/admin/api/replays", frozen)
    assert refused["errors"][0]["path"] == "candidate.templates.gemini_dynamic_prompt.j2"

    assert closed_engine == []
