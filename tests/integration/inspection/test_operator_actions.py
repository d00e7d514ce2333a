"""Actions of operators on conversations, over HTTP and on pages: carried out once, audited, refused with a reason."""

import asyncio
import re
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx2
import pytest

from server.conversation.api_key import Scope
from server.conversation.audit import Action, AuditEntry, AuditFilter
from server.emulator.reply import FaultKind
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog
from server.postgres.store import PostgresStore
from server.providers.choice import GEMINI
from tests.conftest import StrataServer
from tests.support.builders import accept, call_end, create_conversation, take_exchange, user_input
from tests.support.conversation_driver import ConversationDriver, eventually, start_driver, text_reply, until_asked
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.http_driver import open_api
from tests.support.page_driver import Operator, admin_key_of, open_operator
from tests.support.turn_service_driver import user_task

EAGER = {"compaction": {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1}}


@pytest.fixture
async def driver(strata_server: StrataServer, emulated: EmulatedProviders) -> ConversationDriver:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, GEMINI, settings=EAGER)
    for number in range(3):
        await driver.task(f"Task {number}.", text_reply("Done. " * 20))
    return driver


@pytest.fixture
async def operator(strata_server: StrataServer) -> AsyncIterator[Operator]:
    async with open_operator(strata_server.url) as opened:
        await opened.log_in(strata_server.admin_key)
        yield opened


async def list_audited(database: Database, conversation_id: str) -> list[AuditEntry]:
    """The log of a conversation, oldest first."""
    page = await PostgresAuditLog(database).list_entries(None, AuditFilter(object_id=conversation_id))
    return list(reversed(page.items))


# --- as JSON


async def test_the_admin_api_has_the_actions_of_clients_and_logs_them(
    strata_server: StrataServer, driver: ConversationDriver, database: Database
) -> None:
    here = f"/admin/api/conversations/{driver.conversation_id}"
    async with open_api(strata_server, strata_server.admin_key) as api:
        answer = await api.ask("POST", f"{here}/fork", {"at_seq": 2})
        fork = answer.json()
        assert (answer.status_code, answer.headers["location"]) == (201, f"/admin/api/conversations/{fork['id']}")
        assert fork["forked_from"] == {"conversation_id": driver.conversation_id, "seq": 2}

        planned = await api.expect(200, "POST", f"{here}/compactions", {"dry_run": True})
        done = await api.expect(200, "POST", f"{here}/compactions", {"force": True})
        assert (planned["dry_run"], planned["last_seq"]) == (True, done["last_seq"]) == (True, 4)
        assert (await api.expect(200, "POST", f"{here}/compactions", {}))["outcome"] == "unchanged"
        assert (await api.expect(200, "DELETE", f"{here}/compactions/latest"))["outcome"] == "undone"
        assert (await api.expect(409, "POST", f"{here}/cancel", {"turn_seq": 2}))["code"] == "turn_not_running"

        doomed = await api.expect(200, "DELETE", f"{here}?dry_run=true")
        assert doomed["stored_bytes"] > 1000
        assert (await api.expect(200, "DELETE", here))["rows"] == doomed["rows"]
        assert (await api.expect(404, "DELETE", here))["code"] == "conversation_not_found"
    entries = await list_audited(database, driver.conversation_id)
    assert [(entry.action, entry.outcome, entry.details.get("code")) for entry in entries] == [
        (Action.FORK, "done", None),
        (Action.COMPACT, "done", None),
        (Action.UNDO_COMPACTION, "done", None),
        (Action.CANCEL, "failed", "turn_not_running"),
        (Action.ERASE, "done", None),
        (Action.ERASE, "failed", "conversation_not_found"),
    ]
    key = await admin_key_of(strata_server)
    assert {(entry.actor.key_id, entry.actor.session_id, entry.actor.address) for entry in entries} == {
        (key.id, None, "127.0.0.1")
    }


async def test_a_running_turn_is_cancelled_and_its_partial_answer_is_kept(
    strata_server: StrataServer, driver: ConversationDriver, database: Database
) -> None:
    for name in BOTH:
        driver.emulated[name].queue_replies(text_reply("This takes its time."))
        driver.emulated[name].inject_fault(FaultKind.SILENCE, after_chunks=1)
    await driver.program.turn_service.take_turn(driver.tenant_id, user_task(driver.conversation_id, "Again."))
    await until_asked(driver.emulated)
    here = f"/admin/api/conversations/{driver.conversation_id}"
    async with open_api(strata_server, strata_server.admin_key) as api:
        assert (await api.expect(409, "POST", f"{here}/cancel", {"turn_seq": 2}))["code"] == "turn_not_running"
        ended = await api.expect(200, "POST", f"{here}/cancel")
    assert (ended["turn"]["seq"], ended["turn"]["state"]) == (8, "cancelled")
    assert [
        (entry.outcome, entry.details.get("seq")) for entry in await list_audited(database, driver.conversation_id)
    ] == [
        ("failed", None),
        ("done", 8),
    ]
    driver.calm()


