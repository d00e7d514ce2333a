"""Replays in a browser: asked for with an estimate, watched, compared side by side, taken away."""

from playwright.async_api import expect

from server.block import ToolCallBlock
from server.emulator.reply import Reply
from server.provider_choice import GEMINI
from server.replay_source import list_turns
from server.turn import ModelResponseTurn
from tests.browser.conftest import Visit
from tests.emulated import EmulatedProviders
from tests.replay_talk import arm_again
from tests.turn_walk import asks, begin_walk, tells

HOSTILE = "It is <img src=x onerror=alert(1)> \u202ewarm in Bergen, and the sun shines."


async def record(visit: Visit, emulated: EmulatedProviders) -> str:
    """A conversation of three answers, whose providers will say something else next time."""
    server = visit.server
    walk = await begin_walk(server.program, server.tenant.id, emulated, GEMINI)
    await walk.task("How is the weather in <b>Oslo</b>?", asks("Oslo"), tells("It is cold in Oslo, and it snows."))
    await walk.task("And tomorrow?", tells("The same."))
    turns = await list_turns(server.program.store, server.tenant.id, walk.conversation_id)
    answers = [turn for turn in turns if isinstance(turn, ModelResponseTurn)]
    assert any(isinstance(block, ToolCallBlock) for block in answers[0].blocks)
    arm_again(emulated, turns, {answers[0].seq: asks("Bergen"), answers[1].seq: Reply(text=HOSTILE)})
    return walk.conversation_id


async def start(visit: Visit, conversation_id: str) -> str:
    """Through the form, as people do. The replay's id."""
    page = visit.page
    await visit.go("/admin/replays")
    await expect(page.get_by_text("Nothing was replayed yet.")).to_be_visible()
    await page.get_by_role("link", name="New replay").click()
    await page.get_by_label("Name", exact=True).fill("Is <i>Bergen</i> warm?")
    await page.get_by_label("By id").fill(conversation_id)
    await page.get_by_label("Settings (JSON)").fill("low")
    await page.get_by_label("An expression a line").fill("'Oslo' in text or tool_calls\nsimilarity >= 0")
    await page.get_by_role("button", name="Estimate").click()
    await expect(page.get_by_role("alert")).to_contain_text("settings: This takes a JSON object.")
    await page.get_by_label("Settings (JSON)").fill("")
    await page.get_by_role("button", name="Estimate").click()
    await expect(page.locator("#estimate")).to_contain_text("3calls")
    await visit.look("replay-new")
    await page.get_by_role("button", name="Start the replay").click()
    await expect(page.locator("#progress")).to_contain_text("0 of 1 items are over")
    return page.url.rpartition("/")[2]


async def test_a_replay_is_estimated_started_watched_and_read(visit: Visit, emulated: EmulatedProviders) -> None:
    conversation_id = await record(visit, emulated)
    page = visit.page
    visit.refusals |= {422}
    await visit.log_in()
    replay_id = await start(visit, conversation_id)
    await visit.server.program.replays.items.run_all(replay_id)
    # Nobody presses anything: the page asks by itself, and stops asking when there is nothing to wait for.
    await expect(page.locator("#progress")).to_contain_text("1 of 1 items are over")
    await expect(page.locator("#progress[hx-get]")).to_have_count(0)

    await visit.go(f"/admin/replays/{replay_id}")
    rows = page.locator("#results tbody tr")
    await expect(rows).to_have_count(3)
    await expect(rows.first).to_contain_text("tool arguments")
    await expect(rows.last).to_contain_text("same")
    await expect(page.locator(".tiles")).to_contain_text("33.3%")
    await visit.look("replay")
    await page.get_by_label("Differs in").select_option("text")
    await page.get_by_role("button", name="Filter").click()
    await expect(rows).to_have_count(1)

    await rows.first.get_by_role("link").click()
    answer = page.locator("article:target")
    await expect(answer.locator("del").first).to_be_visible()
    await expect(answer.locator("section").last).to_contain_text("<img src=x onerror=alert(1)> [U+202E]warm")
    assert await page.locator("main img").count() == 0
    await expect(page.locator("article").first).to_contain_text("Bergen")
    await visit.look("replay-item")
    exported = await visit.context.request.get(f"{visit.server.url}/admin/replays/{replay_id}/export?format=csv")
    assert (exported.status, (await exported.text()).count("\r\n")) == (200, 4)
    await visit.go("/admin/replays")
    await visit.look("replays")
    await delete(visit, replay_id)


async def delete(visit: Visit, replay_id: str) -> None:
    """It asks first, and then there is none."""
    await visit.go(f"/admin/replays/{replay_id}/delete")
    await visit.page.get_by_role("button", name="Delete the replay").click()
    await expect(visit.page.get_by_role("status")).to_contain_text("The replay was deleted")
    visit.refusals |= {404}
    await visit.go(f"/admin/replays/{replay_id}")
    await expect(visit.page.get_by_role("alert")).to_be_visible()
