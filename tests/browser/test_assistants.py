"""The assistants in a browser: versions, differences, the prompt, the editor."""

import re
from typing import Any

from playwright.async_api import Locator, expect

from server.conversation.assistant import AssistantDefinition, Instructions, Tool
from server.conversation.store import Store
from server.emulator.reply import Reply
from server.postgres.engine import Database
from tests.browser.conftest import Visit
from tests.support.builders import definition
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import open_api
from tests.support.page_driver import audited

ROLES = "You are {{ assistant.name }}, the concierge of {{ hotel }}.\nYou speak with guests.\nYou know the town."
PROCEDURE = "Ask for the room number first.\n{% if vip %}Offer an upgrade.{% endif %}\nThen look it up."
HOSTILE = "</textarea><script>alert(1)</script><img src=x onerror=alert(1)> \u202edlrow \u05e9\u05dc\u05d5\u05dd"


def concierge(**changes: Any) -> AssistantDefinition:
    values: dict[str, Any] = {
        "name": "Concierge",
        "description": "Answers what guests of a hotel ask.",
        "instructions": Instructions(roles=ROLES, procedure=PROCEDURE, constraints="Be {{ tone }}."),
        "variables": {"tone": "friendly", "hotel": "the house"},
    }
    return definition(**values | changes)


def field(visit: Visit, name: str) -> Locator:
    return visit.page.get_by_role("textbox", name=name)


async def make_versions(store: Store, tenant_id: str) -> str:
    """An assistant that was changed twice."""
    first = await store.create_assistant(tenant_id, concierge())
    texts = Instructions(
        roles=ROLES.replace("guests", "all guests of the hotel"),
        procedure=PROCEDURE,
        constraints="Be {{ tone }}, be brief.",
    )
    booking = Tool(name="book", description="Books a room.", parameters={"type": "object", "properties": {}})
    await store.revise_assistant(
        tenant_id, first.id, concierge(instructions=texts, tools=(*concierge().tools, booking))
    )
    settings = {"max_output_tokens": 2048, "thinking": "low"}
    await store.revise_assistant(
        tenant_id, first.id, concierge(instructions=texts, tools=(*concierge().tools, booking), settings=settings)
    )
    return first.id


async def test_versions_are_found_and_compared(visit: Visit) -> None:
    store, tenant_id = visit.server.program.store, visit.server.tenant.id
    assistant_id = await make_versions(store, tenant_id)
    await visit.log_in()
    await visit.page.get_by_role("navigation").get_by_role("link", name="Assistants").click()
    row = visit.page.locator("#results tbody tr")
    await expect(row).to_contain_text(assistant_id)
    await visit.look("assistants")
    await row.get_by_role("link", name="Concierge", exact=True).click()
    await expect(visit.page.locator("h1")).to_contain_text("version 3, the newest")

    await visit.page.get_by_role("link", name="What changed in version 2").click()
    difference = visit.page.locator("#difference")
    await expect(difference).to_contain_text("From version 1 to 2")
    await expect(difference).to_contain_text("written to the provider's cache again")
    await expect(difference.locator("ins").first).to_have_text("all ")
    await expect(difference).to_contain_text("tools.book added")
    await visit.look("assistant-compared")

    await visit.page.get_by_label("Compare version 2 with").fill("3")
    await visit.page.get_by_role("button", name="Compare").click()
    await expect(difference.locator(".values")).to_contain_text("settings.max_output_tokens")
    await expect(difference).to_contain_text("The static text and the tools do not change.")


