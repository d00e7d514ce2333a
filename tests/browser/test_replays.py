"""Replays in a browser: created with an estimate, watched, compared side by side, deleted."""

from playwright.async_api import expect

from server.conversation.block import ToolCallBlock
from server.conversation.turn import ModelResponseTurn
from server.emulator.reply import Reply
from server.providers.choice import ANTHROPIC, GEMINI
from server.replay.rerun.source import list_turns
from tests.browser.conftest import Visit
from tests.support.conversation_driver import start_driver, text_reply, tool_reply
from tests.support.emulators import MODELS, EmulatedProviders
from tests.support.replay_driver import arm_again

HOSTILE = "It is <img src=x onerror=alert(1)> \u202ewarm in Bergen, and the sun shines."


async def record(visit: Visit, emulated: EmulatedProviders) -> str:
    """A conversation of three answers, whose providers will answer differently next time."""
    server = visit.server
    driver = await start_driver(server.program, server.tenant.id, emulated, GEMINI)
    await driver.task(
        "How is the weather in <b>Oslo</b>?", tool_reply("Oslo"), text_reply("It is cold in Oslo, and it snows.")
    )
    await driver.task("And tomorrow?", text_reply("The same."))
    turns = await list_turns(server.program.store, server.tenant.id, driver.conversation_id)
    answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
    assert any(isinstance(block, ToolCallBlock) for block in answers[0].blocks)
    arm_again(emulated, turns, {answers[0].seq: tool_reply("Bergen"), answers[1].seq: Reply(text=HOSTILE)})
    emulated[ANTHROPIC].queue_replies(*(Reply(text='{"score": 0.25, "reason": "<b>Warm</b>?"}') for _ in answers))
    return driver.conversation_id


async def start(visit: Visit, conversation_id: str) -> str:
    """Create a replay through the form. Returns its id."""
    page = visit.page
    await visit.go("/admin/replays")
    await expect(page.get_by_text("There are no replays yet.")).to_be_visible()
    await page.get_by_role("link", name="New replay").click()
    await page.get_by_label("Name", exact=True).fill("Is <i>Bergen</i> warm?")
    await page.get_by_label("By id").fill(conversation_id)
    await page.get_by_label("Settings (JSON)", exact=True).fill("low")
    await page.get_by_label("One expression per line").fill("'Oslo' in text or tool_calls\nsimilarity >= 0")
    await page.get_by_role("button", name="Estimate").click()
    await expect(page.get_by_role("alert")).to_have_text("settings: This takes a JSON object.")
    await page.get_by_label("Settings (JSON)", exact=True).fill("")
    await page.get_by_label("Judge's provider").select_option(ANTHROPIC)
    await page.get_by_label("Instructions for the judge").fill("Is it as good?")
    await page.get_by_label("Budget (tokens)").fill("1")
    await page.get_by_role("button", name="Estimate").click()
    await expect(page.get_by_role("alert")).to_contain_text("judge.model")
    await page.get_by_label("Judge's model").fill(MODELS[ANTHROPIC])
    await page.get_by_role("button", name="Estimate").click()
    await expect(page.locator("#estimate")).to_contain_text("6calls")
    await visit.look("replay-new")
    await page.get_by_role("button", name="Start replay").click()
    await expect(page.locator("#progress")).to_contain_text("0 of 1 items ended")
    return page.url.rpartition("/")[2]


async def test_a_replay_is_estimated_started_watched_and_compared(visit: Visit, emulated: EmulatedProviders) -> None:
    conversation_id = await record(visit, emulated)
    page = visit.page
    visit.refusals |= {422}
    await visit.log_in()
    replay_id = await start(visit, conversation_id)
    await visit.server.program.replays.items.run_all(replay_id)
    await expect(page.locator("#progress")).to_contain_text("stopped by budget")
    await give_more(visit)
    await visit.server.program.replays.items.run_all(replay_id)
    # Without any action of the operator: the page polls, and stops when there is nothing to wait for.
    await expect(page.locator("#progress")).to_contain_text("1 of 1 items ended")
    await expect(page.locator("#progress[hx-get]")).to_have_count(0)

    await visit.go(f"/admin/replays/{replay_id}")
    rows = page.locator("#results tbody tr")
    await expect(rows).to_have_count(3)
    await expect(rows.first).to_contain_text("tool arguments")
    await expect(rows.last).to_contain_text("same")
    await expect(page.locator(".tiles")).to_contain_text("33.3%")
    await visit.look("replay")
    await look_at_items(visit)
    await page.get_by_label("Differs in").select_option("text")
    await page.get_by_role("button", name="Filter").click()
    await expect(rows).to_have_count(1)

    await rows.first.get_by_role("link").click()
    answer = page.locator("article:target")
    await expect(answer.locator("del").first).to_be_visible()
    await expect(answer.locator("section").last).to_contain_text("<img src=x onerror=alert(1)> [U+202E]warm")
    assert await page.locator("main img").count() == 0
    await expect(page.locator("article").first).to_contain_text("Bergen")
    await expect(answer).to_contain_text("Judge: 0.25 <b>Warm</b>?")
    await expect(answer.locator(".figures")).to_contain_text("Stop reason")
    await visit.look("replay-item")
    await look_at_calls(visit)
    exported = await visit.context.request.get(f"{visit.server.url}/admin/replays/{replay_id}/export?format=csv")
    assert (exported.status, (await exported.text()).count("\r\n")) == (200, 4)
    await visit.go("/admin/replays")
    await visit.look("replays")
    await delete(visit, replay_id)


