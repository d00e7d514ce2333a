"""The list of conversations, in a browser."""

import re
from decimal import Decimal

from playwright.async_api import expect

from server.conversation.block import TextBlock
from server.conversation.turn import TurnState
from server.postgres.engine import Database
from server.postgres.inspection.search_index import index_all
from tests.browser.conftest import Visit
from tests.support.builders import accept, answer, call_end, call_start, create_conversation, take_exchange, user_input

HOSTILE = "<img src=x onerror=alert(1)> \u202edlrow \u05e9\u05dc\u05d5\u05dd \x1b[31m" + "x" * 5000


async def fill(visit: Visit, database: Database, count: int) -> list[str]:
    """Conversations whose text contains their number; the last one failed."""
    store, tenant_id = visit.server.program.store, visit.server.tenant.id
    made = []
    for number in range(count):
        conversation = await create_conversation(store, tenant_id, identifier=f"order-{number}")
        await take_exchange(store, tenant_id, conversation.id, text=f"Where is order number{number}, please?")
        made.append(conversation.id)
    accepted = await accept(store, tenant_id, user_input(made[-1], "And now?"))
    await store.end_call(
        accepted.lease, call_start(attempt=1), call_end(error_code="provider_overloaded", cost_usd=Decimal("0.25"))
    )
    await store.finish_turn(accepted.lease, answer(state=TurnState.FAILED, error_code="provider_overloaded"))
    await index_all(database)
    return made


async def test_conversations_are_found_by_their_text_and_their_errors(visit: Visit, database: Database) -> None:
    made = await fill(visit, database, 3)
    await visit.log_in()
    pages = visit.page.get_by_role("navigation", name="Pages")
    await pages.get_by_role("link", name="Conversations", exact=True).click()
    rows = visit.page.locator("#results tbody tr")
    await expect(rows).to_have_count(3)
    await visit.look("conversations")

    await visit.page.get_by_label("Words").fill("order number1")
    await visit.page.keyboard.press("Enter")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text(made[1])
    await expect(visit.page).to_have_url(re.compile("text=order\\+number1|text=order%20number1"))

    await visit.page.get_by_role("link", name="Clear filters", exact=True).click()
    await expect(rows).to_have_count(3)
    await visit.page.get_by_text("More filters").click()
    await visit.page.get_by_label("Error code").fill("provider_overloaded")
    await visit.page.get_by_role("button", name="Search").click()
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text(made[2])
    # The URL alone determines the list.
    await visit.page.reload()
    await expect(rows).to_have_count(1)
    await expect(visit.page.get_by_label("Error code")).to_have_value("provider_overloaded")
    await visit.look("conversations-filtered")


async def test_paging_works_with_and_without_script(visit: Visit, database: Database) -> None:
    await fill(visit, database, 60)
    await visit.log_in()
    await visit.go("/admin/conversations")
    rows = visit.page.locator("#results tbody tr")
    await expect(rows).to_have_count(50)
    await visit.page.evaluate("window.loadedOnce = true")
    await visit.page.get_by_role("link", name="Older").click()
    await expect(rows).to_have_count(10)
    assert await visit.page.evaluate("window.loadedOnce")
    await visit.page.go_back()
    await expect(rows).to_have_count(50)

    cookies = await visit.context.cookies()
    browser = visit.context.browser
    assert browser is not None
    plain = await browser.new_context(java_script_enabled=False)
    try:
        await plain.add_cookies(
            [{"name": c["name"], "value": c["value"], "url": f"{visit.server.url}/admin"} for c in cookies]
        )
        page = await plain.new_page()
        await page.goto(f"{visit.server.url}/admin/conversations?text=order")
        await page.get_by_role("link", name="Older").click()
        await expect(page.locator("#results tbody tr")).to_have_count(10)
        await expect(page).to_have_url(re.compile("text=order&cursor="))
    finally:
        await plain.close()


async def test_a_hostile_conversation_is_harmless_in_the_list(visit: Visit, database: Database) -> None:
    store, tenant_id = visit.server.program.store, visit.server.tenant.id
    conversation = await create_conversation(store, tenant_id, identifier=HOSTILE)
    accepted = await accept(store, tenant_id, user_input(conversation.id, HOSTILE))
    await store.finish_turn(accepted.lease, answer(blocks=(TextBlock(text=HOSTILE),)))
    await index_all(database)
    await visit.log_in()
    await visit.go("/admin/conversations")
    row = visit.page.locator("#results tbody tr")
    await expect(row).to_contain_text("<img src=x onerror=alert(1)> [U+202E]dlrow")
    assert await visit.page.locator("#results img").count() == 0
    await visit.look("conversations-hostile")


async def test_an_invalid_filter_is_named(visit: Visit) -> None:
    visit.refusals |= {422}
    await visit.log_in()
    await visit.go("/admin/conversations?tokens_from=many")
    await expect(visit.page.get_by_role("alert")).to_contain_text("The filter “tokens_from” cannot be used.")