async def test_the_prompt_is_rendered_for_args_and_conversations(visit: Visit) -> None:
    visit.refusals |= {422}
    assistant_id = await make_versions(visit.server.program.store, visit.server.tenant.id)
    async with open_api(visit.server) as api:
        body = {"assistant_id": assistant_id, "args": {"hotel": "Grand Hotel Oslo", "vip": True}}
        conversation = (await api.expect(201, "POST", "/v1/conversations", body))["id"]
    await visit.log_in()
    await visit.go(f"/admin/assistants/{assistant_id}")
    await visit.page.get_by_role("link", name="Render the prompt").click()
    args, results = visit.page.get_by_label("Args, as a JSON object"), visit.page.locator("#results")
    await expect(args).to_have_value('{\n  "vip": "vip"\n}')
    await expect(results).to_contain_text("You are Concierge, the concierge of the house.")
    await expect(results).to_contain_text(re.compile(r"SHA-256\s*[0-9a-f]{64}"))

    await args.fill('{"hotel": "Ritz"\n"vip": 1}')
    await visit.page.get_by_role("button", name="Render").click()
    await expect(visit.page.get_by_role("alert")).to_contain_text("args, line 2 This is not valid JSON")
    await args.fill("")
    await visit.page.get_by_label("Or the args of a conversation").fill(conversation)
    await visit.page.get_by_role("button", name="Render").click()
    await expect(results).to_contain_text("the concierge of Grand Hotel Oslo.")
    await expect(results).to_contain_text("Offer an upgrade.")
    await visit.look("prompt")


async def test_errors_are_shown_with_their_lines_before_anything_is_saved(visit: Visit) -> None:
    visit.refusals |= {422}
    store, tenant_id = visit.server.program.store, visit.server.tenant.id
    assistant_id = await make_versions(store, tenant_id)
    await visit.log_in()
    await visit.go(f"/admin/assistants/{assistant_id}/edit")
    verdict = visit.page.locator("#verdict")
    await visit.page.evaluate("window.loadedOnce = true")
    await field(visit, "Roles").fill("You are {{ assistant.name }} in {{ town }}.\nToday is {{ system.day_of_week }}.")
    await field(visit, "Procedure").fill("Look it up.\n\n{% if vip %}Offer an upgrade.")
    await visit.page.get_by_role("button", name="Check").click()
    problems = verdict.locator(".problems li")
    await expect(problems).to_have_count(3)
    await expect(problems.nth(0)).to_contain_text("roles, line 2")
    await expect(problems.nth(0)).to_contain_text("system changes with every turn")
    await expect(problems.nth(0)).to_contain_text("Today is {{ system.day_of_week }}.")
    await expect(problems.nth(1)).to_contain_text("procedure, line 3")
    await expect(problems.nth(2)).to_contain_text("There is no variable town")
    assert await visit.page.evaluate("window.loadedOnce")
    await visit.look("editor-errors")
    await problems.nth(0).get_by_role("link").click()
    assert await visit.page.evaluate("getSelection().toString()") == "Today is {{ system.day_of_week }}."

    await visit.page.get_by_role("button", name="Save").click()
    await expect(verdict).to_contain_text("The draft cannot be saved: 2 errors.")
    await expect(field(visit, "Roles")).to_have_value(re.compile("Today is"))
    assert (await store.load_assistant(tenant_id, assistant_id)).version == 3


async def test_a_valid_assistant_is_saved_as_a_version_that_new_conversations_use(
    visit: Visit, database: Database, emulated: EmulatedProviders
) -> None:
    assistant_id = await make_versions(visit.server.program.store, visit.server.tenant.id)
    await visit.log_in()
    await visit.go(f"/admin/assistants/{assistant_id}")
    await visit.page.get_by_role("link", name="Edit the instructions").click()
    # A tab moves the focus to the next field.
    await field(visit, "Roles").focus()
    await visit.page.keyboard.press("Tab")
    await expect(field(visit, "Procedure")).to_be_focused()
    await field(visit, "Roles").fill("You are {{ assistant.name }} in {{ town }}.\nToday is a good day.")
    await field(visit, "Args for the preview").fill('{"town": "Bergen"}')
    await visit.page.get_by_role("button", name="Check").click()
    verdict = visit.page.locator("#verdict")
    await expect(verdict).to_contain_text("The draft can be saved.")
    await expect(verdict.locator("pre.source")).to_contain_text("You are Concierge in Bergen.\nToday is a good day.")
    await visit.look("editor-good")
    await visit.page.get_by_role("button", name="Save").click()
    await expect(visit.page.get_by_role("status")).to_contain_text("Version 4 was saved.")
    await expect(visit.page.locator("#difference")).to_contain_text("From version 3 to 4")
    assert ("assistant.save", "done", assistant_id) in await audited(database)

    emulated.gemini.queue_replies(Reply(text="Good day."))
    async with open_api(visit.server) as api:
        body = {"assistant_id": assistant_id, "args": {"town": "Bergen"}}
        made = await api.expect(201, "POST", "/v1/conversations", body)
        await api.say(made["id"])
    assert made["assistant_version"] == 4
    assert "You are Concierge in Bergen." in str(emulated.gemini.requests()[-1])


