"""The checks of instructions."""

from collections.abc import AsyncIterator

import pytest

from server.conversation.assistant import Assistant, Instructions
from server.inspection.assistant_editor import (
    STATIC_MEMBERS,
    Severity,
    TemplateProblem,
    find_args,
    find_missing,
    list_problems,
)
from server.payload.arguments import build_static_arguments
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from tests.support.builders import A_TIME, build_conversation, definition


@pytest.fixture(scope="module")
async def renderer() -> AsyncIterator[JinjaRenderer]:
    opened = JinjaRenderer(load_templates(None), RenderLimits())
    yield opened
    await opened.close()


async def problems_of(renderer: JinjaRenderer, roles: str, procedure: str = "") -> list[TemplateProblem]:
    instructions = Instructions(roles=roles, procedure=procedure)
    inspected = await renderer.inspect_instructions("acme", instructions)
    return list(list_problems(instructions, inspected, ["tone"]))


async def test_every_error_of_every_text_is_reported_with_its_line(renderer: JinjaRenderer) -> None:
    found = await problems_of(
        renderer,
        "Be {{ tone }}.\nIt is {{ system.current_time }}\nand {{ conversation.duration }}\nto {{ message['text'] }}.",
        "Look.\n{% include 'x' %}",
    )
    assert [(problem.template, problem.line, problem.source) for problem in found] == [
        ("roles", 2, "It is {{ system.current_time }}"),
        ("roles", 3, "and {{ conversation.duration }}"),
        ("roles", 4, "to {{ message['text'] }}."),
        ("procedure", 2, "{% include 'x' %}"),
    ]
    assert {problem.severity for problem in found} == {Severity.ERROR}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("a\n{% if %}", "Expected an expression"),
        ("a\n{{ tone | shout }}", "No filter named 'shout'."),
        ("a\n{{ now() }}", "There is no variable `now`"),
    ],
)
async def test_a_failed_check_is_described_in_a_sentence(renderer: JinjaRenderer, roles: str, message: str) -> None:
    [problem] = await problems_of(renderer, roles)
    assert message in problem.message
    assert problem.line in {2, None}


@pytest.mark.parametrize(
    ("roles", "doubts"),
    [
        ("{{ tone }} {{ assistant.name }} {{ conversation['source'] }} {{ args }} {{ range(3) | list }}", []),
        ("{{ city }} {{ city }}", ["city"]),
        ("{{ assistant.nam }}", ["assistant.nam"]),
        ("{{ args.tone }}", ["args.tone"]),
        ("{{ session.mode }} {{ session.id }}", ["session.id"]),
        ("{% if vip %}{{ vip }}{% endif %}{{ town | default('here') }}{{ 'x' if args.late else '' }}", []),
        ("{% for city in cities %}{{ city }}{% endfor %}{% set x = 1 %}{{ x }}", ["cities"]),
        ("no template, { city }", []),
    ],
)
async def test_an_unknown_name_is_a_warning(renderer: JinjaRenderer, roles: str, doubts: list[str]) -> None:
    found = await problems_of(renderer, roles)
    assert [problem.severity for problem in found] == [Severity.WARNING] * len(doubts)
    for problem, name in zip(found, doubts, strict=True):
        assert f"`{name}`" in problem.message


async def test_names_without_another_source_are_args(renderer: JinjaRenderer) -> None:
    inspected = await renderer.inspect_instructions(
        "acme",
        Instructions(roles="{{ tone }} {{ city }} {% if vip %}{% endif %}", procedure="{{ args.room }} {{ city }}"),
    )
    assert set(find_args(inspected.names, ["tone"])) == {"city", "vip", "room"}
    assistant = Assistant(id="asst_x", version=1, created_at=A_TIME, definition=definition())
    conversation = build_conversation(args={"city": "Oslo"})
    arguments = build_static_arguments(assistant=assistant, conversation=conversation)
    assert find_missing(inspected.names, arguments) == ("args.room",)


def test_the_known_members_are_those_that_templates_have() -> None:
    assistant = Assistant(id="asst_x", version=1, created_at=A_TIME, definition=definition())
    seen = build_static_arguments(assistant=assistant, conversation=build_conversation(mode="voice"))
    assert {name: frozenset(seen[name]) for name in STATIC_MEMBERS} == STATIC_MEMBERS
