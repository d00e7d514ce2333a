"""The page of a call, in a browser."""

import re

import pytest
from playwright.async_api import expect

from server.emulator.reply import FaultKind, Reply
from server.postgres.engine import Database
from server.providers.choice import ANTHROPIC, GEMINI
from tests.browser.conftest import Visit
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import BOTH, EmulatedProviders

LONG = "The harbour opens at six and closes at nine. " * 900
HOSTILE = "<img src=x onerror=alert(1)> \u202edlrow \x1b[31m </pre></details>"


async def drive_conversation(
    visit: Visit, emulated: EmulatedProviders, provider: str, **changes: object
) -> ConversationDriver:
    return await start_driver(visit.server.program, visit.server.tenant.id, emulated, provider, **changes)


async def open_call(visit: Visit, driver: ConversationDriver, turn_seq: int, attempt: int = 1) -> None:
    await visit.go(f"/admin/conversations/{driver.conversation_id}/calls/{turn_seq}/{attempt}")


@pytest.mark.parametrize("provider", BOTH)
async def test_a_call_is_verified_compared_and_split_into_blocks(
    visit: Visit, emulated: EmulatedProviders, provider: str
) -> None:
    driver = await drive_conversation(visit, emulated, provider)
    await driver.task(HOSTILE, tool_reply("Oslo"), text_reply("Cold & wet."))
    await driver.change(context={"todos": ["pack"], "artifacts": [HOSTILE]})
    await driver.task("And <b>Bergen</b>?", text_reply(HOSTILE))
    await visit.log_in()
    await open_call(visit, driver, 6)
    page = visit.page

    await expect(page.locator("#outcome")).to_contain_text("✓ Answered end_turn")
    await expect(page.locator("#proof")).to_contain_text("✓ Proven")
    await expect(page.locator("#layers article")).to_have_count(4)
    await expect(page.locator("#bill .total")).to_contain_text("$0.0")
    await expect(page.locator("#signatures")).to_contain_text("present")
    if provider == GEMINI:
        await visit.look("call")
    for summary in await page.locator("summary").all():
        if await summary.is_visible():
            await summary.click()
    await expect(page.locator("#difference")).to_contain_text("pack")
    await expect(page.locator(".dump")).to_contain_text("00000000  ")
    await expect(page.locator("#answer .frames > li").first).to_be_visible()
    await expect(page.locator("#answer .events")).to_contain_text("text.delta")
    assert await page.locator("main img").count() == 0
    if provider == ANTHROPIC:
        await visit.look("call-open")

    # With the keyboard, and back.
    await page.get_by_role("link", name="Previous call").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("h1")).to_contain_text("turn 4")
    await page.get_by_role("link", name="Next call").click()
    async with page.expect_download() as sent:
        await page.get_by_role("link", name=re.compile("Download all [0-9,]+ bytes")).click()
    assert (await sent.value).suggested_filename == "request-6-1.bin"


async def test_a_request_that_differs_from_what_was_sent_is_reported_with_its_position(
    visit: Visit, emulated: EmulatedProviders, database: Database
) -> None:
    driver = await drive_conversation(visit, emulated, GEMINI)
    await driver.task("How is Oslo?", tool_reply("Oslo"), text_reply("Cold."))
    async with database.connection() as connection:
        await connection.execute(
            "UPDATE turns SET native = replace(encode(native, 'escape'), 'Oslo', 'Rome')::bytea WHERE seq = 2"
        )
        await connection.execute(
            "UPDATE turns SET blocks = (SELECT jsonb_agg(block - 'signature') FROM jsonb_array_elements(blocks) block) "
            "WHERE seq = 2"
        )
        await connection.execute(
            """UPDATE calls SET warnings = '[{"kind": "signatures_withheld", "reason": "unsigned", "seqs": [2]}]'
            WHERE turn_seq = 4"""
        )
    await visit.log_in()
    await open_call(visit, driver, 4)
    proof = visit.page.locator("#proof")
    await expect(proof).to_contain_text("✕ Different")
    hashes = await proof.locator("dd code").all_text_contents()
    assert len(set(hashes)) == 2
    await proof.get_by_role("link", name="number 5").click()
    await expect(visit.page.locator("#block-5")).to_contain_text("differs")
    await expect(visit.page.locator("#request")).to_contain_text("Not the request that was sent")
    # Problems come first.
    await expect(visit.page.locator("#signatures tbody tr").first).to_contain_text("missing")
    await visit.look("call-different")
    await visit.page.set_viewport_size({"width": 360, "height": 740})
    assert await visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_a_retried_and_then_switched_turn_shows_errors_signatures_and_the_cache_miss(
    visit: Visit, emulated: EmulatedProviders
) -> None:
    driver = await drive_conversation(visit, emulated, ANTHROPIC)
    await driver.task(LONG, text_reply("Noted."))
    emulated[ANTHROPIC].inject_fault(FaultKind.OVERLOADED, times=1)
    await driver.task("And now?", text_reply("Still noted."))
    await driver.switch(GEMINI)
    await driver.task("And elsewhere?", Reply(text="Here too."))
    await visit.log_in()
    page = visit.page
    await open_call(visit, driver, 4)
    await expect(page.locator("#outcome")).to_contain_text("✕ Failed provider_overloaded")
    await expect(page.locator("#attempts tbody tr")).to_have_count(2)
    await expect(page.locator("#answer")).to_contain_text("The provider's error")
    await visit.look("call-failed")
    await page.locator("#attempts").get_by_role("link", name="2").click()
    await expect(page.locator("h1")).to_contain_text("attempt 2 of 2")
    await expect(page.locator("#cache")).to_contain_text("As expected")

    await open_call(visit, driver, 6)
    await expect(page.locator("#signatures")).to_contain_text("withheld another provider made it")
    await expect(page.locator("#cache")).to_contain_text("model_changed")
    await expect(page.locator("#notes")).to_contain_text("signatures_withheld")
    await visit.look("call-switched")