async def test_a_concurrent_change_is_not_overwritten_and_nothing_is_lost(visit: Visit) -> None:
    visit.refusals |= {409}
    store, tenant_id = visit.server.program.store, visit.server.tenant.id
    assistant_id = await make_versions(store, tenant_id)
    await visit.log_in()
    await visit.go(f"/admin/assistants/{assistant_id}/edit?from=1")
    await expect(visit.page.get_by_text("These are the texts of version 1.")).to_be_visible()
    await visit.go(f"/admin/assistants/{assistant_id}/edit")
    await field(visit, "Constraints").fill("Be mine.")
    newest = (await store.load_assistant(tenant_id, assistant_id)).definition
    await store.revise_assistant(
        tenant_id, assistant_id, concierge(instructions=Instructions(roles="Theirs.", constraints="Theirs."))
    )
    await visit.page.get_by_role("button", name="Save").click()
    await expect(visit.page.get_by_role("alert")).to_contain_text("Version 4 was saved while you were editing")
    await expect(field(visit, "Constraints")).to_have_value("Be mine.")
    await expect(field(visit, "Roles")).to_have_value("Theirs.")
    await visit.look("editor-conflict")
    await visit.page.get_by_role("button", name="Save").click()
    await expect(visit.page.get_by_role("status")).to_contain_text("Version 5 was saved.")
    saved = (await store.load_assistant(tenant_id, assistant_id)).definition
    assert (saved.instructions.roles, saved.instructions.constraints) == ("Theirs.", "Be mine.")
    assert newest != saved


async def test_a_hostile_assistant_is_harmless_on_every_page(visit: Visit) -> None:
    store, tenant_id = visit.server.program.store, visit.server.tenant.id
    tool = Tool(name="get", description=HOSTILE, parameters={"type": "object", "properties": {HOSTILE: {}}})
    values: dict[str, Any] = {
        "name": HOSTILE + "x" * 5000,
        "language": HOSTILE[:60],
        "description": HOSTILE,
        "variables": {HOSTILE: HOSTILE, "tone": "\x1b[31m"},
        "tools": (tool,),
        "settings": {HOSTILE: HOSTILE},
    }
    made = await store.create_assistant(
        tenant_id,
        definition(**values, instructions=Instructions(roles=HOSTILE, constraints="{{ args['" + HOSTILE + "'] }}")),
    )
    await store.revise_assistant(
        tenant_id,
        made.id,
        definition(**values, instructions=Instructions(roles="\n" + HOSTILE * 2, procedure="x" * 30_000)),
    )
    await visit.log_in()
    here = f"/admin/assistants/{made.id}"
    for name, path in (
        ("list", "/admin/assistants"),
        ("prompt", f"{here}/versions/1/prompt"),
        ("page", f"{here}/versions/2?against=1"),
        ("editor", f"{here}/edit"),
    ):
        await visit.go(path)
        assert await visit.page.locator("main script, main img").count() == 0
        await expect(visit.page.locator("main")).to_contain_text("[U+202E]dlrow")
        if name in {"list", "page"}:
            await visit.look(f"hostile-{name}")
        assert len(await visit.page.content()) < 1_000_000
    # Characters that no page can show are kept exactly in fields that are not edited, and refused in edited ones.
    await field(visit, "Procedure").fill("Answer.")
    await visit.page.get_by_role("button", name="Check").click()
    verdict = visit.page.locator("#verdict")
    await expect(verdict.locator("h3")).to_have_text(re.compile(r"^instructions\.procedure"))
    await field(visit, "Roles").fill("Mine.")
    await visit.page.get_by_role("button", name="Check").click()
    await expect(verdict.locator(".problems li.error").first).to_contain_text("Change it with the API")
