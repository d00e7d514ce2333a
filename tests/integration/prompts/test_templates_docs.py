"""The guide on templates is correct: its examples give the stated results, its tables are complete."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.conversation.assistant import Assistant, AssistantDefinition, Instructions
from server.conversation.conversation import Conversation, ConversationState
from server.conversation.errors import TemplateInvalid
from server.payload.arguments import build_arguments, build_static_arguments
from server.prompts.environment import Sandbox
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from tests.support.builders import A_TIME
from tests.support.strata_process import PROJECT

PAGE = (PROJECT / "docs/guides/templates.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    _, _, rest = PAGE.partition(f"{heading}\n")
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def examples(heading: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)


def first_column(heading: str) -> list[str]:
    rows = [line for line in section(heading).splitlines() if line.startswith("| `")]
    return [re.split(r"(?<!\\)\|", row)[1].strip().strip("`").replace("\\|", "|") for row in rows]


def an_assistant(body: dict[str, Any]) -> Assistant:
    instructions = Instructions(**body.pop("instructions", {}))
    chosen = AssistantDefinition(provider="anthropic", model="claude", instructions=instructions, **body)
    return Assistant(id="asst_1", version=1, created_at=A_TIME, definition=chosen)


def a_conversation(**changes: Any) -> Conversation:
    values: dict[str, Any] = {
        **dict.fromkeys(("identifier", "source", "direction", "forked_from")),
        **dict.fromkeys(("revision", "epoch"), 0),
        **dict.fromkeys(("pending_call_ids", "pending_calls"), ()),
        **{name: {} for name in ("args", "context", "metadata")},
        **dict.fromkeys(("created_at", "updated_at"), A_TIME),
        **dict.fromkeys(("next_seq", "buffer_start_seq", "assistant_version"), 1),
        "id": "conv_1",
        "assistant_id": "asst_1",
        "state": ConversationState.IDLE,
        "mode": "voice",
    }
    return Conversation(**values | changes)


def all_arguments(assistant: Assistant) -> dict[str, Any]:
    return build_arguments(
        assistant=assistant,
        conversation=a_conversation(),
        now=A_TIME,
        message_text="Hi",
        message_language="en",
        turn_args=None,
    )


@pytest.fixture
async def renderer(tmp_path: Path) -> AsyncIterator[JinjaRenderer]:
    """With the files of the page, and for the static layer of Gemini the bare instructions."""
    (static,) = examples("### The static layer", "jinja")
    (dynamic,) = examples("### The dynamic layer", "jinja")
    (tmp_path / "anthropic_static_prompt.j2").write_text(static, encoding="utf-8")
    (tmp_path / "gemini_dynamic_prompt.j2").write_text(dynamic, encoding="utf-8")
    (tmp_path / "gemini_static_prompt.j2").write_text(
        "{{ roles }}\n\n{{ procedure }}\n\n{{ constraints }}{{ cached_history }}", encoding="utf-8"
    )
    renderer = JinjaRenderer(load_templates(tmp_path), RenderLimits())
    yield renderer
    await renderer.close()


async def test_the_instructions_give_the_text(renderer: JinjaRenderer) -> None:
    body, conversation = (json.loads(example) for example in examples("## Instructions", "json"))
    (text,) = examples("## Instructions", "text")
    assistant = an_assistant(body)

    await renderer.check_instructions("acme", assistant.definition)
    arguments = build_static_arguments(assistant=assistant, conversation=a_conversation(**conversation))
    rendered = await renderer.render_static("acme", "gemini", assistant.definition, arguments)

    assert rendered.text == text
    assert rendered.failures == ()


async def test_the_static_template_works(renderer: JinjaRenderer) -> None:
    assistant = an_assistant({"name": "a", "instructions": {"roles": "Help."}, "variables": {"company": "Acme"}})
    arguments = build_static_arguments(assistant=assistant, conversation=a_conversation())

    rendered = await renderer.render_static("acme", "anthropic", assistant.definition, arguments)

    assert rendered.text == "\nYou work for Acme.\n\nHelp.\n\nBefore now:\n\n"


async def test_the_dynamic_templates_give_the_json(renderer: JinjaRenderer) -> None:
    context, built_in, own = examples("### The dynamic layer", "json")
    arguments = all_arguments(an_assistant({"name": "a"}))

    of_claude = await renderer.render_dynamic("acme", "anthropic", json.loads(context), arguments)
    of_gemini = await renderer.render_dynamic("acme", "gemini", json.loads(context), arguments)

    assert (of_claude.text + "\n", of_claude.failures) == (built_in, ())
    assert (of_gemini.text + "\n", of_gemini.failures) == (own, ())


def test_the_table_of_arguments_is_complete() -> None:
    assistant = an_assistant({"name": "a"})
    rows = {
        row.split("|")[1].strip().strip("`"): row.split("|")[3].strip() == "yes"
        for row in section("## Arguments").splitlines()
        if row.startswith("| `")
    }

    assert set(rows) == dotted(all_arguments(assistant))
    assert {name for name, frozen in rows.items() if frozen} == dotted(
        build_static_arguments(assistant=assistant, conversation=a_conversation())
    )


def dotted(arguments: dict[str, Any]) -> set[str]:
    return {"args"} | {f"{space}.{name}" for space, members in arguments.items() for name in members}


def test_the_values_in_the_table_are_real() -> None:
    arguments = all_arguments(an_assistant({"name": "a"}))
    shown = dict(re.findall(r"^\| `system\.(\w+)` \| `([^`]+)`", section("## Arguments"), re.MULTILINE))

    assert len(shown) == 5
    assert shown == {name: arguments["system"][name] for name in shown}


@pytest.mark.parametrize("roles", first_column("### What is refused"))
async def test_what_the_page_calls_refused_is_refused(renderer: JinjaRenderer, roles: str) -> None:
    with pytest.raises(TemplateInvalid):
        await renderer.check_instructions(
            "acme", an_assistant({"name": "a", "instructions": {"roles": roles}}).definition
        )


def test_the_names_that_the_page_calls_missing_are_missing() -> None:
    sandbox = Sandbox()

    for name in ("random", "lipsum", "cycler", "joiner"):
        assert f"`{name}`" in section("## What a template may do")
        assert name not in sandbox.globals
        assert name not in sandbox.filters


def test_the_limits_are_those_of_the_code() -> None:
    limits = RenderLimits()
    text = " ".join(section("## What a template may do").split())

    assert f"{limits.seconds:g} seconds of processor time" in text
    assert f"{limits.memory_bytes // 1024**2} MiB of memory" in text
    assert f"{limits.output_chars:,} characters" in text


def test_every_kind_of_failure_is_explained() -> None:
    assert first_column("### What fails later") == ["parse", "render", "too_long", "too_large", "not_json"]
