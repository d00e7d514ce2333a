"""One conversation in a browser: its turns, its compactions, and a running turn."""

import asyncio
import re
from dataclasses import dataclass, replace

from playwright.async_api import expect

from server.emulator.gemini.app import build_gemini_app
from server.emulator.latency import Latency
from server.emulator.reply import FaultKind, Reply, ToolCall
from server.postgres.engine import Database
from server.postgres.inspection.search_index import index_all
from server.providers.choice import GEMINI
from tests.browser.conftest import Visit
from tests.support.builders import create_conversation, take_exchange
from tests.support.compaction_driver import NARROW, build_compactor
from tests.support.conversation_driver import ConversationDriver, start_driver, text_reply, tool_reply
from tests.support.emulators import BOTH, EmulatedProviders, Stages
from tests.support.fakes.compaction_observer import Observed
from tests.support.turn_service_driver import user_task

STORY = "The quick brown fox jumps over the lazy dog. " * 6


async def drive_conversation(visit: Visit, emulated: EmulatedProviders) -> ConversationDriver:
    """Drive a conversation with tools, an image, a changing context, a compaction, a failure and a repeated call."""
    server = visit.server
    driver = await start_driver(server.program, server.tenant.id, emulated, GEMINI, settings=NARROW)
    await driver.task(f"What do you see? {STORY}", text_reply("A dot. " + STORY), picture=True)
    await driver.change(context={"todos": ["book a hotel", "pack"]}, metadata={"ticket": 4711})
    await driver.task(
        "How is Oslo?", tool_reply("Oslo", "Bergen"), text_reply("Cold, both. " + STORY), args={"tone": "formal"}
    )
    compactor = build_compactor(server.program, Observed())
    await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
    for name in BOTH:
        emulated[name].inject_fault(FaultKind.OVERLOADED)
    await driver.task("Once more?", text_reply("Gladly."))
    await driver.fail("Broken.", text_reply("One two three four five."), after_chunks=3)
    return driver


async def test_a_conversation_is_shown_from_its_head_to_its_last_turn(
    visit: Visit, database: Database, emulated: EmulatedProviders
) -> None:
    driver = await drive_conversation(visit, emulated)
    await index_all(database)
    page = visit.page
    await visit.log_in()
    await visit.go("/admin/conversations")
    await page.get_by_role("link", name=driver.conversation_id).click()

    turns = page.locator("#turns > .turn")
    await expect(turns).to_have_count(10)
    tiles = page.get_by_label("Totals")
    await expect(tiles).to_contain_text("10 turns")
    await expect(page.locator(".marks")).to_contain_text("provider_disconnected")

    image = page.locator("#turn-1 img")
    await image.scroll_into_view_if_needed()
    await expect(image).to_have_js_property("complete", value=True)
    assert await image.evaluate("(image) => image.naturalWidth") == 1

    called, results = page.locator("#turn-4"), page.locator("#turn-5")
    await expect(called.locator("details").filter(has_text="Thinking").locator("pre")).to_be_hidden()
    await called.get_by_text("Thinking").click()
    await expect(called.get_by_text("I have to know about Oslo and Bergen.")).to_be_visible()
    await expect(called.locator("pre.json").first).to_have_text('{"city": "Oslo"}')
    await expect(called.get_by_text("signed", exact=True).first).to_be_visible()
    await called.get_by_text("Context, changed here").click()
    await expect(called.locator("details").filter(has_text="Context, changed here")).to_contain_text("book a hotel")
    await expect(results.locator(".tool-head").first).to_contain_text("get_weather")
    await expect(page.locator("#turn-3").get_by_text("Args of this turn")).to_be_visible()
    # It is shown once, at the turn where it changed.
    await expect(page.locator("#turn-6").get_by_text("Context, changed here")).to_have_count(0)

    cut = page.locator("#turns > .cut")
    await expect(cut).to_have_count(1)
    await expect(cut).to_contain_text("turns 1 to 2 became history")
    await expect(cut).to_contain_text(re.compile("request [0-9,]+ → [0-9,]+ tokens"))
    assert await cut.evaluate("(cut) => cut.nextElementSibling.id") == "turn-3"

    retried, failed = page.locator("#turn-8"), page.locator("#turn-10")
    await expect(retried.locator(".calls li")).to_have_count(2)
    await expect(retried.locator(".calls li").first).to_contain_text("provider_overloaded")
    await expect(retried.locator(".calls li").first).to_contain_text("epoch 2: compacted")
    await expect(retried.get_by_role("link", name="Call 2")).to_have_attribute(
        "href", f"/admin/conversations/{driver.conversation_id}/calls/8/2"
    )
    await expect(failed.locator(".notice")).to_contain_text("provider_disconnected The connection to the provider")
    await page.evaluate("scrollTo(0, 0)")
    await visit.look("conversation")


