"""The page of a call over HTTP: every kind of call has one, its size is bounded, and it is visible to its tenant
only.
"""

import hashlib
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from server.conversation.api_key import Scope
from server.conversation.manifest import encode_manifest
from server.conversation.payload import Layer, ManifestEntry
from server.emulator.reply import FaultKind, Reply
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from tests.conftest import StrataServer
from tests.support.builders import accept, call_start, user_input
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.page_driver import Operator, open_operator

LARGEST_PAGE = 1_000_000


@pytest.fixture
async def operator(strata_server: StrataServer) -> AsyncIterator[Operator]:
    async with open_operator(strata_server.url) as opened:
        await opened.log_in(strata_server.admin_key)
        yield opened


async def drive_conversation(server: StrataServer, emulated: EmulatedProviders, provider: str) -> ConversationDriver:
    return await start_driver(server.program, server.tenant.id, emulated, provider)


def path_of(driver: ConversationDriver, turn_seq: int, attempt: int = 1) -> str:
    return f"/admin/conversations/{driver.conversation_id}/calls/{turn_seq}/{attempt}"


async def page_of(operator: Operator, path: str) -> str:
    """The text of a page with normalised white space."""
    answer = await operator.get(path)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) < LARGEST_PAGE
    return " ".join(re.sub(r"<[^>]*>", " ", answer.text).split())


async def run(database: Database, statement: str) -> None:
    async with database.connection() as connection:
        await connection.execute(statement)


@pytest.mark.parametrize("provider", BOTH)
async def test_bytes_and_numbers_are_downloaded_unchanged(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator, provider: str
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)
    await driver.task("How is Oslo?", tool_reply("Oslo"), text_reply("Cold."))
    call = (await driver.calls())[1]
    assert call.end is not None

    request = await operator.get(f"{path_of(driver, 4)}/request")
    assert hashlib.sha256(request.content).digest() == call.start.request_hash
    assert request.headers["x-strata-proof"] == "equal"
    response = await operator.get(f"{path_of(driver, 4)}/response")
    assert response.content == call.end.raw_response
    document = await operator.get(f"{path_of(driver, 4)}/json")
    assert json.loads(document.content)["request"]["proof"] == "equal"
    for answer in (request, response, document):
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("provider", "fault", "after_chunks", "explanation"),
    [
        (GEMINI, FaultKind.BAD_AUTH, 0, "provider_authentication"),
        (GEMINI, FaultKind.CONTEXT_EXCEEDED, 0, "context_too_long"),
        (ANTHROPIC, FaultKind.CUT, 4, "provider_disconnected"),
        (GEMINI, FaultKind.EMPTY_STREAM, 0, "provider_empty"),
        (GEMINI, FaultKind.MALFORMED_JSON, 1, "provider_malformed"),
    ],
)
async def test_a_failed_call_has_its_reason(
    strata_server: StrataServer,
    emulated: EmulatedProviders,
    operator: Operator,
    provider: str,
    fault: FaultKind,
    after_chunks: int,
    explanation: str,
) -> None:
    driver = await drive_conversation(strata_server, emulated, provider)
    emulated[provider].inject_fault(fault, times=9, after_chunks=after_chunks)
    await driver.task("How is Oslo?", Reply(text="Cold and wet and grey."))
    last = (await driver.calls())[-1]

    text = await page_of(operator, path_of(driver, 2, last.start.attempt))
    assert f"✕ Failed {explanation}" in text
    assert "✓ Proven" in text


async def test_a_cancelled_a_running_and_a_lost_call_are_shown(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator, database: Database
) -> None:
    driver = await drive_conversation(strata_server, emulated, GEMINI)
    await driver.cancel("How is Oslo?", text_reply("Cold and wet and grey."), after_events=2)
    assert "■ Stopped" in await page_of(operator, path_of(driver, 2))

    manifest = encode_manifest(
        [ManifestEntry(layer=Layer.TRIGGER, kind="message", role="user", hash="ab" * 16, length=5, seq=3)]
    )
    accepted = await accept(driver.program.store, driver.tenant_id, user_input(driver.conversation_id, "And now?"))
    await driver.program.store.begin_call(accepted.lease, call_start(manifest=manifest, started_at=datetime.now(UTC)))
    running = await page_of(operator, path_of(driver, 4))
    assert "… Running" in running
    assert "Known when the call has ended." in running

    # As if the process had died, and another had ended the turn.
    await run(database, "UPDATE calls SET ended_at = NULL WHERE turn_seq = 2")
    assert "✕ Lost" in await page_of(operator, path_of(driver, 2))