async def test_keys_are_made_at_the_command_line_alone(strata_server: StrataServer) -> None:
    """A superadmin key can only be created with the credentials of the database."""
    async with open_api(strata_server) as api:
        paths = (await api.expect(200, "GET", "/schema"))["paths"]
    writing = {(method, path) for path, item in paths.items() if "/keys" in path for method in item if method != "get"}
    assert writing == {("delete", "/admin/api/keys/{key_id}")}
    # A key that the superadmin of another tenant created cannot be revoked from here either.
    other = await strata_server.key_ring.create_tenant("other")
    key, _ = await strata_server.key_ring.create_key(
        tenant_id=other.id, name="all", scopes=frozenset({Scope.SUPERADMIN}), expires_at=None
    )
    async with open_api(strata_server, strata_server.admin_key) as api:
        await api.expect(404, "DELETE", f"/admin/api/keys/{key.id}")


# --- on pages

ACTIONS = ("fork", "cancel", "compact", "undo", "export", "erase")


def form(conversation_id: str, **fields: str) -> dict[str, str]:
    return {"at_seq": "2", "turn_seq": "2", "force": "1", "confirmed_id": conversation_id, **fields}


async def state_of(store: PostgresStore, database: Database, tenant_id: str, conversation_id: str) -> tuple[Any, ...]:
    """The state that an action would change."""
    conversation = await store.load_conversation(tenant_id, conversation_id)
    page = await store.list_conversations(tenant_id)
    return conversation, len(page.items), [entry.action for entry in await list_audited(database, conversation_id)]


async def test_a_form_of_another_site_or_without_its_token_has_no_effect(
    strata_server: StrataServer,
    operator: Operator,
    store: PostgresStore,
    database: Database,
    driver: ConversationDriver,
) -> None:
    before = await state_of(store, database, driver.tenant_id, driver.conversation_id)
    token = await operator.csrf_token()
    for action in ACTIONS:
        path = f"/admin/conversations/{driver.conversation_id}/{action}"
        answers = [
            await operator.send(path, form(driver.conversation_id)),
            await operator.send(path, form(driver.conversation_id, csrf_token=token[:-1] + "x")),
            await operator.send(path, form(driver.conversation_id, csrf_token=token), origin="https://elsewhere.test"),
        ]
        assert [answer.status_code for answer in answers] == [403, 403, 403], action
        async with open_operator(strata_server.url) as visitor:
            assert (await visitor.get(path)).headers["location"].startswith("/admin/login")
            assert (await visitor.send(path, form(driver.conversation_id))).headers["location"] == "/admin/login"
            # A key is not accepted in place of a session.
            bearer = {"authorization": f"Bearer {strata_server.client_key}"}
            assert (await visitor.get(path, **bearer)).headers["location"].startswith("/admin/login")
    assert await state_of(store, database, driver.tenant_id, driver.conversation_id) == before


async def test_a_conversation_of_another_tenant_does_not_exist_except_for_a_superadmin(
    strata_server: StrataServer, store: PostgresStore, database: Database, driver: ConversationDriver
) -> None:
    other = await strata_server.key_ring.create_tenant("other")
    keys = [
        (
            await strata_server.key_ring.create_key(
                tenant_id=other.id, name=scope, scopes=frozenset({scope}), expires_at=None
            )
        )[1]
        for scope in (Scope.ADMIN, Scope.SUPERADMIN)
    ]
    here = f"/admin/conversations/{driver.conversation_id}"
    before = await state_of(store, database, driver.tenant_id, driver.conversation_id)
    async with open_operator(strata_server.url) as stranger:
        await stranger.log_in(keys[0])
        token = await stranger.csrf_token()
        for action in ACTIONS:
            assert (await stranger.get(f"{here}/{action}")).status_code == 404
            answer = await stranger.send(f"{here}/{action}", form(driver.conversation_id, csrf_token=token))
            assert (answer.status_code, "Back to the conversation" in answer.text) == (404, False)
    conversation, count, log = await state_of(store, database, driver.tenant_id, driver.conversation_id)
    assert (conversation, count) == before[:2]
    assert len(log) == len(ACTIONS)
    assert {entry.tenant_id for entry in await list_audited(database, driver.conversation_id)} == {other.id}

    before = await state_of(store, database, driver.tenant_id, driver.conversation_id)
    async with open_operator(strata_server.url) as superadmin:
        await superadmin.log_in(keys[1])
        token = await superadmin.csrf_token()
        page = (await superadmin.get(here)).text
        assert [action for action in ACTIONS if f'href="{here}/{action}"' in page] == ["export"]
        assert "not your own" in (await superadmin.get(f"{here}/export")).text
        for action in set(ACTIONS) - {"export"}:
            assert (await superadmin.get(f"{here}/{action}")).status_code == 403
            answer = await superadmin.send(f"{here}/{action}", form(driver.conversation_id, csrf_token=token))
            assert (answer.status_code, "other_tenant_read_only" in answer.text) == (403, True)
    conversation, count, _ = await state_of(store, database, driver.tenant_id, driver.conversation_id)
    assert (conversation, count) == before[:2]
    assert (await list_audited(database, driver.conversation_id))[-1].tenant_id == driver.tenant_id


