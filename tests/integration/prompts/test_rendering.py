"""Instructions are rendered in a separate process, and nothing that they do reaches the server."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions
from server.conversation.errors import Internal, TemplateInvalid
from server.payload.arguments import build_static_arguments
from server.payload.renderer import RenderedStatic
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from tests.support.builders import A_TIME, NASTY, build_conversation, definition
from tests.support.strata_process import PROJECT, environment, wait_until
from tests.support.strategies import any_text, json_objects

LIMITS: dict[str, Any] = {"seconds": 1.0, "memory_bytes": 128 * 1024 * 1024}
"""Enough time on any machine, and so little memory that it is used up before the time."""
BARE = "{{ roles }}{{ cached_history }}"
TENANT = "acme"
ENDLESS = "{% for a in range(10 ** 5) %}{% for b in range(10 ** 5) %}{% endfor %}{% endfor %}"


def instructed(roles: str = "", procedure: str = "", constraints: str = "") -> AssistantDefinition:
    return definition(instructions=Instructions(roles=roles, procedure=procedure, constraints=constraints))


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "assistant": {"name": "helper", "id": "asst_1", "language": "en", "description": ""},
        "conversation": {"id": "conv_1"},
        "args": {"name": "Kari"},
        "name": "Kari",
        **changes,
    }


def make(directory: Path, **limits: Any) -> JinjaRenderer:
    """Its static layer has only the roles."""
    (directory / "gemini_static_prompt.j2").write_text(BARE, encoding="utf-8")
    return JinjaRenderer(load_templates(directory), RenderLimits(**LIMITS | limits))


@pytest.fixture(scope="module")
async def renderer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JinjaRenderer]:
    renderer = make(tmp_path_factory.mktemp("templates"))
    yield renderer
    await renderer.close()


async def render(renderer: JinjaRenderer, roles: str, **changes: Any) -> RenderedStatic:
    return await renderer.render_static(TENANT, "gemini", instructed(roles), arguments(**changes))


def pid_of(renderer: JinjaRenderer) -> int | None:
    """The pid of the rendering process, if there is one."""
    assert len(renderer.pool.pids) <= 1
    return next(iter(renderer.pool.pids), None)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


async def test_an_instruction_is_rendered_with_the_arguments(renderer: JinjaRenderer) -> None:
    rendered = await render(renderer, "You are {{ assistant.name }} for {{ name }} and {{ args.name }}.{{ nobody }}\n")

    assert rendered.text == "You are helper for Kari and Kari.\n"
    assert rendered.failures == ()


@pytest.mark.parametrize(("mode", "text"), [("voice", "Mode: voice."), (None, "Mode: ."), ("", "Mode: .")])
async def test_the_mode_of_a_conversation_that_has_none_is_an_empty_text(
    renderer: JinjaRenderer, mode: str | None, text: str
) -> None:
    assistant = Assistant(id="asst_1", version=1, created_at=A_TIME, definition=instructed("Mode: {{ session.mode }}."))
    values = build_static_arguments(assistant=assistant, conversation=build_conversation(mode=mode))
    rendered = await renderer.render_static(TENANT, "gemini", assistant.definition, values)

    assert (rendered.text, rendered.failures) == (text, ())


async def test_each_instruction_fails_separately() -> None:
    renderer = JinjaRenderer(load_templates(None), RenderLimits())
    try:
        rendered = await renderer.render_static(
            TENANT, "anthropic", instructed("{{ name", "Greet {{ name }}.", "\n{{ name.nobody.at_all }}"), arguments()
        )
    finally:
        await renderer.close()

    assert "<role>\n{{ name\n</role>" in rendered.text
    assert "<procedure>\nGreet Kari.\n</procedure>" in rendered.text
    assert "{{ name.nobody.at_all }}" in rendered.text
    assert [(failure.template, failure.kind, failure.line) for failure in rendered.failures] == [
        ("roles", "parse", 1),
        ("constraints", "render", 2),
    ]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("parse", "{{"),
        ("parse", "{% if %}"),
        ("parse", "{{ name | nope }}"),
        ("parse", "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"),
        ("parse", "{{ " + "[" * 200 + "]" * 200 + " }}"),
        ("parse", "{% if true %}" * 2_000 + "{% endif %}" * 2_000),
        ("parse", "{% for x in [1] %}" * 40 + "{% endfor %}" * 40),
        ("parse", "{{ 1" + " + 1" * 5_000 + " }}"),
        ("parse", "{{ " + "9" * 5_000 + " }}"),
        ("render", "{{ 1 // 0 }}"),
        ("render", "{{ nobody.name }}"),
        ("render", "{{ ''.__class__.__mro__ }}"),
        ("render", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        ("render", "{{ cycler.__init__.__globals__.os.environ }}"),
        ("render", "{{ self._TemplateReference__context }}"),
        ("render", "{{ args.__class__ }}"),
        ("render", "{{ args | attr('__init__') }}"),
        ("render", "{{ '{0.__class__.__init__.__globals__}'.format(args) }}"),
        ("render", "{{ '{a.__class__}'.format_map({'a': 1}) }}"),
        ("render", "{{ args.update(name='Ola') }}"),
        ("render", "{% include '/etc/passwd' %}"),
        ("render", "{% import 'os' as os %}"),
        ("render", "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
        ("too_large", "{% for x in range(10 ** 9) %}{% endfor %}"),
        ("too_large", "{{ 'x' * 10 ** 10 }}"),
        ("too_large", "{{ 'x' * 10 ** 30 }}"),
        ("too_large", "{{ [0] * 10 ** 9 }}"),
        ("too_large", "{{ 'x'.ljust(10 ** 10) }}"),
        ("too_large", "{{ 'x' | center(10 ** 10) }}"),
        ("too_large", "{{ '%10000000000d' % 1 }}"),
        ("too_large", "{{ '{:10000000000}'.format(1) }}"),
        (
            "too_large",
            "{% set n = namespace(s='x' * 99) %}{% for _ in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        ),
        ("too_large", "{% for _ in range(10 ** 5) %}" + "x" * 100 + "{% endfor %}"),
        ("too_long", ENDLESS),
        ("too_long", "{% for a in range(10 ** 5) %}{% for b in range(10 ** 5) %}{{ '' }}{% endfor %}{% endfor %}"),
        ("too_long", "{{ 3 ** (10 ** 8) }}"),
    ],
    ids=lambda value: value[:60],
)
async def test_a_hostile_instruction_is_returned_as_source_and_does_no_harm(
    renderer: JinjaRenderer, kind: str, source: str
) -> None:
    rendered = await render(renderer, source)

    assert rendered.text == source
    (failure,) = rendered.failures
    assert (failure.template, failure.kind) == ("roles", kind)
    assert 0 < len(failure.message) <= 300
    assert (await render(renderer, "{{ name }}")).text == "Kari"


async def test_a_text_may_be_as_long_as_the_limit(tmp_path: Path) -> None:
    renderer = make(tmp_path, output_chars=1000)
    try:
        fits = await render(renderer, "{{ '\x00' * 1000 }}")
        does_not = await render(renderer, "{{ '\x00' * 1001 }}")
    finally:
        await renderer.close()

    assert (fits.text, fits.failures) == ("\x00" * 1000, ())
    assert does_not.failures[0].kind == "too_large"


@given(text=any_text | st.just(NASTY) | st.just("{{ 7 * 7 }}"), args=json_objects)
async def test_what_a_user_types_is_a_value(renderer: JinjaRenderer, text: str, args: Mapping[str, Any]) -> None:
    rendered = await render(renderer, "{{ args.text }}", args={**args, "text": text})

    assert rendered.text == text
    assert rendered.failures == ()


@given(text=any_text.map(lambda text: text.replace("{", "")))
async def test_an_instruction_may_be_of_any_characters(renderer: JinjaRenderer, text: str) -> None:
    rendered = await render(renderer, text + "{{ name }}" + text)

    # Jinja normalises every line ending to one newline.
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    assert rendered.text == plain + "Kari" + plain


# --- the process


async def test_the_process_has_none_of_the_secrets_of_the_server(
    renderer: JinjaRenderer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    renderer = make(tmp_path)
    try:
        await render(renderer, "{{ name }}")
        known = psutil.Process(pid_of(renderer)).environ()
    finally:
        await renderer.close()

    assert "sk-secret" not in known.values()
    assert known.keys() <= {"PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LC_CTYPE"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the limits of another process")
async def test_the_process_is_confined(renderer: JinjaRenderer) -> None:
    await render(renderer, "{{ name }}")
    process = psutil.Process(pid_of(renderer))

    assert process.rlimit(psutil.RLIMIT_AS) == (LIMITS["memory_bytes"], LIMITS["memory_bytes"])
    assert process.rlimit(psutil.RLIMIT_NOFILE)[1] <= 32
    assert process.rlimit(psutil.RLIMIT_NPROC) == (0, 0)
    assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert process.nice() > psutil.Process().nice() or psutil.Process().nice() == 19
    assert os.getsid(process.pid) != os.getsid(0), "a Ctrl-C for the server is none for it"


async def test_one_process_is_started_when_it_is_needed_and_kept(tmp_path: Path) -> None:
    before = children()
    renderer = make(tmp_path)
    assert pid_of(renderer) is None

    for _ in range(20):
        await render(renderer, "{{ name }}")
    started = children() - before

    assert started == {pid_of(renderer)}
    await renderer.close()
    assert children() <= before


@pytest.mark.parametrize("source", [ENDLESS, "{{ 'x' * 10 ** 10 }}"], ids=["too long", "too large"])
async def test_a_process_above_its_limits_is_replaced(source: str, tmp_path: Path) -> None:
    before = children()
    renderer = make(tmp_path)
    await render(renderer, "{{ name }}")
    first = pid_of(renderer)

    await render(renderer, source)
    assert children() <= before

    assert (await render(renderer, "{{ name }}")).text == "Kari"
    assert pid_of(renderer) != first
    await renderer.close()
    assert children() <= before


async def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    before = children()
    renderer = make(tmp_path)
    await render(renderer, "{{ name }}")

    psutil.Process(pid_of(renderer)).kill()

    assert (await render(renderer, "{{ name }}")).failures == ()
    await renderer.close()
    assert children() <= before


async def test_a_task_whose_process_is_killed_is_repeated(tmp_path: Path) -> None:
    renderer = make(tmp_path, seconds=60)
    await render(renderer, "{{ name }}")
    first = pid_of(renderer)
    assert first is not None
    busy_until = cpu_seconds(first) + 0.1

    working = asyncio.create_task(
        render(renderer, "{% for a in range(10 ** 5) %}{% for b in range(30) %}{% endfor %}{% endfor %}done")
    )
    await until_busy(first, busy_until)
    psutil.Process(first).kill()

    assert (await working).text == "done"
    assert pid_of(renderer) != first
    await renderer.close()


async def test_a_cancelled_task_leaves_no_answer_behind(tmp_path: Path) -> None:
    before = children()
    renderer = make(tmp_path, seconds=10)
    await render(renderer, "{{ name }}")
    first = pid_of(renderer)
    assert first is not None

    working = asyncio.create_task(render(renderer, ENDLESS))
    await until_busy(first, cpu_seconds(first) + 0.05)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working

    assert (await render(renderer, "{{ name }}")).text == "Kari"
    await renderer.close()
    assert children() <= before


async def test_a_process_that_cannot_be_started_is_not_an_error_of_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = make(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(Internal):
        await render(renderer, "{{ name }}")

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Internal):
        await render(renderer, "{{ name }}")

    monkeypatch.undo()
    assert (await render(renderer, "{{ name }}")).text == "Kari"
    await renderer.close()


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def until_busy(pid: int, seconds: float) -> None:
    """Wait until the process has used this much processor time."""
    await asyncio.to_thread(wait_until, lambda: cpu_seconds(pid) >= seconds, "the worker to be at work")


SERVER = """
    import asyncio, os, sys
    import uvloop
    from server.conversation.assistant import AssistantDefinition, Instructions
    from server.prompts.worker_pool import RenderLimits
    from server.prompts.renderer import JinjaRenderer
    from server.prompts.templates import load_templates

    _, endless, end = sys.argv
    renderer = JinjaRenderer(load_templates(None), RenderLimits(seconds=2))

    async def render(roles, tenant="acme"):
        assistant = AssistantDefinition(name="a", provider="gemini", model="m", instructions=Instructions(roles=roles))
        rendered = await renderer.render_static(tenant, "gemini", assistant, {"assistant": {}, "args": {"x": "found"}})
        return rendered.failures[0].kind if rendered.failures else "found" in rendered.text

    async def main():
        for roles in ("{{ args.x }}", endless, "{{ args.x }}"):
            print(await render(roles))
        await asyncio.gather(*(render("{{ args.x }}", f"tenant {n}") for n in range(9)))
        print(*renderer.pool.pids, flush=True)
        if end == "close":
            await renderer.close()
            return
        if end == "killed at work":
            working = [asyncio.create_task(render(endless, f"tenant {n}")) for n in range(9)]
            while renderer.pool.busy_count < 3:
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), 9)

    uvloop.run(main())
