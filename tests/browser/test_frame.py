"""The layout of all pages in a browser: with and without a mouse, in the light and the dark theme."""

import asyncio
import re

from playwright.async_api import expect

from server.conversation.api_key import Scope, issue_key_text
from server.conversation.identifiers import API_KEY, new_id
from tests.browser.conftest import Visit


async def test_logging_in_opens_the_requested_page_and_logging_out_closes_it(visit: Visit) -> None:
    await visit.go("/admin/audit?action=login")
    await expect(visit.page).to_have_url(re.compile(r"/admin/login\?goal="))
    await visit.look("login")
    await visit.page.get_by_label("Admin key").fill(visit.server.admin_key)
    await visit.page.get_by_role("button", name="Log in").click()
    await expect(visit.page).to_have_url(f"{visit.server.url}/admin/audit?action=login")
    await expect(visit.page.get_by_label("Action", exact=True)).to_have_value("login")

    await visit.page.get_by_role("button", name="Log out").click()
    await expect(visit.page).to_have_url(f"{visit.server.url}/admin/login")
    await visit.page.go_back()
    await expect(visit.page.get_by_label("Admin key")).to_be_visible()
    assert await visit.context.cookies() == []


async def test_the_cookie_is_not_available_to_scripts_and_other_sites(visit: Visit) -> None:
    await visit.log_in()
    (cookie,) = await visit.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"], cookie["secure"]) == (
        True,
        "Strict",
        "/admin",
        False,
    )
    assert await visit.page.evaluate("document.cookie") == ""
    assert visit.server.admin_key not in await visit.page.content()


async def test_every_page_can_be_opened(visit: Visit) -> None:
    await visit.log_in()
    for name, path in (("start", "/admin"), ("keys", "/admin/keys"), ("audit", "/admin/audit")):
        await visit.go(path)
        await expect(visit.page.get_by_role("navigation").locator("[aria-current=page]")).to_have_count(1)
        await visit.look(name)


async def test_a_wrong_key_and_a_client_key_are_refused_with_a_message(visit: Visit) -> None:
    visit.refusals |= {401, 403}
    await visit.log_in(issue_key_text(new_id(API_KEY)))
    await expect(visit.page.get_by_role("alert")).to_contain_text("not a valid admin key")
    await visit.look("login-refused")
    await visit.log_in(visit.server.client_key)
    await expect(visit.page.get_by_role("alert")).to_contain_text("does not have the scope")
    assert visit.server.client_key not in await visit.page.content()
    assert await visit.context.cookies() == []


