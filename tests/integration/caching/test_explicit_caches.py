"""The life of an explicit cache: made, used, shared, prolonged, gone, removed."""

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
from tests.contracts.provider_rig import build_payload
from tests.support.conversation_driver import Walk, assert_all_accepted, assert_rebuilds, begin_walk, tells
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
    """Without the implicit cache, which would give everything for nothing."""
    return stages.play(clock=clock, implicit_cache=False)


async def begin(server: StrataServer, emulated: EmulatedProviders, **changes: Any) -> Walk:
    values = {"instructions": LONG, "settings": ON} | changes
    return await begin_walk(server.program, server.tenant.id, emulated, GEMINI, **values)


async def again(walk: Walk) -> Walk:
    """Another conversation with the same assistant."""
    made = await walk.program.store.create_conversation(
        walk.tenant_id, ConversationDraft(assistant_id=walk.assistant_id)
    )
    return Walk(
        program=walk.program,
        tenant_id=walk.tenant_id,
        emulated=walk.emulated,
        conversation_id=made.id,
        assistant_id=walk.assistant_id,
    )


async def ask(walk: Walk, text: str = "And now?") -> Call:
    """A task, all that the keeper does because of it, and the call that answered it."""
    ended = await walk.task(text, tells("Yes."))
    assert ended.turn.state is TurnState.COMPLETE
    await walk.program.cache_maintainer.settle()
    return (await walk.calls())[-1]


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


