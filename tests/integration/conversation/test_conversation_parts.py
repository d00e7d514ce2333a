"""The page of a conversation over HTTP: access, and the data that completes it."""

import json
import re
from collections.abc import AsyncIterator

import pytest

from server.conversation.api_key import Scope
from server.inspection.timeline import TIMELINE_BYTES
from server.providers.choice import GEMINI
from server.web.admin.conversation_pages import BriefReader
from tests.conftest import StrataServer
from tests.support.builders import accept, create_conversation, take_exchange, user_input
from tests.support.conversation_driver import PICTURE, PNG, ConversationDriver, start_driver, text_reply
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import open_api
from tests.support.page_driver import Operator, open_operator


@pytest.fixture
async def operator(strata_server: StrataServer) -> AsyncIterator[Operator]:
    async with open_operator(strata_server.url) as opened:
        await opened.log_in(strata_server.admin_key)
        yield opened


async def drive_conversation(server: StrataServer, emulated: EmulatedProviders) -> ConversationDriver:
    driver = await start_driver(server.program, server.tenant.id, emulated, GEMINI)
    await driver.change(context={"todos": ["stay"]})
    await driver.task("Look at this.", text_reply("Cold and wet."), picture=True, args={"tone": "formal"})
    return driver


async def test_a_conversation_is_visible_only_to_its_tenant_and_to_a_super_admin(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator
) -> None:
    driver = await drive_conversation(strata_server, emulated)
    at = f"/admin/conversations/{driver.conversation_id}"
    paths = {
        at: "text/html",
        f"{at}/turns/2/events": "text/event-stream",
        f"{at}/images/{PICTURE.sha256}": "image/png",
        f"{at}/turns/1/whole/0": "text/plain",
        f"{at}/turns/1/whole/args": "text/plain",
        f"{at}/turns/2/whole/context": "text/plain",
        f"{at}/whole/context": "text/plain",
    }
    for path, media_type in paths.items():
        answer = await operator.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].startswith(media_type)

    other = await strata_server.key_ring.create_tenant("other")
    for scope, status in ((Scope.ADMIN, 404), (Scope.SUPERADMIN, 200)):
        _, key = await strata_server.key_ring.create_key(
            tenant_id=other.id, name=scope, scopes=frozenset({scope}), expires_at=None
        )
        async with open_operator(strata_server.url) as stranger:
            assert (await stranger.get(at)).status_code == 303
            await stranger.log_in(key)
            assert {path: (await stranger.get(path)).status_code for path in paths} == dict.fromkeys(paths, status)
            page = (await stranger.get(at)).text
            assert ("<dt>Tenant</dt><dd><bdi>acme</bdi>" in page) is (scope is Scope.SUPERADMIN)


async def test_a_turn_is_streamed_from_any_event_on(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator
) -> None:
    driver = await drive_conversation(strata_server, emulated)
    path = f"/admin/conversations/{driver.conversation_id}/turns/2/events"
    whole = (await operator.get(path)).text
    numbers = re.findall(r"^id: (\d+)$", whole, re.MULTILINE)
    assert "event: turn.completed" in whole

    resumed = (await operator.get(path, **{"last-event-id": numbers[1]})).text
    assert re.findall(r"^id: (\d+)$", resumed, re.MULTILINE) == numbers[2:]
    # Nothing is left: this prevents a browser from reconnecting.
    assert (await operator.get(path, **{"last-event-id": numbers[-1]})).status_code == 204
    assert (await operator.get(path.replace("/2/", "/4/"))).status_code == 404


async def test_an_image_opened_separately_has_no_effect(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator
) -> None:
    driver = await drive_conversation(strata_server, emulated)
    answer = await operator.get(f"/admin/conversations/{driver.conversation_id}/images/{PICTURE.sha256}")
    assert answer.content == PNG
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"].startswith("private")


async def test_background_calls_are_listed_and_a_turn_that_runs_elsewhere_is_linked(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator
) -> None:
    driver = await drive_conversation(strata_server, emulated)
    async with driver.program.database.connection() as connection:
        await connection.execute("UPDATE calls SET turn_seq = -1")
    await accept(driver.program.store, driver.tenant_id, user_input(driver.conversation_id))
    at = f"/admin/conversations/{driver.conversation_id}"

    newest = (await operator.get(at)).text
    assert f'<a href="{at}/calls/-1/1">' in newest
    assert f'data-live="{at}/turns/4/events"' in newest
    part = (await operator.get(f"{at}?before=2")).text
    assert "data-live" not in part
    assert "Turn 4 is running" in part


