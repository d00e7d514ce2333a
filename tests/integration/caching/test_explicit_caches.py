"""The life of an explicit cache: created, used, shared, extended, missing, deleted."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.conversation.assistant import Instructions
from server.conversation.cache_register import CacheKey, cache_label
from server.conversation.call import Call
from server.conversation.conversation import ConversationDraft
from server.conversation.event import TextDelta, TurnStarted
from server.conversation.turn import TurnState
from server.postgres.caching import PostgresCacheRegister
from server.providers.choice import GEMINI
from tests.conftest import StrataServer
from tests.contracts.provider_harness import build_payload
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_rebuilds,
    start_driver,
    text_reply,
)
from tests.support.emulators import MODELS, EmulatedProviders, MovedClock, Stages, emulating_both
from tests.support.turn_service_driver import read_all, user_task

LONG = Instructions(roles="You help. " * 2_500, procedure="Think, then answer.", constraints="Be kind.")
ON = {"cache": {"explicit": "on", "ttl_seconds": 600}}
CACHES = "/v1beta/cachedContents"


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def emulated(stages: Stages, clock: MovedClock) -> EmulatedProviders:
    """Without the implicit cache, which would be used at no cost."""
    return stages.play(clock=clock, implicit_cache=False)


async def begin(server: StrataServer, emulated: EmulatedProviders, **changes: Any) -> ConversationDriver:
    values = {"instructions": LONG, "settings": ON} | changes
    return await start_driver(server.program, server.tenant.id, emulated, GEMINI, **values)


async def again(driver: ConversationDriver) -> ConversationDriver:
    """Another conversation with the same assistant."""
    made = await driver.program.store.create_conversation(
        driver.tenant_id, ConversationDraft(assistant_id=driver.assistant_id)
    )
    return ConversationDriver(
        program=driver.program,
        tenant_id=driver.tenant_id,
        emulated=driver.emulated,
        conversation_id=made.id,
        assistant_id=driver.assistant_id,
    )


async def ask(driver: ConversationDriver, text: str = "And now?") -> Call:
    """Send a task, and run everything that the maintainer does because of it. Returns the call of the answer."""
    ended = await driver.task(text, text_reply("Yes."))
    assert ended.turn.state is TurnState.COMPLETE
    await driver.program.cache_maintainer.settle()
    return (await driver.calls())[-1]


def asked_about_caches(emulated: EmulatedProviders) -> list[tuple[str, str]]:
    return [
        (request["method"], request["path"].removeprefix(CACHES))
        for request in emulated.gemini.requests()
        if request["path"].startswith(CACHES)
    ]


async def rows(program: Program, table: str) -> int:
    async with program.database.connection() as connection:
        count: int = await connection.fetchval(f"SELECT count(*) FROM {table}")  # noqa: S608  reason: our own names
    return count


def is_cached(call: Call) -> bool:
    assert call.end is not None
    read, expected = call.end.usage.cache_read_tokens, call.start.cache_expected_tokens
    return "cached_content" in call.start.caching and read == expected and read > 4_000


async def test_a_cache_is_created_after_the_first_turn_and_used_by_the_second(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    assert [is_cached(await ask(driver)) for _ in range(3)] == [False, True, True]
    assert asked_about_caches(emulated) == [("POST", "")]
    bodies = [request["body"] for request in emulated.gemini.requests() if "streamGenerate" in request["path"]]
    assert [("cachedContent" in body, "systemInstruction" in body, "tools" in body) for body in bodies] == [
        (False, True, True),
        (True, False, False),
        (True, False, False),
    ]
    assert_all_accepted(emulated.gemini.requests())
    assert await assert_rebuilds(driver) == 3


async def test_conversations_with_the_same_static_text_share_one(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    await ask(driver)
    other = await again(driver)
    assert [is_cached(await ask(other)) for _ in range(2)] == [False, True]
    assert asked_about_caches(emulated) == [("POST", "")]
    assert (await rows(driver.program, "provider_caches"), await rows(driver.program, "provider_cache_uses")) == (1, 2)


async def test_a_cache_in_use_is_extended_after_half_of_its_lifetime(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    await ask(driver)
    await ask(driver)
    async with driver.program.database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET expires_at = now() + interval '4 minutes'")
    before = datetime.now(UTC)
    assert is_cached(await ask(driver))
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "PATCH"]
    async with driver.program.database.connection() as connection:
        expires_at = await connection.fetchval("SELECT expires_at FROM provider_caches")
    assert expires_at >= before + timedelta(seconds=600)
    await ask(driver)
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "PATCH"]


async def test_a_missing_cache_does_not_fail_the_turn(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    driver = await begin(strata_server, emulated)
    await ask(driver)
    assert is_cached(await ask(driver))
    clock.ahead_seconds += 7_200
    emulated.gemini.queue_replies(text_reply("Still here."))
    service = driver.program.turn_service
    received = [
        event
        for _, event in await read_all(await service.take_turn(driver.tenant_id, user_task(driver.conversation_id)))
    ]
    assert "".join(event.text for event in received if isinstance(event, TextDelta)) == "Still here."
    assert sum(isinstance(event, TurnStarted) for event in received) == 1
    await driver.program.cache_maintainer.settle()
    first, second = (await driver.calls())[-2:]
    assert first.turn_seq == second.turn_seq
    assert first.end is not None
    assert second.end is not None
    assert (first.end.error_code, second.end.error_code) == ("cache_gone", None)
    assert ("cached_content" in first.start.caching, set(second.start.caching)) == (True, {"clock"})
    assert (second.start.cache_expected_tokens, second.end.cache_miss_reason) == (0, "cache_gone")
    assert await rows(driver.program, "provider_caches") == 0
    assert not is_cached(await ask(driver))
    assert is_cached(await ask(driver))
    assert await assert_rebuilds(driver) == 6


async def test_a_missing_cache_does_not_count_as_an_attempt(
    strata_server: StrataServer, server_settings: Settings, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    once = server_settings.model_copy(update={"turn_attempts": 1})
    async with emulated.open(once) as providers, open_program(emulated.point(once), providers=providers) as program:
        driver = await start_driver(program, strata_server.tenant.id, emulated, GEMINI, instructions=LONG, settings=ON)
        await ask(driver)
        clock.ahead_seconds += 7_200
        call = await ask(driver)
        assert call.start.attempt == 2


async def test_erasing_the_last_user_removes_the_cache_at_the_provider(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    await ask(driver)
    other = await again(driver)
    await ask(other)
    program, maintainer = driver.program, driver.program.cache_maintainer
    await program.store.erase_conversation(driver.tenant_id, driver.conversation_id)
    assert await maintainer.sweep() == 0
    assert is_cached(await ask(other))
    report = await program.store.erase_conversation(driver.tenant_id, other.conversation_id)
    assert report.rows["provider_caches"] == 1
    assert await maintainer.sweep() == 1
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "DELETE"]
    assert await rows(program, "provider_caches") == 0


async def test_the_end_of_an_epoch_ends_the_use_of_its_cache(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    await ask(driver)
    assert is_cached(await ask(driver))
    await driver.switch(GEMINI, instructions=Instructions(roles="Otherwise. " * 2_500), settings={})
    changed = await ask(driver)
    assert not is_cached(changed)
    assert changed.end is not None
    assert changed.end.cache_miss_reason == "epoch_began"
    assert await driver.program.cache_maintainer.sweep() == 1
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "DELETE"]
    assert await rows(driver.program, "provider_cache_uses") == 0


async def test_a_cache_whose_creator_died_is_found_by_its_label_among_many(
    strata_server: StrataServer, emulated: EmulatedProviders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Created at the provider, and never registered: only its reservation is known."""
    monkeypatch.setattr("server.providers.gemini.caches._PAGE_SIZE", 2)
    program = strata_server.program
    driver = await begin(strata_server, emulated, settings={"cache": {"explicit": "off"}})
    await ask(driver)
    caches = program.providers.by_name[GEMINI].caches
    assert caches is not None
    payload = build_payload(MODELS[GEMINI], [], static_text="You help. " * 2_500)
    key = CacheKey(
        provider=GEMINI, account=program.providers.by_name[GEMINI].account, model=MODELS[GEMINI], prefix_hash=b"p"
    )
    place = await PostgresCacheRegister(program.database).reserve_cache(
        driver.tenant_id, key, token_count=1, expires_at=datetime.now(UTC) + timedelta(hours=1), fits=lambda _: True
    )
    assert place is not None
    labels = [*(f"another {number}" for number in range(3)), cache_label(place), "another"]
    names = [(await caches.create(payload, lifetime_seconds=600, label=label)).name for label in labels]
    assert await program.cache_maintainer.sweep() == 0
    async with program.database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET created_at = created_at - interval '6 minutes'")
    assert await program.cache_maintainer.sweep() == 1
    deleted = [path.removeprefix("/") for method, path in asked_about_caches(emulated) if method == "DELETE"]
    assert [f"cachedContents/{path}" for path in deleted] == [names[3]]
    assert await caches.find(cache_label(place)) == []
    assert await rows(program, "provider_caches") == 0
    assert_all_accepted(emulated.gemini.requests())