async def give_more(visit: Visit) -> None:
    """A replay stopped by its budget continues with a larger one; one that is already spent is refused."""
    page = visit.page
    await page.get_by_role("link", name="Continue").click()
    await page.get_by_label("Budget (tokens)").fill("0.5")
    await page.get_by_role("button", name="Continue replay").evaluate("button => button.form.noValidate = true")
    await page.get_by_role("button", name="Continue replay").click()
    await expect(page.get_by_role("alert")).to_contain_text("budget_tokens: This takes a whole number.")
    await visit.look("replay-continue")
    await page.get_by_label("Budget (tokens)").fill("1000000")
    await page.get_by_role("button", name="Continue replay").click()
    await expect(page.locator("#progress")).to_contain_text("running")


async def look_at_items(visit: Visit) -> None:
    """All items with their outcome, those of one state, and back."""
    page = visit.page
    report = page.url
    await page.get_by_role("link", name="All items").click()
    row = page.locator("#results tbody tr")
    await expect(row).to_contain_text("Item 1")
    assert [await row.locator("td.number").nth(place).inner_text() for place in range(4)] == ["1", "2", "0", "0"]
    await visit.look("replay-items")
    await page.get_by_label("State").select_option("failed")
    await page.get_by_role("button", name="Filter").click()
    await expect(page.get_by_text("There are no items in this state.")).to_be_visible()
    assert page.url.endswith("/items?state=failed")
    await visit.go(report.removeprefix(visit.server.url))
    await page.locator("#progress").get_by_role("link", name="1 done").click()
    await row.get_by_role("link", name="Item 1").click()
    await expect(page.get_by_role("heading", name="Item 1")).to_be_visible()
    await visit.go(report.removeprefix(visit.server.url))


async def look_at_calls(visit: Visit) -> None:
    """From an answer to its call, and to that of the judge, as for any other call."""
    page = visit.page
    await page.locator("article:target").get_by_role("link", name="Candidate's call").click()
    await expect(page.locator("#proof")).to_contain_text("Proven")
    await expect(page.locator("#answer .blocks")).to_contain_text("warm in Bergen")
    await expect(page.get_by_role("alert")).to_have_count(0)
    await visit.look("replay-call")
    for part in ("request", "response", "json"):
        got = await visit.context.request.get(f"{page.url}/{part}")
        assert (got.status, len(await got.body()) > 100) == (200, True), part
    await page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name="Item 1").click()
    await expect(page.locator("article:target")).to_be_visible()
    await expect(page.get_by_role("region", name="Background calls").locator("tbody tr")).to_have_count(3)
    await page.locator("article:target").get_by_role("link", name="Judge's call").click()
    await expect(page.locator("#proof")).to_contain_text("Proven")
    await expect(page.locator("#answer")).to_contain_text("Warm")
    # The judge was shown exactly this answer.
    await expect(page.locator("main")).to_contain_text("the sun shines")
    await page.go_back()


async def delete(visit: Visit, replay_id: str) -> None:
    """The page asks for confirmation, and then the replay is gone."""
    await visit.go(f"/admin/replays/{replay_id}/delete")
    await visit.page.get_by_role("button", name="Delete replay").click()
    await expect(visit.page.get_by_role("status")).to_contain_text("The replay and its results were deleted")
    visit.refusals |= {404}
    await visit.go(f"/admin/replays/{replay_id}")
    await expect(visit.page.get_by_role("alert")).to_be_visible()
