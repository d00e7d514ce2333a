"""Both layers rendered from their templates, with plain instructions."""

import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.assistant import Instructions
from server.payload.renderer import Renderer
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from tests.support.builders import NASTY, definition
from tests.support.strategies import any_text, json_objects, json_values

PROVIDERS = ("gemini", "anthropic")
NOW = "2026-11-16T12:00:00Z"
SYNTAX = st.sampled_from(["{{ 7 * 7 }}", "{% for x in y %}", "{# #}", "{{", "%}", "{{ cached_history }}", NASTY])
typed = any_text | SYNTAX | st.builds(lambda one, two: one + two, any_text, SYNTAX)
"""Template syntax that a user may type."""


def make(directory: Path | None = None, **limits: Any) -> JinjaRenderer:
    return JinjaRenderer(load_templates(directory), RenderLimits(**limits))


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "system": {"current_datetime": NOW},
        "assistant": {"name": "helper", "id": "asst_1", "language": "en", "description": "Helps."},
        "conversation": {"id": "conv_1"},
        "message": {"text": "Hi", "language": "en"},
        "args": {},
        **changes,
    }


def with_template(directory: Path, name: str, source: str, **limits: Any) -> JinjaRenderer:
    (directory / name).write_text(source, encoding="utf-8")
    return make(directory, **limits)


def instructed(roles: str = "", procedure: str = "", constraints: str = "") -> Any:
    return definition(instructions=Instructions(roles=roles, procedure=procedure, constraints=constraints))


BUILT_IN = make()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> JinjaRenderer:
    """An assistant whose layers contain what users typed."""
    directory = tmp_path_factory.mktemp("templates")
    (directory / "gemini_static_prompt.j2").write_text("[{{ args.text }}]{{ cached_history }}", encoding="utf-8")
    return with_template(
        directory, "gemini_dynamic_prompt.j2", '{"text": {{ message.text | tojson }}, "args": {{ args | tojson }}}'
    )


def test_it_implements_the_renderer_port() -> None:
    renderer: Renderer = BUILT_IN

    assert renderer is BUILT_IN


# --- the dynamic layer


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_an_empty_context_is_three_empty_lists_and_the_time(provider: str) -> None:
    rendered = await BUILT_IN.render_dynamic("acme", provider, {}, arguments())

    assert rendered.text == f'{{"file_references":[],"artifacts":[],"todos":[],"current_datetime":"{NOW}"}}'
    assert rendered.failures == ()


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_everything_in_the_context_is_included_and_the_time_comes_last(provider: str) -> None:
    context = {
        "weather": {"z": 1.0, "a": None},
        "todos": ["one"],
        "artifacts": [{"id": 1}],
        "file_references": ["a.txt"],
        "items": "mine",
    }

    assert (await BUILT_IN.render_dynamic("acme", provider, context, arguments())).text == (
        '{"file_references":["a.txt"],"artifacts":[{"id":1}],"todos":["one"],'
        f'"weather":{{"z":1.0,"a":null}},"items":"mine","current_datetime":"{NOW}"}}'
    )


async def test_the_context_cannot_change_the_clock() -> None:
    text = (await BUILT_IN.render_dynamic("acme", "gemini", {"current_datetime": "1999"}, arguments())).text

    assert json.loads(text)["current_datetime"] == NOW
    assert "1999" not in text


async def test_an_arg_cannot_replace_the_context() -> None:
    pretenders = dict.fromkeys(("todos", "artifacts", "file_references", "current_datetime", "context"), "pretended")

    assert await BUILT_IN.render_dynamic(
        "acme", "gemini", {}, arguments(**pretenders)
    ) == await BUILT_IN.render_dynamic("acme", "gemini", {}, arguments())


@pytest.mark.parametrize("provider", PROVIDERS)
@given(context=st.dictionaries(typed, json_values | typed, max_size=4))
async def test_for_any_context_the_layer_is_json_that_contains_it(provider: str, context: dict[str, Any]) -> None:
    rendered = await BUILT_IN.render_dynamic("acme", provider, context, arguments())
    plain = json.loads(json.dumps(context))

    assert rendered.failures == ()
    rendered.text.encode()
    assert json.loads(rendered.text) == {
        "file_references": [],
        "artifacts": [],
        "todos": [],
        **plain,
        "current_datetime": NOW,
    }


@given(text=typed, args=json_objects)
async def test_what_a_user_types_is_a_value_in_the_dynamic_layer(
    echo: JinjaRenderer, text: str, args: dict[str, Any]
) -> None:
    rendered = await echo.render_dynamic(
        "acme", "gemini", {}, arguments(message={"text": text, "language": ""}, args=args)
    )

    assert json.loads(rendered.text) == json.loads(json.dumps({"text": text, "args": args}))


async def test_the_context_may_consist_of_immutable_mappings() -> None:
    context = MappingProxyType({"todos": (MappingProxyType({"done": False}),)})

    assert json.loads((await BUILT_IN.render_dynamic("acme", "gemini", context, arguments())).text)["todos"] == [
        {"done": False}
    ]