async def test_a_cache_is_made_behind_the_first_turn_and_used_by_the_second(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    assert [is_cached(await ask(walk)) for _ in range(3)] == [False, True, True]
    assert asked_about_caches(emulated) == [("POST", "")]
    bodies = [request["body"] for request in emulated.gemini.requests() if "streamGenerate" in request["path"]]
    assert [("cachedContent" in body, "systemInstruction" in body, "tools" in body) for body in bodies] == [
        (False, True, True),
        (True, False, False),
        (True, False, False),
    ]
    assert_all_accepted(emulated.gemini.requests())
    assert await assert_rebuilds(walk) == 3


async def test_conversations_with_the_same_static_text_share_one(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    await ask(walk)
    other = await again(walk)
    assert [is_cached(await ask(other)) for _ in range(2)] == [False, True]
    assert asked_about_caches(emulated) == [("POST", "")]
    assert (await rows(walk.program, "provider_caches"), await rows(walk.program, "provider_cache_uses")) == (1, 2)


async def test_a_cache_in_use_is_prolonged_when_half_of_its_time_is_over(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    await ask(walk)
    await ask(walk)
    async with walk.program.database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET expires_at = now() + interval '4 minutes'")
    before = datetime.now(UTC)
    assert is_cached(await ask(walk))
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "PATCH"]
    async with walk.program.database.connection() as connection:
        expires_at = await connection.fetchval("SELECT expires_at FROM provider_caches")
    assert expires_at >= before + timedelta(seconds=600)
    await ask(walk)
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "PATCH"]


async def test_a_cache_that_is_gone_costs_the_client_nothing(
    strata_server: StrataServer, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    walk = await begin(strata_server, emulated)
    await ask(walk)
    assert is_cached(await ask(walk))
    clock.ahead_seconds += 7_200
    emulated.gemini.says(tells("Still here."))
    service = walk.program.turn_service
    heard = [
        event for _, event in await read_all(await service.take_turn(walk.tenant_id, user_task(walk.conversation_id)))
    ]
    assert "".join(event.text for event in heard if isinstance(event, TextDelta)) == "Still here."
    assert sum(isinstance(event, TurnStarted) for event in heard) == 1
    await walk.program.cache_maintainer.settle()
    first, second = (await walk.calls())[-2:]
    assert first.turn_seq == second.turn_seq
    assert first.end is not None
    assert second.end is not None
    assert (first.end.error_code, second.end.error_code) == ("cache_gone", None)
    assert ("cached_content" in first.start.caching, second.start.caching) == (True, {})
    assert (second.start.cache_expected_tokens, second.end.cache_miss_reason) == (0, "cache_gone")
    assert await rows(walk.program, "provider_caches") == 0
    assert not is_cached(await ask(walk))
    assert is_cached(await ask(walk))
    assert await assert_rebuilds(walk) == 6


async def test_a_cache_that_is_gone_is_made_good_however_few_attempts_are_allowed(
    strata_server: StrataServer, server_settings: Settings, emulated: EmulatedProviders, clock: MovedClock
) -> None:
    once = server_settings.model_copy(update={"turn_attempts": 1})
    async with emulated.open(once) as providers, open_program(emulated.point(once), providers=providers) as program:
        walk = await begin_walk(program, strata_server.tenant.id, emulated, GEMINI, instructions=LONG, settings=ON)
        await ask(walk)
        clock.ahead_seconds += 7_200
        call = await ask(walk)
        assert call.start.attempt == 2


async def test_erasing_the_last_user_removes_the_cache_at_the_provider(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    await ask(walk)
    other = await again(walk)
    await ask(other)
    program, keeper = walk.program, walk.program.cache_maintainer
    await program.store.erase_conversation(walk.tenant_id, walk.conversation_id)
    assert await keeper.sweep() == 0
    assert is_cached(await ask(other))
    report = await program.store.erase_conversation(walk.tenant_id, other.conversation_id)
    assert report.rows["provider_caches"] == 1
    assert await keeper.sweep() == 1
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "DELETE"]
    assert await rows(program, "provider_caches") == 0


async def test_the_end_of_an_epoch_is_the_end_of_its_cache(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    await ask(walk)
    assert is_cached(await ask(walk))
    await walk.switch(GEMINI, instructions=Instructions(roles="Otherwise. " * 2_500), settings={})
    changed = await ask(walk)
    assert not is_cached(changed)
    assert changed.end is not None
    assert changed.end.cache_miss_reason == "epoch_began"
    assert await walk.program.cache_maintainer.sweep() == 1
    assert [method for method, _ in asked_about_caches(emulated)] == ["POST", "DELETE"]
    assert await rows(walk.program, "provider_cache_uses") == 0


async def test_a_cache_whose_maker_died_is_found_by_its_label_among_many(
    strata_server: StrataServer, emulated: EmulatedProviders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made at the provider, and never registered: the place of it is all that is known."""
    monkeypatch.setattr("server.providers.gemini.caches._PAGE_SIZE", 2)
    program = strata_server.program
    walk = await begin(strata_server, emulated, settings={"cache": {"explicit": "off"}})
    await ask(walk)
    caches = program.providers.by_name[GEMINI].caches
    assert caches is not None
    payload = build_payload(MODELS[GEMINI], [], static_text="You help. " * 2_500)
    key = CacheKey(
        provider=GEMINI, account=program.providers.by_name[GEMINI].account, model=MODELS[GEMINI], prefix_hash=b"p"
    )
    place = await PostgresCacheRegister(program.database).reserve_cache(
        walk.tenant_id, key, token_count=1, expires_at=datetime.now(UTC) + timedelta(hours=1), fits=lambda _: True
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


async def test_a_cache_whose_time_is_over_is_forgotten(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    await ask(walk)
    async with walk.program.database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET expires_at = now() - interval '1 second'")
    assert await walk.program.cache_maintainer.sweep() == 0
    assert await rows(walk.program, "provider_caches") == await rows(walk.program, "provider_cache_uses") == 0


async def test_by_itself_a_cache_is_made_when_the_calls_have_shown_that_it_pays(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated, settings={})
    made = [is_cached(await ask(walk)) for _ in range(6)]
    assert made == [False, False, False, False, True, True]


async def test_what_the_implicit_cache_gives_is_not_paid_for(
    server_settings: Settings, strata_server: StrataServer
) -> None:
    del strata_server
    async with (
        emulating_both() as both,
        both.open(server_settings) as providers,
        open_program(both.point(server_settings), providers=providers) as program,
    ):
        tenant = await program.key_ring.create_tenant("other")
        walk = await begin_walk(program, tenant.id, both, GEMINI, instructions=LONG)
        for _ in range(8):
            await ask(walk)
        assert asked_about_caches(both) == []


UNWANTED: list[dict[str, Any]] = [
    {"settings": {"cache": {"explicit": "off"}}},
    {"settings": {**ON, "layer_order": "append_only"}},
    {"settings": {**ON, "extra": {"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}}},
    {"model": "gemini-4-argon", "settings": {}},
    {"instructions": Instructions(roles="Short.")},
]


async def test_where_a_cache_is_not_wanted_none_is_made(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    for changes in UNWANTED:
        walk = await begin(strata_server, emulated, **changes)
        assert not any([is_cached(await ask(walk)) for _ in range(3)])
    assert asked_about_caches(emulated) == []
    assert_all_accepted(emulated.gemini.requests())


async def test_beyond_the_budget_for_storage_none_is_made(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    """Some six thousand tokens at 4.50 USD per million and hour: the first fits, the second does not."""
    settings = strata_server.program.settings.model_copy(update={"cache_storage_usd_per_hour": 0.04})
    async with open_program(settings, providers=strata_server.program.providers) as program:
        first, second = [
            await begin_walk(program, strata_server.tenant.id, emulated, GEMINI, instructions=text, settings=ON)
            for text in (LONG, Instructions(roles="You help otherwise. " * 1_250))
        ]
        assert [is_cached(await ask(first)) for _ in range(2)] == [False, True]
        assert [is_cached(await ask(second)) for _ in range(2)] == [False, False]
    assert asked_about_caches(emulated) == [("POST", "")]