async def test_an_impossible_action_is_a_page_with_a_remedy(
    operator: Operator, store: PostgresStore, driver: ConversationDriver
) -> None:
    here = f"/admin/conversations/{driver.conversation_id}"
    token = await operator.csrf_token()

    async def refused(action: str, **fields: str) -> tuple[int, str]:
        answer = await operator.send(f"{here}/{action}", form(driver.conversation_id, csrf_token=token, **fields))
        assert f'href="{here}">Back to the conversation' in answer.text
        code = re.search(r"<dt>Code</dt><dd><code>(\w+)", answer.text)
        assert code is not None
        return answer.status_code, code[1]

    assert await refused("cancel") == (409, "turn_not_running")
    assert await refused("undo") == (404, "compaction_not_found")
    for seq in ("99", "0", "-1", "two", "9" * 5000, ""):
        assert await refused("fork", at_seq=seq) == (404, "turn_not_found")
    assert (await operator.get(f"{here}/fork?at_seq=99")).status_code == 404
    await accept(store, driver.tenant_id, user_input(driver.conversation_id, "Again"))
    for action in ("erase", "export"):
        assert await refused(action) == (409, "conversation_busy")
        assert "after it has ended" in (await operator.get(f"{here}/{action}")).text
    assert f'href="{here}/cancel"' in (await operator.get(here)).text


async def test_a_notice_is_one_of_ours_or_none(operator: Operator) -> None:
    assert "were deleted" in (await operator.get("/admin/conversations?notice=erased")).text
    assert "Send me" not in (await operator.get("/admin/conversations?notice=Send+me+your+key")).text


# --- export


async def test_a_client_that_disconnects_during_an_export_leaves_nothing_behind(
    strata_server: StrataServer, store: PostgresStore, database: Database, operator: Operator
) -> None:
    """No connection is held and no task keeps reading."""
    conversation = await create_conversation(store, strata_server.tenant.id)
    random = Random(1)  # noqa: S311  reason: bytes that do not compress
    for number in range(24):
        end = call_end(raw_response=random.randbytes(1_000_000))
        await take_exchange(store, strata_server.tenant.id, conversation.id, f"Question {number}", end=end)
    token = await operator.csrf_token()
    pool = strata_server.program.database
    before = tasks()

    async def leave(client: httpx2.AsyncClient, method: str, path: str, **options: Any) -> None:
        async with client.stream(method, path, **options) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                break

    bearer = {"authorization": f"Bearer {strata_server.admin_key}"}
    for _ in range(3):
        async with httpx2.AsyncClient(base_url=strata_server.url) as client:
            await leave(client, "GET", f"/admin/api/conversations/{conversation.id}/export", headers=bearer)
        await leave(
            operator.client,
            "POST",
            f"/admin/conversations/{conversation.id}/export",
            data={"csrf_token": token},
            headers={"origin": strata_server.url},
        )

    async def quiet() -> bool:
        return pool.pool_counts()[1] == 0 and tasks() <= before

    await eventually(quiet)
    # Each of them is audited, because each returned the first lines.
    assert [entry.action for entry in await list_audited(database, conversation.id)] == [Action.EXPORT] * 6
    async with httpx2.AsyncClient(base_url=strata_server.url, timeout=60) as client:
        whole = await client.get(f"/admin/api/conversations/{conversation.id}/export", headers=bearer)
    assert whole.content.endswith(b'"conversations":1}\n')


def tasks() -> int:
    return len(asyncio.all_tasks())