"""


@pytest.mark.parametrize("end", ["close", "killed", "killed at work"])
def test_no_process_is_left_after_any_end_of_the_server(end: str) -> None:
    """On uvloop, as the server runs."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SERVER), ENDLESS, end],
        cwd=PROJECT,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.stderr == ""
    output, pids = ran.stdout.split()[:3], ran.stdout.split()[3:]
    assert output == ["True", "too_long", "True"]
    assert len(pids) == 3
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids), "the workers to end")


# --- checking


@pytest.mark.parametrize(
    ("texts", "template", "line"),
    [
        ({"roles": "{{"}, "roles", 1),
        ({"roles": "fine {{ name }}", "procedure": "\n{% if %}"}, "procedure", 2),
        ({"constraints": "{{ name | nope }}"}, "constraints", 1),
        ({"roles": "\n\n{{ system.current_date }}"}, "roles", 3),
        ({"roles": "{{ message.text }}"}, "roles", 1),
        ({"roles": "{{ conversation['duration'] }}"}, "roles", 1),
        ({"roles": "{% extends 'x' %}"}, "roles", 1),
        ({"roles": "{{ " + "(" * 20_000}, "roles", None),
    ],
    ids=["syntax", "second text", "filter", "clock", "message", "duration", "extends", "depth"],
)
async def test_invalid_instructions_are_refused(
    renderer: JinjaRenderer, texts: dict[str, str], template: str, line: int | None
) -> None:
    with pytest.raises(TemplateInvalid) as caught:
        await renderer.check_instructions(TENANT, instructed(**texts))

    assert caught.value.details == {"template": template, "line": line}
    assert f"`{template}`" in caught.value.message


@pytest.mark.parametrize(
    "roles",
    [
        "",
        "plain",
        "{{ assistant.name }} {{ conversation.created_date }} {{ session.mode }} {{ args.system }} {{ tone }}",
        "{{ customer.name }}",
        "{% for message in args.messages %}{{ message }}{% endfor %}",
    ],
)
async def test_valid_instructions_are_accepted(renderer: JinjaRenderer, roles: str) -> None:
    await renderer.check_instructions(TENANT, instructed(roles))


async def test_a_check_has_limits_too(renderer: JinjaRenderer) -> None:
    with pytest.raises(TemplateInvalid, match="longer than"):
        await renderer.check_instructions(TENANT, instructed("{{ 3 ** (10 ** 8) }}"))

    await renderer.check_instructions(TENANT, instructed("{{ name }}"))