@pytest.mark.parametrize(
    ("source", "kind", "line", "text"),
    [
        ("[1,\n{{ 1 // 0 }}]", "render", 2, None),
        ("[{{ args.nobody.name }}]", "render", 1, None),
        ("{{ todos.append(1) }}", "render", 1, None),
        ("{{ range(10 ** 6) | list }}", "too_large", 1, None),
        ("[{% for i in range(1000) %}{{ i }},{% endfor %}0]", "too_large", None, None),
        ("Hello {{ assistant.name }}", "not_json", 1, "Hello helper"),
        ('{"now": NaN}', "not_json", None, '{"now": NaN}'),
        ("", "not_json", 1, ""),
    ],
    ids=["division", "member of nothing", "change", "range", "length", "prose", "no number", "empty"],
)
async def test_a_failing_dynamic_template_reports_its_error(
    source: str, kind: str, line: int | None, text: str | None, tmp_path: Path
) -> None:
    renderer = with_template(tmp_path, "gemini_dynamic_prompt.j2", source, output_chars=1000)

    rendered = await renderer.render_dynamic("acme", "gemini", {}, arguments())

    assert rendered.text == (source if text is None else text)
    (failure,) = rendered.failures
    assert (failure.template, failure.kind, failure.line) == ("gemini_dynamic_prompt.j2", kind, line)
    assert failure.message


# --- the static layer


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_each_instruction_has_its_section_and_history_comes_last(provider: str) -> None:
    rendered = await BUILT_IN.render_static("acme", provider, instructed("R.", "P.", "C."), arguments())

    places = [rendered.text.index(part) for part in ("helper", "Helps.", "R.", "P.", "C.")]
    assert places == sorted(places)
    assert rendered.text.lower().rindex("earlier in this conversation") > places[-1]
    assert rendered.text.endswith("\n\n")
    assert "cached_history" not in rendered.text
    assert rendered.failures == ()


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_an_empty_instruction_has_no_section(provider: str) -> None:
    whole = (await BUILT_IN.render_static("acme", provider, instructed("R.", "P.", "C."), arguments())).text.lower()
    without = (await BUILT_IN.render_static("acme", provider, instructed("R."), arguments())).text.lower()

    assert "procedure" in whole
    assert "constraints" in whole
    assert "procedure" not in without
    assert "constraints" not in without
    assert "\n\n\n" not in without


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_empty_parts_of_the_assistant_are_not_mentioned(provider: str) -> None:
    bare = {"name": "helper", "id": "asst_1", "language": "", "description": ""}

    text = (await BUILT_IN.render_static("acme", provider, instructed(), arguments(assistant=bare))).text

    assert "About" not in text
    assert "Language" not in text


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_nothing_in_the_built_in_text_is_labelled_as_reasoning(provider: str) -> None:
    text = (await BUILT_IN.render_static("acme", provider, instructed("R.", "P.", "C."), arguments())).text

    assert re.search(r"think|thought|reason", text, re.IGNORECASE) is None


async def test_every_tag_of_the_claude_template_is_closed() -> None:
    text = (await BUILT_IN.render_static("acme", "anthropic", instructed("R.", "P.", "C."), arguments())).text

    assert re.findall(r"<(\w+)>", text) == re.findall(r"</(\w+)>", text)


async def test_the_source_of_the_template_is_returned_with_the_text() -> None:
    template = load_templates(None).static["gemini"]

    rendered = await BUILT_IN.render_static("acme", "gemini", instructed("R."), arguments())

    assert rendered.template_source == template.source
    assert rendered.template_hash == template.sha256


async def test_the_same_values_give_the_same_bytes() -> None:
    one = await BUILT_IN.render_static("acme", "gemini", instructed("R.", "P.", "C."), arguments())
    other = await make().render_static("acme", "gemini", instructed("R.", "P.", "C."), arguments())

    assert one == other


@pytest.mark.parametrize(
    ("source", "base"),
    [
        ("Hi {{ assistant.name }}.\n\n{{ cached_history }}\n", "Hi helper.\n\n"),
        ("Hi.\n\n{{- cached_history }}", "Hi."),
        ("Hi.{{ cached_history -}}\n\n", "Hi."),
        ("Hi.\n\n\n", "Hi.\n\n"),
        ("Hi.", "Hi.\n\n"),
        ("{% if false %}x{% endif %}\n", ""),
        ("{{ cached_history }}", ""),
    ],
    ids=["as written", "stripped before", "nothing after", "blank line", "without newline", "nothing", "history alone"],
)
async def test_the_text_ends_before_the_history(source: str, base: str, tmp_path: Path) -> None:
    renderer = with_template(tmp_path, "gemini_static_prompt.j2", source)

    assert (await renderer.render_static("acme", "gemini", instructed(), arguments())).text == base


async def test_a_failing_static_template_returns_its_source(tmp_path: Path) -> None:
    source = "{{ roles }}\n{{ args.customer.name }}\n{{ cached_history }}"
    renderer = with_template(tmp_path, "gemini_static_prompt.j2", source)

    rendered = await renderer.render_static("acme", "gemini", instructed("R."), arguments())

    assert rendered.text == source
    (failure,) = rendered.failures
    assert (failure.template, failure.kind, failure.line) == ("gemini_static_prompt.j2", "render", 2)


async def test_an_arg_cannot_replace_an_instruction() -> None:
    pretenders = dict.fromkeys(("roles", "procedure", "constraints", "cached_history"), "pretended")

    rendered = await BUILT_IN.render_static("acme", "gemini", instructed("R."), arguments(**pretenders))

    assert "pretended" not in rendered.text


async def test_plain_instructions_need_no_process_and_no_check() -> None:
    renderer = make()

    await renderer.check_instructions("acme", instructed("100 % } { plain", "", "{ }"))
    rendered = await renderer.render_static("acme", "gemini", instructed("100 % } { plain", "", "{ }"), arguments())

    assert "100 % } { plain" in rendered.text
    assert renderer.pool.pids == ()


@given(text=typed)
async def test_what_a_user_types_is_a_value_in_the_static_layer(echo: JinjaRenderer, text: str) -> None:
    rendered = await echo.render_static("acme", "gemini", instructed(), arguments(args={"text": text}))

    assert rendered.text == f"[{text}]"
