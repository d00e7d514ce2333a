"""After any answers of a provider the conversation continues: a property over whole turns.

A sequence of answers, refusals, faults and damaged streams is drawn. After it, with providers without faults, a next
user task is answered, every stored call can be verified and shown to an operator, and the conversation can be erased.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.event import TurnEnded
from server.conversation.turn import TurnState
from server.emulator.reply import FaultKind, Reply
from server.postgres.engine import Database
from tests.conftest import StrataServer, keys_of
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import BOTH, EmulatedProviders, Stages
from tests.support.fuzzing import Fuzzer
from tests.support.turn_service_driver import say, text_of, tool_results, user_task
from tests.support.verifying import verify

SLOW = frozenset({FaultKind.SLOW, FaultKind.SILENCE})
"""They cost seconds each; their result, an abandoned call, is that of a cut as well."""
replies = st.sampled_from(
    [
        text_reply("Fine."),
        text_reply("One two three four five six seven eight."),
        Reply(thinking="Only a thought."),
        tool_reply("Oslo"),
        tool_reply("Oslo", "Bergen"),
        Reply(text="Before the call.", tool_calls=tool_reply("Oslo").tool_calls),
    ]
)
kinds = st.sampled_from([kind for kind in FaultKind if kind not in SLOW])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answer to the next input."""

    reply: Reply
    fault: FaultKind | None
    after_chunks: int
    fuzz: int | None
    abandons: bool
    """Whether a new task is sent in place of the pending results."""
    switches: bool
    """Whether the other provider is called from then on."""


steps = st.builds(
    Step,
    reply=replies,
    fault=st.none() | kinds,
    after_chunks=st.integers(0, 8),
    fuzz=st.none() | st.integers(0, 1 << 32),
    abandons=st.booleans(),
    switches=st.sampled_from([False, False, False, True]),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    server: StrataServer
    emulated: EmulatedProviders
    fuzzers: dict[str, Fuzzer]
    database: Database


@pytest.fixture
async def site(database: Database, server_settings: Settings, stages: Stages) -> AsyncIterator[Site]:
    emulated = stages.play()
    fuzzers = {name: Fuzzer() for name in BOTH}
    for name, (_, stage) in {"gemini": stages.gemini, "anthropic": stages.anthropic}.items():
        stage.app = fuzzers[name].around(stage.app)
    hasty = emulated.point(server_settings).model_copy(
        update={"turn_retry_seconds": 0.5, "provider_silence_seconds": 2.0, "turn_attempts": 2}
    )
    async with emulated.open(hasty) as providers, open_program(hasty, providers=providers) as program:
        tenant = await program.key_ring.create_tenant("acme")
        client_key, admin_key = await keys_of(program, tenant)
        async with serving(program, bind("127.0.0.1", 0)) as url:
            server = StrataServer(
                url=url,
                program=program,
                key_ring=program.key_ring,
                tenant=tenant,
                client_key=client_key,
                admin_key=admin_key,
            )
            yield Site(server=server, emulated=emulated, fuzzers=fuzzers, database=database)


@settings(max_examples=30)
@given(provider=st.sampled_from(BOTH), taken=st.lists(steps, min_size=1, max_size=5))
async def test_after_any_answers_a_next_task_is_answered_and_everything_verifies(
    site: Site, provider: str, taken: list[Step]
) -> None:
    server = site.server
    driver = await start_driver(server.program, server.tenant.id, site.emulated, provider)
    for number, step in enumerate(taken):
        provider = await take(site, driver, step, number, provider)

    calm(site)
    for name in BOTH:
        site.emulated[name].queue_replies(text_reply("Here I am."))
    ended = await say(
        server.program.turn_service,
        server.tenant.id,
        user_task(driver.conversation_id, "And now?", abandons_calls=True),
    )
    assert (ended.turn.state, ended.turn.error_code) == (TurnState.COMPLETE, None)
    assert text_of(ended) == "Here I am."

    verified = await verify(site.database, [driver.conversation_id])
    assert verified.mismatches == ()
    await assert_shown(site, driver)
    await server.program.store.erase_conversation(server.tenant.id, driver.conversation_id)
    async with site.database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM calls") == 0


async def take(site: Site, driver: ConversationDriver, step: Step, number: int, provider: str) -> str:
    """Send one input, answered as the step defines. It ends in any case. Returns the provider of the next."""
    calm(site)
    for name in BOTH:
        site.emulated[name].queue_replies(step.reply)
        if step.fault is not None:
            site.emulated[name].inject_fault(step.fault, after_chunks=step.after_chunks, times=1)
        site.fuzzers[name].seed = step.fuzz
    ended: TurnEnded | None = driver.ended
    pending = [] if ended is None else [call.id for call in ended.conversation.pending_calls]
    if pending and not step.abandons:
        request: Any = tool_results(driver.conversation_id, pending)
    else:
        request = user_task(driver.conversation_id, f"Task {number}.", abandons_calls=True)
    server = site.server
    driver.ended = await say(server.program.turn_service, server.tenant.id, request)
    calm(site)
    if not step.switches:
        return provider
    other = BOTH[1 - BOTH.index(provider)]
    await driver.switch(other)
    return other


def calm(site: Site) -> None:
    for name in BOTH:
        site.emulated[name].lines.turns.clear()
        site.emulated[name].state.faults.clear()
        site.fuzzers[name].seed = None


async def assert_shown(site: Site, driver: ConversationDriver) -> None:
    """An operator sees the conversation and each of its calls."""
    async with httpx2.AsyncClient(
        base_url=site.server.url, headers={"authorization": f"Bearer {site.server.admin_key}"}, timeout=30
    ) as client:
        path = f"/admin/api/conversations/{driver.conversation_id}"
        assert (await client.get(path)).status_code == 200
        for call in await driver.calls():
            for part in ("", "/response", "/request"):
                shown = await client.get(f"{path}/calls/{call.turn_seq}/{call.start.attempt}{part}")
                assert shown.status_code == 200, shown.text
        turns = await client.get(
            f"/v1/conversations/{driver.conversation_id}/turns",
            headers={"authorization": f"Bearer {site.server.client_key}"},
        )
        assert turns.status_code == 200
