"""The conversation and the assistant that the options choose."""

from typing import Any

import click
import pytest

from server.cli.chat import Choice, open_conversation
from server.web.client import StrataClient
from tests.support.fakes.scripted_strata import CONVERSATION_ID, ScriptedStrata, answer_json

GET_TIME: dict[str, Any] = {"name": "get_time", "description": "The date and time now, in UTC."}


def assistant(number: int, **members: Any) -> dict[str, Any]:
    return {
        "id": f"asst_{number}",
        "version": 1,
        "created_at": "2026-11-16T08:00:00Z",
        "name": "chat",
        "provider": "gemini",
        "model": "gemini-3.1-pro-preview",
        **members,
    }


@pytest.fixture(autouse=True)
def _assistants(strata: ScriptedStrata) -> None:
    listed = [
        assistant(1, name="other"),
        assistant(2, instructions={"roles": "Be brief."}),
        assistant(3, tools=[GET_TIME]),
        assistant(4, provider="anthropic", model="claude-sonnet-5-5"),
        assistant(5),
    ]
    strata.script("GET", "/v1/assistants", answer_json({"data": listed, "next_cursor": None}))
    strata.script("GET", "/v1/assistants/asst_1", answer_json(listed[0]))
    strata.script("POST", "/v1/assistants", answer_json(assistant(9), status=201))
    strata.script("POST", "/v1/conversations", answer_json(strata.conversation, status=201))


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (Choice(), "asst_4"),
        (Choice(provider="gemini"), "asst_5"),
        (Choice(model="claude-sonnet-5-5"), "asst_4"),
        (Choice(instructions="Be brief."), "asst_2"),
        (Choice(assistant="asst_1"), "asst_1"),
    ],
)
async def test_a_matching_assistant_is_used(
    client: StrataClient, strata: ScriptedStrata, choice: Choice, found: str
) -> None:
    _, used = await open_conversation(client, choice)
    assert used.id == found
    assert strata.asked("POST", "/v1/conversations")[0].body == {"assistant_id": found, "source": "chat"}
    assert not strata.asked("POST", "/v1/assistants")


@pytest.mark.parametrize(
    "choice",
    [Choice(model="gemini-3.5-flash"), Choice(instructions="Be long."), Choice(tools="demo")],
    ids=["model", "instructions", "tools"],
)
async def test_an_assistant_is_created_if_none_fits(
    client: StrataClient, strata: ScriptedStrata, choice: Choice
) -> None:
    _, used = await open_conversation(client, choice)
    assert used.id == "asst_9"
    [request] = strata.asked("POST", "/v1/assistants")
    assert request.body["name"] == "chat"
    assert request.body["instructions"]["roles"] == (choice.instructions or "")
    assert [tool["name"] for tool in request.body["tools"]] == (["get_time", "roll_dice"] if choice.tools else [])


async def test_a_conversation_is_loaded_with_its_assistant(client: StrataClient, strata: ScriptedStrata) -> None:
    conversation, used = await open_conversation(client, Choice(conversation=CONVERSATION_ID))
    assert (conversation.id, used.id) == (CONVERSATION_ID, "asst_1")
    assert strata.asked("GET", "/v1/assistants/asst_1")[0].query == {"version": "1"}
    assert not strata.asked("POST", "/v1/conversations")


@pytest.mark.parametrize(
    "choice",
    [
        Choice(conversation="conv_1", assistant="asst_1"),
        Choice(conversation="conv_1", model="m"),
        Choice(assistant="asst_1", provider="gemini"),
    ],
    ids=["both", "conversation", "assistant"],
)
def test_contradicting_options_are_refused(choice: Choice) -> None:
    with pytest.raises(click.UsageError):
        choice.check()
