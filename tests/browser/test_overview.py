"""The overview in a browser: alarms first, then numbers, charts and outliers."""

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from playwright.async_api import expect

from server.conversation.conversation import ConversationDraft
from server.conversation.usage import Usage
from server.postgres.engine import Database
from server.postgres.inspection.overviews import PostgresCompactionAlarms
from server.postgres.inspection.search_index import index_all
from tests.browser.conftest import Visit
from tests.support.builders import call_end, call_start, create_assistant, take_exchange

HOSTILE = "</script><img src=x onerror=alert(1)>\"' \u202edlrow {{ 7*7 }}"
GAP = "\u2013"
MODELS = ("gemini-3.1-pro-preview", "claude-opus-4-8", "a-model-without-a-price")


async def fill(visit: Visit, database: Database) -> list[str]:
    """A day of calls of three models with a gap in it, and conversations with problems."""
    store, tenant_id = visit.server.program.store, visit.server.tenant.id
    assistants = [await create_assistant(store, tenant_id, name=name) for name in ("helper", HOSTILE)]
    chance, now, made = random.Random(7), datetime.now(UTC), []  # noqa: S311  reason: no secret
    for hour in [hour for hour in range(24) if not 8 <= hour < 13]:
        for number, model in enumerate(MODELS):
            at = now - timedelta(hours=hour, minutes=1)
            ended = at + timedelta(seconds=1 + 3 * number + chance.random())
            warnings: Any = ({"kind": "prefix_break"},) if hour == 2 else ()
            draft = ConversationDraft(assistant_id=assistants[number % 2].id)
            conversation = await store.create_conversation(tenant_id, draft)
            usage = Usage(
                fresh_input_tokens=chance.randrange(200, 4000),
                cache_read_tokens=chance.randrange(9000),
                output_tokens=chance.randrange(100, 900),
            )
            cost = None if number == len(MODELS) - 1 else Decimal(chance.randrange(1, 90)) / 1000
            await take_exchange(
                store,
                tenant_id,
                conversation.id,
                start=call_start(started_at=at, model=model, warnings=warnings),
                end=call_end(
                    ended_at=ended,
                    first_byte_at=at + timedelta(seconds=0.5),
                    usage=usage,
                    cost_usd=cost,
                    error_code="provider_overloaded" if hour % 7 == 3 else None,
                ),
            )
            made.append(conversation.id)
    await index_all(database)
    await PostgresCompactionAlarms(database).record_blocked(
        tenant_id, made[0], reason="blocked_by_open_call", request_tokens=210_000, seq=2, epoch=0
    )
    return made


IS_DRAWN_IN = """([measure, colour]) => {
  const drawn = document.querySelector(`[data-measure=${measure}] canvas`);
  const { width, height } = drawn;
  const copy = Object.assign(document.createElement("canvas"), { width, height });
  const brush = copy.getContext("2d", { willReadFrequently: true });
  brush.drawImage(drawn, 0, 0);
  const { data } = brush.getImageData(0, 0, width, height);
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] === 255 && `rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})` === colour) return true;
  return false;
}"""
BY_DAY, BY_NIGHT = "rgb(15, 109, 101)", "rgb(79, 209, 192)"


async def test_the_overview_shows_costs_and_problems(visit: Visit, database: Database) -> None:
    made = await fill(visit, database)
    await visit.log_in()
    page = visit.page
    await expect(page.get_by_role("navigation").locator("[aria-current=page]")).to_have_text("Overview")
    await expect(page.locator(".plot canvas")).to_have_count(6)
    await visit.look("overview")

    # Drawn in the colours of the theme, and again when it changes.
    await page.wait_for_function(IS_DRAWN_IN, arg=["tokens", BY_DAY])
    await page.emulate_media(color_scheme="dark")
    await page.wait_for_function(IS_DRAWN_IN, arg=["tokens", BY_NIGHT])
    await page.get_by_role("button", name="Theme").click()
    await page.wait_for_function(IS_DRAWN_IN, arg=["tokens", BY_DAY])
    await page.emulate_media(color_scheme="light")

    # The pointer selects values of the lines.
    plot = page.locator("[data-measure=cost]")
    await plot.scroll_into_view_if_needed()
    await plot.locator(".u-over").hover()
    await expect(plot.locator(".reading")).to_contain_text("claude-opus-4-8")
    await expect(page.locator(".reading:visible")).to_have_count(1)

    # The same numbers as a table; without a call the latency is empty, not zero.
    latency = page.locator("figure").filter(has_text="Latency, median")
    await latency.get_by_text("As a table").click()
    rows = latency.locator("tbody tr")
    await expect(rows).to_have_count(25)
    gaps = await rows.filter(has_text=GAP).count()
    assert 4 <= gaps <= 7
    await expect(
        page.locator("figure").filter(has_text="Failed attempts").locator("tbody tr").nth(15)
    ).not_to_contain_text(GAP)

    await expect(
        page.get_by_role("region", name="By model").get_by_role("row", name="a-model-without")
    ).to_contain_text("unknown")
    await page.get_by_role("link", name="See all with: Broken prefix").click()
    await expect(page.locator("#results tbody tr")).to_have_count(3)
    await page.go_back()
    await expect(page.locator(".alarm").filter(has_text="stuck compaction")).to_contain_text(made[0])
    await page.get_by_role("link", name="provider_overloaded").click()
    await expect(page.locator("#results tbody tr")).to_have_count(6)


async def test_names_of_assistants_are_text_everywhere(visit: Visit, database: Database) -> None:
    await fill(visit, database)
    await visit.log_in()
    page = visit.page
    plot = page.locator("[data-measure=cost]")
    await page.get_by_role("link", name="By assistant").click()
    await page.get_by_role("link", name="7 days").click()
    assert page.url.endswith("/admin?time=7d&by=assistant")
    await expect(page.locator(".legend")).to_contain_text("</script><img src=x onerror=alert(1)>\"' [U+202E]dlrow")
    await plot.scroll_into_view_if_needed()
    await plot.locator(".u-over").hover()
    await expect(plot.locator(".reading")).to_contain_text("<img src=x onerror=alert(1)>")
    assert await page.locator("main img").count() == 0
    await visit.look("overview-by-assistant")


async def test_an_empty_overview_has_a_hint_and_an_invalid_time_is_named(visit: Visit) -> None:
    visit.refusals |= {422}
    await visit.log_in()
    await expect(visit.page.get_by_role("heading", name="No calls in this period")).to_be_visible()
    await visit.look("overview-empty")
    await visit.page.get_by_text("Other period").click()
    await visit.page.get_by_label("From (UTC)").fill("2026-01-02T10:00")
    await visit.page.get_by_label("To (UTC)").fill("2026-01-01T10:00")
    await visit.page.get_by_role("button", name="Show").click()
    await expect(visit.page.get_by_role("alert")).to_contain_text("Use a time before the end, at most a year earlier.")