async def test_a_key_is_revoked_after_a_confirmation(visit: Visit) -> None:
    name = "<script>alert(1)</script> \u202egnp.exe"
    key, _ = await visit.server.key_ring.create_key(
        tenant_id=visit.server.tenant.id, name=name, scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    await visit.log_in()
    await visit.go("/admin/keys")
    row = visit.page.get_by_role("row").filter(has_text=key.id)
    await row.get_by_role("link", name="Revoke").click()
    await expect(visit.page.get_by_role("heading", name="Revoke this key?")).to_be_visible()
    await visit.look("revoke")
    await visit.page.get_by_role("link", name="Keep it").click()
    await expect(row.locator(".badge")).to_have_text("live")

    await row.get_by_role("link", name="Revoke").click()
    await visit.page.get_by_role("button", name="Revoke the key").click()
    await expect(visit.page.get_by_role("status")).to_contain_text("<script>alert(1)</script>")
    await expect(row.locator(".badge")).to_have_text("revoked")
    await visit.look("keys-revoked")

    await visit.go("/admin/audit?action=key.revoke")
    await expect(visit.page.get_by_role("row").filter(has_text=key.id)).to_have_count(1)


async def test_the_log_is_filtered_without_loading_the_page_again(visit: Visit) -> None:
    visit.refusals |= {401}
    await visit.log_in(issue_key_text(new_id(API_KEY)))
    await visit.log_in()
    await visit.go("/admin/audit")
    await visit.page.evaluate("window.loadedOnce = true")
    await visit.page.get_by_label("Action").select_option("login")
    await visit.page.get_by_label("Outcome").select_option("done")
    await visit.page.get_by_role("button", name="Filter").click()
    # Empty fields are left out of the URL.
    await expect(visit.page).to_have_url(f"{visit.server.url}/admin/audit?action=login&outcome=done")
    await expect(visit.page.locator("#results tbody tr")).to_have_count(1)
    assert await visit.page.evaluate("window.loadedOnce")
    await visit.page.get_by_label("Outcome").select_option("failed")
    await visit.page.get_by_role("button", name="Filter").click()
    await expect(visit.page.get_by_text("No entries found.")).to_be_visible()
    await visit.page.go_back()
    await expect(visit.page.locator("#results tbody tr")).to_have_count(1)


async def test_htmx_sends_the_token_of_the_session_and_no_other_is_accepted(visit: Visit) -> None:
    visit.refusals |= {403}
    await visit.log_in()
    await visit.go("/admin/audit")
    token = await visit.page.locator("meta[name=csrf-token]").get_attribute("content")
    async with visit.page.expect_request("**/admin/audit?*") as asked:
        await visit.page.get_by_role("button", name="Filter").click()
    assert (await asked.value).headers["x-csrf-token"] == token

    logout = "() => htmx.ajax('POST', '/admin/logout', {source: document.querySelector('main'), target: 'main'})"
    await visit.page.evaluate("document.body.setAttribute('hx-headers:inherited', '{\"X-CSRF-Token\": \"forged\"}')")
    await visit.page.evaluate(logout)
    await expect(visit.page.get_by_role("alert")).to_contain_text(
        "The form was not submitted from a page of this session."
    )
    await visit.go("/admin/audit")
    await visit.page.evaluate(logout)
    await visit.go("/admin/audit")
    await expect(visit.page.get_by_label("Admin key")).to_be_visible()


async def test_an_ended_session_leads_to_the_login(visit: Visit) -> None:
    visit.refusals |= {401}
    await visit.log_in()
    await visit.go("/admin/audit")
    (key,) = [key for key in await visit.server.key_ring.list_keys() if Scope.ADMIN in key.scopes]
    await visit.server.key_ring.revoke_key(key.id)
    await visit.page.get_by_role("button", name="Filter").click()
    await expect(visit.page.get_by_label("Admin key")).to_be_visible()
    assert await visit.context.cookies() == []


async def test_everything_can_be_reached_by_keyboard_in_the_order_of_the_page(visit: Visit) -> None:
    await visit.go("/admin/login")
    await expect(visit.page.get_by_label("Admin key")).to_be_focused()
    await visit.page.keyboard.type(visit.server.admin_key)
    await visit.page.keyboard.press("Enter")
    await expect(visit.page).to_have_url(f"{visit.server.url}/admin")

    await visit.go("/admin/keys")
    focused = []
    for _ in range(12):
        await visit.page.keyboard.press("Tab")
        outline = await visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", await visit.page.evaluate("document.activeElement.outerHTML")
        focused.append(
            await visit.page.evaluate(
                "document.activeElement.ariaLabel ?? document.activeElement.textContent.trim().split(/\\s+the key/)[0]"
            )
        )
    assert focused == [
        "Skip to the content", "Strata", "Overview", "Conversations", "Assistants", "Replays", "Keys", "Audit log",
        "Theme: auto",
        "Log out", "Keys", "Revoke",
    ]  # fmt: skip

    await visit.go("/admin/keys")
    await visit.page.keyboard.press("Tab")
    await visit.page.keyboard.press("Enter")
    await expect(visit.page.locator("main")).to_be_focused()


async def test_the_theme_is_stored_and_defaults_to_that_of_the_system(visit: Visit) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    await visit.page.emulate_media(color_scheme="dark")
    await visit.go("/admin/login")
    dark = await visit.page.evaluate(ground)
    switch = visit.page.get_by_role("button", name="Theme")
    await switch.click()
    await expect(switch).to_have_text("Theme: light")
    light = await visit.page.evaluate(ground)
    assert light != dark
    await visit.page.reload()
    await expect(switch).to_have_text("Theme: light")
    assert await visit.page.evaluate(ground) == light
    await switch.click()
    await visit.page.emulate_media(color_scheme="light")
    assert await visit.page.evaluate(ground) == dark
    await switch.click()
    await expect(switch).to_have_text("Theme: auto")
    assert await visit.page.evaluate(ground) == light


async def test_a_link_from_another_site_opens_the_page(visit: Visit) -> None:
    await visit.log_in()
    await visit.page.goto("data:text/html,<a href='" + visit.server.url + "/admin/audit?action=login'>Look!</a>")
    await visit.page.get_by_role("link", name="Look!").click()
    await expect(visit.page.get_by_role("heading", name="Audit log")).to_be_visible()
    await expect(visit.page).to_have_url(f"{visit.server.url}/admin/audit?action=login")

    await visit.page.get_by_role("button", name="Log out").click()
    await visit.page.goto("data:text/html,<a href='" + visit.server.url + "/admin/keys'>Look!</a>")
    await visit.page.get_by_role("link", name="Look!").click()
    await expect(visit.page).to_have_url(f"{visit.server.url}/admin/login?goal=/admin/keys")


async def test_an_unknown_page_has_an_error_page(visit: Visit) -> None:
    visit.refusals |= {404}
    await visit.log_in()
    await visit.go("/admin/nowhere")
    await expect(visit.page.get_by_role("heading", name="Not Found")).to_be_visible()
    await visit.look("not-found")
    await visit.page.get_by_role("link", name="Start page").click()
    await expect(visit.page.get_by_role("heading", name="Overview")).to_be_visible()


async def test_forbidden_browser_events_are_detected(visit: Visit) -> None:
    await visit.go("/admin/login")
    await visit.page.evaluate(
        """() => {
          document.body.insertAdjacentHTML("beforeend", "<p style='color: red'><img src='http://other.test/x.png'>");
          document.body.append(Object.assign(document.createElement("script"), { textContent: "1" }));
          console.error("oh");
          setTimeout(() => { throw new Error("no") });
        }"""
    )
    signs = {"stopped by style-src-attr", "stopped by img-src", "stopped by script-src-elem", "error: oh", "script: no"}
    # They arrive as messages of the browser, a moment later.
    async with asyncio.timeout(10):
        while not all(any(sign in trouble for trouble in visit.troubles) for sign in signs):  # noqa: ASYNC110  reason: a list has no event to wait for
            await asyncio.sleep(0.02)
    await visit.page.goto("data:text/html,<title>elsewhere</title><img src='http://other.test/x.png'>")
    assert "request to http://other.test/x.png" in visit.troubles
    await visit.page.close()
    visit.troubles.clear()