async def test_an_expired_cache_is_removed_from_the_register(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    await ask(driver)
    async with driver.program.database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET expires_at = now() - interval '1 second'")
    assert await driver.program.cache_maintainer.sweep() == 0
    assert await rows(driver.program, "provider_caches") == await rows(driver.program, "provider_cache_uses") == 0


async def test_in_automatic_mode_a_cache_is_created_when_the_calls_show_that_it_pays(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated, settings={})
    made = [is_cached(await ask(driver)) for _ in range(6)]
    assert made == [False, False, False, False, True, True]


async def test_no_cache_is_created_if_the_implicit_cache_works(
    server_settings: Settings, strata_server: StrataServer
) -> None:
    del strata_server
    async with (
        emulating_both() as both,
        both.open(server_settings) as providers,
        open_program(both.point(server_settings), providers=providers) as program,
    ):
        tenant = await program.key_ring.create_tenant("other")
        driver = await start_driver(program, tenant.id, both, GEMINI, instructions=LONG)
        for _ in range(8):
            await ask(driver)
        assert asked_about_caches(both) == []


UNWANTED: list[dict[str, Any]] = [
    {"settings": {"cache": {"explicit": "off"}}},
    {"settings": {**ON, "layer_order": "append_only"}},
    {"settings": {**ON, "extra": {"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}}},
    {"model": "gemini-4-argon", "settings": {}},
    {"instructions": Instructions(roles="Short.")},
]


async def test_no_cache_is_created_if_it_is_switched_off(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    for changes in UNWANTED:
        driver = await begin(strata_server, emulated, **changes)
        assert not any([is_cached(await ask(driver)) for _ in range(3)])
    assert asked_about_caches(emulated) == []
    assert_all_accepted(emulated.gemini.requests())


async def test_no_cache_is_created_beyond_the_budget_for_storage(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    """Some six thousand tokens at 4.50 USD per million and hour: the first fits, the second does not."""
    settings = strata_server.program.settings.model_copy(update={"cache_storage_usd_per_hour": 0.04})
    async with open_program(settings, providers=strata_server.program.providers) as program:
        first, second = [
            await start_driver(program, strata_server.tenant.id, emulated, GEMINI, instructions=text, settings=ON)
            for text in (LONG, Instructions(roles="You help otherwise. " * 1_250))
        ]
        assert [is_cached(await ask(first)) for _ in range(2)] == [False, True]
        assert [is_cached(await ask(second)) for _ in range(2)] == [False, False]
    assert asked_about_caches(emulated) == [("POST", "")]
