"""Templates in a turn: those of the operator are used and archived, failures are recorded, args start epochs."""

import json
from pathlib import Path

import pytest

from server.app.settings import Settings
from server.conversation.assistant import Instructions
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.store import ConversationChange
from server.conversation.turn import TurnState
from tests.conftest import StrataServer
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_service_driver import open_conversation, say, user_task

OWN = "My own house. {{ roles }}\n\n{{ cached_history }}"


@pytest.fixture
def server_settings(server_settings: Settings, tmp_path: Path) -> Settings:
    directory = tmp_path / "templates"
    directory.mkdir()
    (directory / "gemini_static_prompt.j2").write_text(OWN)
    return server_settings.model_copy(
        update={"templates_dir": directory, "template_workers": 1, "template_wait_seconds": 0.01}
    )


async def test_the_template_of_the_operator_is_sent_and_archived_with_the_epoch(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    for provider in BOTH:
        conversation = await open_conversation(program.store, tenant.id, provider)
        await say(program.turn_service, tenant.id, user_task(conversation.id))
    assert "My own house. You help." in json.dumps(emulated.gemini.requests()[-1]["body"]["systemInstruction"])
    assert "My own house" not in json.dumps(emulated.anthropic.requests()[-1]["body"]["system"])
    async with program.database.connection() as connection:
        hashes = await connection.fetch("SELECT template_hash FROM epochs ORDER BY created_at")
    sources = [await program.store.load_template(row["template_hash"]) for row in hashes]
    assert sources[0] == OWN
    assert sources[1] is not None
    assert "cached_history" in sources[1]


@pytest.mark.parametrize("provider", BOTH)
async def test_a_failing_instruction_is_sent_as_source_and_recorded_on_the_call(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    broken = Instructions(roles="You help {{ nobody")
    conversation = await open_conversation(program.store, tenant.id, provider, instructions=broken)
    ended = await say(program.turn_service, tenant.id, user_task(conversation.id))
    assert ended.turn.state is TurnState.COMPLETE
    assert "You help {{ nobody" in json.dumps(emulated[provider].requests()[-1]["body"])
    (call,) = await program.store.list_calls(tenant.id, conversation.id, 2)
    assert [(failure["template"], failure["kind"]) for failure in call.start.template_failures] == [("roles", "parse")]


@pytest.mark.parametrize("provider", BOTH)
async def test_other_args_begin_an_epoch_with_their_text(
    strata_server: StrataServer, emulated: EmulatedProviders, provider: str
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    greeting = Instructions(roles="You help {{ name }}.")
    conversation = await open_conversation(program.store, tenant.id, provider, instructions=greeting)
    for name in ("Ada", "Ada", "Bo"):
        await program.store.change_conversation(tenant.id, conversation.id, ConversationChange(args={"name": name}))
        assert (await say(program.turn_service, tenant.id, user_task(conversation.id))).turn.state is TurnState.COMPLETE
        assert f"You help {name}." in json.dumps(emulated[provider].requests()[-1]["body"])
    async with program.database.connection() as connection:
        rows = await connection.fetch(
            "SELECT reason FROM epochs WHERE conversation_id = $1 ORDER BY number",
            decode_id(CONVERSATION, conversation.id),
        )
    assert [row["reason"] for row in rows] == ["started", "arguments_changed"]


async def test_a_turn_without_a_worker_fails_with_the_reason_and_the_next_one_renders(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    greeting = Instructions(roles="You help {{ assistant.id }}.")
    conversation = await open_conversation(program.store, tenant.id, "gemini", instructions=greeting)
    async with program.template_workers.lend("another tenant", None):
        ended = await say(program.turn_service, tenant.id, user_task(conversation.id))
    assert (ended.turn.state, ended.turn.error_code) == (TurnState.FAILED, "template_workers_busy")
    assert emulated.gemini.requests() == []

    # The worker is free, and starting its process may take any time.
    ended = await say(program.turn_service, tenant.id, user_task(conversation.id))

    assert ended.turn.state is TurnState.COMPLETE
    assert f"You help {conversation.assistant_id}." in json.dumps(emulated.gemini.requests()[-1]["body"])