async def test_a_long_conversation_has_pages_and_anchors(visit: Visit) -> None:
    server = visit.server
    walk_store, tenant_id = server.program.store, server.tenant.id
    conversation = await create_conversation(walk_store, tenant_id, identifier="long")
    for number in range(60):
        await take_exchange(walk_store, tenant_id, conversation.id, text=f"Question {number}")
    await visit.log_in()
    url = f"/admin/conversations/{conversation.id}"
    await visit.go(url)
    turns = visit.page.locator("#turns > .turn")
    await expect(turns).to_have_count(40)
    await expect(turns.last).to_have_id("turn-120")
    await visit.page.get_by_label("Jump to turn").fill("33")
    await visit.page.keyboard.press("Enter")
    await expect(visit.page).to_have_url(f"{visit.server.url}{url}?around=33#turn-33")
    await expect(visit.page.locator("#turn-33")).to_be_in_viewport()
    await visit.page.get_by_role("link", name="Older").first.click()
    await expect(turns.last).to_have_id("turn-12")
    await visit.page.get_by_role("link", name="Newer").first.click()
    await expect(turns.first).to_have_id("turn-13")
    await visit.go(f"{url}?jump=999")
    await expect(visit.page.get_by_role("status")).to_have_text("There is no turn 999. The last turn is 120.")
    await visit.go(f"{url}?after=500")
    await expect(visit.page.get_by_text("There are no turns here.")).to_be_visible()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Latency):
    """A model that sends its next piece when the test allows it."""

    gate: asyncio.Semaphore

    async def wait_next(self) -> None:
        await self.gate.acquire()


async def test_a_running_turn_is_shown_live_and_completely_after_its_end(
    visit: Visit, emulated: EmulatedProviders, stages: Stages
) -> None:
    server = visit.server
    service, tenant_id = server.program.turn_service, server.tenant.id
    driver = await start_driver(server.program, tenant_id, emulated, GEMINI)
    await driver.task("Hello", text_reply("Hi."))
    await visit.log_in()
    gate = asyncio.Semaphore(9)
    held = Held(first_chunk_seconds=0, seconds_per_chunk=0, gate=gate)
    stages.gemini[1].app = build_gemini_app(replace(emulated.gemini.state, latency=held))
    calls = (ToolCall(name="get_weather", arguments={"city": "<u>Oslo</u>"}),)
    emulated.gemini.queue_replies(
        Reply(
            thinking="Let me <b>see</b>.", text="It is <i>cold</i> and wet in all of Norway, I think.", tool_calls=calls
        )
    )
    handle = await service.take_turn(tenant_id, user_task(driver.conversation_id, "And Oslo?"))

    page = visit.page
    await visit.go(f"/admin/conversations/{driver.conversation_id}")
    await page.locator("#turn-2").get_by_text("Thinking").click()
    running = page.locator("#turn-4")
    await expect(running.locator(".badge.live").first).to_have_text("running")
    # As text, also if it looks like markup.
    await expect(running.locator("pre").first).to_have_text("Let me <b>see</b>.")
    await expect(running.locator("pre").nth(1)).to_have_text(re.compile("^It is <i>cold</i>( \\w+)*\\s*$"))
    await expect(page.get_by_role("link", name="Cancel the turn")).to_be_visible()
    await visit.look("conversation-live")

    for _ in range(100):
        gate.release()
    await handle.wait()
    await expect(running.get_by_text("tool use")).to_be_visible()
    await expect(running.locator(".tool pre")).to_have_text('{"city": "<u>Oslo</u>"}')
    await expect(running.locator(".calls")).to_contain_text("200")
    await expect(page.locator(".badge.live")).to_have_count(0)
    await expect(page.get_by_role("link", name="Cancel the turn")).to_have_count(0)
    await expect(page.locator("#head")).to_contain_text("Waiting for the results of get_weather")
    # What was unfolded stays unfolded: the page was not loaded again.
    await expect(page.locator("#turn-2 details pre")).to_be_visible()