async def test_a_call_without_its_bytes_provider_or_turns_is_shown(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator, database: Database
) -> None:
    driver = await drive_conversation(strata_server, emulated, ANTHROPIC)
    await driver.task("How is Oslo?", tool_reply("Oslo"), text_reply("Cold."))
    await run(database, "UPDATE calls SET raw_response = NULL WHERE turn_seq = 2")
    gone = await page_of(operator, path_of(driver, 2))
    assert "Retention has removed the bytes." in gone
    assert "✓ Proven" in gone
    assert (await operator.get(f"{path_of(driver, 2)}/response")).content == b""

    await run(database, "UPDATE turns SET native = 'no json' WHERE seq = 2")
    damaged = await page_of(operator, path_of(driver, 4))
    assert "? Cannot be rebuilt" in damaged
    assert "stored_unreadable" in damaged

    await run(database, "UPDATE calls SET provider = 'acme', model = 'acme-1'")
    unknown = await page_of(operator, path_of(driver, 4))
    assert "? Cannot be rebuilt" in unknown
    assert "provider_unknown This release does not support the provider." in unknown
    assert "The price of acme-1 is not known" in unknown
    assert (await operator.get(f"{path_of(driver, 4)}/request")).headers["x-strata-proof"] == "impossible"


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_a_huge_request_with_a_long_answer_is_a_page_of_bounded_size(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator
) -> None:
    driver = await drive_conversation(strata_server, emulated, GEMINI)
    # Each of these characters becomes eight on a page.
    await driver.task("\u202e" * 1_000_000, Reply(text='"< ' * 4000))
    for number in range(4):
        await driver.task(f"{number} " + "'\"<>&" * 20_000, Reply(text="\x1b&" * 20_000))
    await driver.change(context={"artifacts": [f"\u2066{number}" * 5_000 for number in range(20)]})
    await driver.task("And now?", Reply(text="Done."))

    text = await page_of(operator, path_of(driver, 2))
    assert "events are not shown." in text
    assert "frames are not shown." in text
    assert re.search("[0-9]{2},[0-9]{3} more characters", await page_of(operator, path_of(driver, 12)))
    response = await operator.get(f"{path_of(driver, 2)}/response")
    assert response.content == (await driver.calls())[0].end.raw_response  # type: ignore[union-attr]  # reason: it has ended


async def test_a_call_of_another_tenant_has_no_page_and_a_super_admin_sees_it(
    strata_server: StrataServer, emulated: EmulatedProviders, operator: Operator
) -> None:
    driver = await drive_conversation(strata_server, emulated, GEMINI)
    await driver.task("How is Oslo?", text_reply("Cold."))
    other = await strata_server.key_ring.create_tenant("other")
    for scope, status in ((Scope.ADMIN, 404), (Scope.SUPERADMIN, 200)):
        _, key = await strata_server.key_ring.create_key(
            tenant_id=other.id, name="theirs", scopes=frozenset({scope}), expires_at=None
        )
        async with open_operator(strata_server.url) as stranger:
            assert (await stranger.get(path_of(driver, 2))).status_code == 303
            await stranger.log_in(key)
            for part in ("", "/request", "/response", "/json"):
                assert (await stranger.get(f"{path_of(driver, 2)}{part}")).status_code == status, (scope, part)
    for path in (
        path_of(driver, 4),
        path_of(driver, -1),
        path_of(driver, 2, 9),
        "/admin/conversations/conv_x/calls/2/1",
    ):
        assert (await operator.get(path)).status_code == 404