async def test_the_api_has_past_contexts_and_reasons_of_epochs(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await drive_conversation(strata_server, emulated)
    await driver.change(args={"tone": "stern"}, context={})
    await driver.task("And now?", text_reply("Warm."))
    async with open_api(strata_server, strata_server.admin_key) as admin:
        path = f"/admin/api/conversations/{driver.conversation_id}"
        timeline = await admin.expect(200, "GET", path)
        await admin.expect(422, "GET", f"{path}?after=1&before=2")
        assert [item["turn"]["seq"] for item in (await admin.expect(200, "GET", f"{path}?before=3"))["turns"]] == [1, 2]
    by_seq = {item["turn"]["seq"]: item for item in timeline["turns"]}
    assert by_seq[1]["args"] == {"tone": "formal"}
    assert by_seq[2]["context"]["todos"] == ["stay"]
    assert by_seq[4]["context"]["todos"] == []
    assert [by_seq[seq]["context_changed"] for seq in (1, 2, 3, 4)] == [False, True, False, True]
    began = [(mark["epoch"], mark["reason"], mark["args"]) for mark in timeline["call_epochs"]]
    assert began == [(1, "started", {}), (2, "arguments_changed", {"tone": "stern"})]
    assert timeline["last_seq"] == 4


async def test_the_page_shows_the_args_that_a_static_text_was_rendered_with(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator
) -> None:
    driver = await drive_conversation(strata_server, emulated)
    await driver.change(args={"tone": "stern"})
    await driver.task("And now?", text_reply("Warm."))
    at = f"/admin/conversations/{driver.conversation_id}"
    page = (await operator.get(at)).text
    shown = re.findall(r"Args of the conversation, from here</summary><pre[^>]*>([^<]*)", page)
    assert shown == ["{&#34;tone&#34;: &#34;stern&#34;}"]
    assert json.loads((await operator.get(f"{at}/turns/4/whole/conversation_args")).text) == {"tone": "stern"}
    assert (await operator.get(f"{at}/turns/9/whole/conversation_args")).status_code == 404


async def test_a_listener_is_disconnected_after_a_while_and_may_reconnect(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await drive_conversation(strata_server, emulated)
    handle = await driver.program.turn_service.follow_turn(driver.tenant_id, driver.conversation_id, 2)
    assert await BriefReader(handle.read(), seconds=60).next(1)
    assert await BriefReader(handle.read(), seconds=0).next(1) is None


async def test_very_large_turns_are_shown_on_smaller_pages(strata_server: StrataServer, operator: Operator) -> None:
    store, tenant_id = strata_server.program.store, strata_server.tenant.id
    conversation = await create_conversation(store, tenant_id)
    # Incompressible text would take long to create, so the amount alone exceeds the limit.
    text = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(TIMELINE_BYTES // 4))
    for _ in range(3):
        await take_exchange(store, tenant_id, conversation.id, text=text, reply="Much.")
    at = f"/admin/conversations/{conversation.id}"

    async def shown(query: str = "") -> tuple[list[int], str]:
        page = (await operator.get(f"{at}{query}")).text
        assert len(page) < 200_000
        return [int(seq) for seq in re.findall(r'id="turn-(\d+)"', page)], page

    seqs, page = await shown()
    assert seqs[-1] == 6
    assert len(seqs) < 6
    assert f"{at}?before={seqs[0]}" in page
    earlier, _ = await shown(f"?before={seqs[0]}")
    assert earlier[-1] == seqs[0] - 1
    assert 3 in (await shown("?around=3"))[0]


@pytest.mark.parametrize("query", ["?after=x", "?after=1&before=2", "?around=-1", "?jump=x"])
async def test_an_invalid_position_is_named(strata_server: StrataServer, operator: Operator, query: str) -> None:
    conversation = await create_conversation(strata_server.program.store, strata_server.tenant.id)
    assert (await operator.get(f"/admin/conversations/{conversation.id}{query}")).status_code == 422
    assert (await operator.get(f"/admin/conversations/{conversation.id}")).status_code == 200
