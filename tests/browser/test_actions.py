"""Actions of operators in a browser: each asks for confirmation and is audited."""

import asyncio
import json
from pathlib import Path

import pytest
from playwright.async_api import expect

from server.conversation.errors import ConversationNotFound
from server.emulator.reply import FaultKind
from server.providers.choice import GEMINI
from tests.browser.conftest import Visit
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply, until_asked
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_service_driver import user_task

EAGER = {"compaction": {"policy": "threshold", "max_tokens": 1, "keep_exchanges": 1}}


async def test_each_action_asks_for_confirmation_and_is_recorded_in_the_audit_log(
    visit: Visit, emulated: EmulatedProviders, tmp_path: Path
) -> None:
    driver = await start_driver(visit.server.program, visit.server.tenant.id, emulated, GEMINI, settings=EAGER)
    for number in range(1, 4):
        await driver.task(
            f"Where is order {number}?", tool_reply("Oslo"), text_reply(f"Order {number} is on its way. " * 20)
        )
    await visit.log_in()
    fork_id = await fork(visit, driver)
    await compact_and_undo(visit, driver)
    await cancel(visit, driver)
    await export(visit, driver, tmp_path / "conversation.jsonl")
    await delete(visit, driver)
    await read_the_log(visit, driver, fork_id)


async def fork(visit: Visit, driver: ConversationDriver) -> str:
    page = visit.page
    await visit.go(f"{page_of(driver)}/fork?at_seq=12")
    await expect(page.get_by_text("Order 3 is on its way.")).to_be_visible()
    await visit.look("fork")
    await page.get_by_label("Up to and including turn").fill("5")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("Where is order 2?")).to_be_visible()
    await expect(page.get_by_text("This turn is an input.")).to_be_visible()
    await page.get_by_role("button", name="Fork at turn 5").click()
    await expect(page.get_by_role("status")).to_contain_text("This is the fork.")
    fork_id = page.url.partition("?")[0].rpartition("/")[2]
    made = await driver.program.store.load_conversation(driver.tenant_id, fork_id)
    assert made.forked_from is not None
    assert (made.forked_from.conversation_id, made.forked_from.seq) == (driver.conversation_id, 5)
    return fork_id


async def compact_and_undo(visit: Visit, driver: ConversationDriver) -> None:
    page = visit.page
    # By force, after showing what the policy would do.
    await visit.go(f"{page_of(driver)}/compact")
    await expect(page.get_by_role("row", name="By policy").locator("[data-label=Turns]")).to_have_text("1 to 8")
    await visit.look("compact")
    await page.get_by_label("Force: move every exchange that may be moved").check()
    await page.get_by_role("button", name="Compact").click()
    await expect(page.get_by_role("status")).to_contain_text("Compacted")
    assert (
        await driver.program.store.load_conversation(driver.tenant_id, driver.conversation_id)
    ).buffer_start_seq == 9
    await page.get_by_role("link", name="Compact", exact=True).click()
    await expect(page.get_by_text("Neither the policy nor force would move anything.")).to_be_visible()

    await page.get_by_role("link", name="Back to the conversation").click()
    await page.get_by_role("link", name="Undo the compaction").click()
    await expect(page.get_by_text("begins at turn 9")).to_be_visible()
    await visit.look("undo")
    await page.get_by_role("button", name="Undo the compaction").click()
    await expect(page.get_by_role("status")).to_contain_text("The compaction was undone.")
    await expect(page.get_by_role("link", name="Undo the compaction")).to_have_count(0)
    await visit.go(f"{page_of(driver)}/undo")
    await expect(page.get_by_text("There is no compaction to undo")).to_be_visible()


async def cancel(visit: Visit, driver: ConversationDriver) -> None:
    page = visit.page
    await visit.go(f"{page_of(driver)}/cancel")
    await expect(page.get_by_text("No turn is running.")).to_be_visible()
    for name in BOTH:
        driver.emulated[name].queue_replies(text_reply("This takes its time."))
        driver.emulated[name].inject_fault(FaultKind.SILENCE, after_chunks=1)
    await driver.program.turn_service.take_turn(
        driver.tenant_id, user_task(driver.conversation_id, "Where is order 4?")
    )
    await until_asked(driver.emulated)
    await visit.go(f"{page_of(driver)}/erase")
    await expect(page.get_by_text("can be deleted after it has ended")).to_be_visible()
    await page.get_by_role("link", name="Cancel it").click()
    await visit.look("cancel")
    await page.get_by_role("button", name="Cancel turn 14").click()
    await expect(page.get_by_role("status")).to_contain_text("The turn was cancelled.")
    driver.calm()


async def export(visit: Visit, driver: ConversationDriver, file: Path) -> None:
    page = visit.page
    await page.get_by_role("link", name="Export").click()
    await visit.look("export")
    async with page.expect_download() as begun:
        await page.get_by_role("button", name="Download the file").click()
    download = await begun.value
    assert download.suggested_filename == f"{driver.conversation_id}.jsonl"
    await download.save_as(file)
    lines = await asyncio.to_thread(file.read_text)
    assert json.loads(lines.splitlines()[-1]) == {"record": "close", "conversations": 1}
    await page.get_by_role("link", name="Back to the conversation").click()


async def delete(visit: Visit, driver: ConversationDriver) -> None:
    """The first attempt has a typing mistake."""
    page = visit.page
    await page.get_by_role("link", name="Delete").click()
    await expect(page.get_by_role("row", name="Turns turns")).to_contain_text("14")
    visit.refusals.add(422)
    await page.get_by_label("Type or paste the conversation's id").fill("conv_x")
    await page.get_by_role("button", name="Delete permanently").click()
    await expect(page.get_by_role("alert")).to_contain_text("Nothing was deleted.")
    await visit.look("erase")
    await page.get_by_label("Type or paste the conversation's id").fill(driver.conversation_id)
    await page.get_by_role("button", name="Delete permanently").click()
    await expect(page.get_by_role("status")).to_contain_text("The conversation and all its data were deleted")
    with pytest.raises(ConversationNotFound):
        await driver.program.store.load_conversation(driver.tenant_id, driver.conversation_id)


async def read_the_log(visit: Visit, driver: ConversationDriver, fork_id: str) -> None:
    """The audit log outlives the conversation."""
    page = visit.page
    await visit.go(f"/admin/audit?object={driver.conversation_id}")
    actions = page.locator("#results tbody td[data-label=Action]")
    await expect(actions).to_have_text(
        [
            "Conversation deleted",
            "Conversation exported",
            "Turn cancelled",
            "Compaction undone",
            "Conversation compacted",
            "Conversation forked",
        ]
    )
    await expect(page.get_by_role("link", name=fork_id)).to_be_visible()
    await visit.look("audit-of-a-conversation")
    await page.get_by_label("Action").select_option("Turn cancelled")
    await page.get_by_role("button", name="Filter").click()
    await expect(actions).to_have_text(["Turn cancelled"])
    visit.refusals.add(404)
    await page.get_by_role("link", name=driver.conversation_id).click()
    await expect(page.get_by_role("alert")).to_contain_text("It may have been deleted")


def page_of(driver: ConversationDriver) -> str:
    return f"/admin/conversations/{driver.conversation_id}"
