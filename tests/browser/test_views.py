"""Saved views of the list of conversations, and the URL of the list, in a browser."""

from playwright.async_api import expect

from server.conversation.audit import OPERATOR
from server.postgres.engine import Database
from server.postgres.inspection.saved_views import PostgresSavedViews
from tests.browser.conftest import Visit
from tests.browser.test_conversations import fill
from tests.support.page_driver import audited

HOSTILE = "<img src=x onerror=alert(1)> \u202edlrow"


async def test_filters_are_saved_by_name_and_opened_again(visit: Visit, database: Database) -> None:
    visit.refusals |= {409}
    made = await fill(visit, database, 3)
    await visit.log_in()
    page = visit.page
    await visit.go("/admin/conversations")
    rows = page.locator("#results tbody tr")
    await page.get_by_label("Active within").select_option("7d")
    await page.get_by_text("More filters").click()
    await page.get_by_label("Error code").fill("provider_overloaded")
    await page.get_by_role("button", name="Search").click()
    await expect(rows).to_have_count(1)
    # Empty fields are left out of the URL.
    filtered = f"{visit.server.url}/admin/conversations?error_code=provider_overloaded&active_within=7d"
    await expect(page).to_have_url(filtered)

    await page.get_by_text("Save these filters").click()
    await page.get_by_label("Name", exact=True).fill(HOSTILE)
    await visit.look("view-saving")
    await page.get_by_role("button", name="Save the view").click()
    await expect(page.get_by_role("status")).to_contain_text("The view was saved.")
    chip = page.locator(".views .chip")
    await expect(chip).to_have_text("<img src=x onerror=alert(1)> [U+202E]dlrow")
    await expect(chip).to_have_attribute("aria-current", "true")
    await visit.look("view-saved")

    await page.get_by_text("Save these filters").click()
    await page.get_by_label("Name", exact=True).fill(f" {HOSTILE}")
    await page.get_by_role("button", name="Save the view").click()
    await expect(page.get_by_role("alert")).to_contain_text("exists already.")

    await visit.go("/admin/conversations")
    await expect(rows).to_have_count(3)
    await chip.click()
    await expect(page).to_have_url(filtered)
    await expect(rows).to_contain_text(made[2])


async def test_views_are_renamed_and_deleted_after_a_confirmation(visit: Visit, database: Database) -> None:
    await PostgresSavedViews(database).save_view(visit.server.tenant.id, HOSTILE, {"state": "failed"}, OPERATOR)
    await visit.log_in()
    page = visit.page
    await visit.go("/admin/conversations")
    await page.get_by_role("link", name="Manage views").click()
    await visit.look("views")
    await page.get_by_label("New name of").fill("Overloads")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status")).to_contain_text("The view was renamed.")
    await page.get_by_role("link", name="Delete the view Overloads").click()
    await visit.look("view-deleting")
    await page.get_by_role("link", name="Keep it").click()
    await page.get_by_role("link", name="Delete the view Overloads").click()
    await page.get_by_role("button", name="Delete the view").click()
    await expect(page.get_by_text("No saved views.")).to_be_visible()
    assert [action for action, _, _ in await audited(database)][-2:] == ["view.rename", "view.delete"]


async def test_the_url_is_cleaned_without_script_too_and_an_invalid_one_links_to_the_list(visit: Visit) -> None:
    visit.refusals |= {404}
    await visit.log_in()
    await visit.go("/admin/conversations?text=&state=failed&model=&cursor=")
    await expect(visit.page).to_have_url(f"{visit.server.url}/admin/conversations?state=failed")
    await visit.go("/admin/conversations/conv_x/nowhere/at/all")
    await expect(visit.page.get_by_role("alert")).to_contain_text("There is no such page.")
    await visit.look("nowhere")
    await visit.page.get_by_role("navigation").get_by_role("link", name="Conversations").click()
    await expect(visit.page.get_by_role("heading", name="Conversations")).to_be_visible()
