"""A hostile conversation: text of users and models is shown in every field and has no effect."""

from typing import Any

from server.app.wiring import Program
from server.conversation.block import (
    Blob,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)
from server.conversation.conversation import ConversationDraft
from server.conversation.turn import TurnKind, TurnState
from server.emulator.reply import Reply, ToolCall
from server.postgres.inspection.search_index import index_all
from server.providers.choice import GEMINI
from tests.browser.conftest import DESK, Visit
from tests.support.builders import accept, answer, call_end, call_start, user_input
from tests.support.conversation_driver import start_driver
from tests.support.emulators import MODELS, EmulatedProviders
from tests.support.turn_service_driver import WEATHER

MARKUP = (
    "</pre></textarea></title></script><script>alert(1)</script><img src=x onerror=alert(1)>"
    "<svg onload=alert(1)><a href='javascript:alert(1)'>x</a>\" onmouseover=\"alert(1)' {{ 7*7 }} {% raw %} ]]> <!-- "
    "<style>*{display:none}</style><meta http-equiv=refresh content='0;url=//evil.test'><base href=//evil.test>"
)
STRANGE = (
    "\u202edlrow \u2066\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \x1b[31mred\x1b[0m \x00 \ud83d \x85"
)
HOSTILE = f"{STRANGE} {MARKUP} "
SAID = HOSTILE.replace("\ud83d", "")
"""As a provider can send it: a lone surrogate cannot be encoded in UTF-8."""
LINE = HOSTILE + "x" * 1_000_000
PAGE_BYTES = 1_500_000


def deep(levels: int) -> Any:
    value: Any = HOSTILE
    for _ in range(levels):
        value = {HOSTILE: [value]}
    return value


async def fill(program: Program, tenant_id: str, emulated: EmulatedProviders) -> str:
    """A conversation with real turns, and with rows that no client and no provider could produce."""
    changes: dict[str, Any] = {
        "name": HOSTILE,
        "description": HOSTILE,
        "variables": {"tone": HOSTILE},
        "model": MODELS[GEMINI],
        "tools": (WEATHER,),
        "settings": {},
    }
    driver = await start_driver(program, tenant_id, emulated, GEMINI, **changes)
    store = program.store
    draft = ConversationDraft(
        assistant_id=driver.assistant_id,
        identifier=HOSTILE,
        source=HOSTILE,
        direction=HOSTILE,
        mode=HOSTILE,
        args={"tone": HOSTILE},
        context={"todos": [deep(20), LINE]},
        metadata={HOSTILE: deep(40)},
    )
    driver.conversation_id = (await store.create_conversation(tenant_id, draft)).id
    calls = (ToolCall(name="get_weather", arguments={"city": SAID}),)
    await driver.task(HOSTILE, Reply(thinking=SAID, text=SAID, tool_calls=calls), Reply(text=SAID), args={"x": LINE})
    bad_image = Blob(sha256=bytes(32), media_type="image/svg+xml", data=f"<svg>{MARKUP}</svg>".encode())
    image = ImageBlock(media_type="image/svg+xml", sha256=bytes(32).hex(), size_bytes=5)
    accepted = await accept(
        store,
        tenant_id,
        user_input(
            driver.conversation_id, LINE, blocks=(TextBlock(text=LINE), image), blobs=(bad_image,), language=HOSTILE
        ),
    )
    blocks = (
        ThinkingBlock(text=LINE),
        TextBlock(text=LINE),
        *(ToolCallBlock(id=HOSTILE + str(number), name=HOSTILE, arguments=deep(40)) for number in range(5)),
        UnknownBlock(data={"type": HOSTILE, HOSTILE: deep(40)}),
    )
    start = call_start(
        manifest=(), dynamic=LINE.encode("utf-8", "surrogatepass"), model=HOSTILE, warnings=[{"kind": HOSTILE}]
    )
    given = answer(
        blocks=blocks,
        pending_call_ids=(HOSTILE + "0",),
        start=start,
        end=call_end(cache_miss_reason=HOSTILE, error_code="provider_odd"),
        state=TurnState.FAILED,
        error_code="provider_odd",
    )
    await store.finish_turn(accepted.lease, given)
    results = (ToolResultBlock(tool_call_id=HOSTILE + "0", output=deep(40), is_error=True),)
    response = user_input(
        driver.conversation_id,
        kind=TurnKind.TOOL_RESPONSE,
        blocks=results,
        answers=(HOSTILE + "0",),
        body_hash=bytes(32),
    )
    await store.finish_turn((await accept(store, tenant_id, response)).lease, answer(LINE))
    await index_all(program.database)
    return driver.conversation_id


async def test_a_hostile_conversation_is_shown_and_has_no_effect(visit: Visit, emulated: EmulatedProviders) -> None:
    server, page = visit.server, visit.page
    conversation_id = await fill(server.program, server.tenant.id, emulated)
    page.on("dialog", lambda dialog: visit.troubles.append(f"dialog: {dialog.message}"))
    await visit.log_in()
    at = f"/admin/conversations/{conversation_id}"
    for name, path in (
        ("list", "/admin/conversations"),
        ("conversation", at),
        ("call", f"{at}/calls/2/1"),
        ("odd-call", f"{at}/calls/6/1"),
    ):
        answered = await page.goto(f"{server.url}{path}", wait_until="load")
        assert answered is not None
        assert answered.status == 200, name
        assert len(await answered.body()) < PAGE_BYTES, name
        assert (
            await page.locator("main :is(script, style, base, meta, svg[onload], iframe, object, embed)").count() == 0
        )
        assert await page.locator("[onerror], [onmouseover], [style], a[href^='javascript' i]").count() == 0
        shown = await page.locator("main").inner_text()
        assert "<script>alert(1)</script>" in shown, name
        assert "[U+202E]dlrow" in shown, name
        assert "\u202e" not in shown, name
        if name == "conversation":
            await visit.look("conversation-hostile")
        await page.set_viewport_size({"width": 360, "height": 740})
        await page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        await page.set_viewport_size(DESK)
    # Truncated content can be downloaded completely, and not as a page.
    await visit.go(at)
    async with page.expect_download() as waited:
        await page.locator("#turn-5").get_by_role("link", name="Download all").click()
    assert (await waited.value).suggested_filename == "turn-5-0.txt"
    ask = visit.context.request
    whole = await ask.get(f"{server.url}{at}/turns/5/whole/0")
    assert (await whole.body()).decode().endswith("x" * 1_000_000)
    for path in ("/turns/5/whole/0", "/turns/1/whole/args", "/turns/6/whole/context", "/whole/metadata"):
        given = await ask.get(f"{server.url}{at}{path}")
        assert given.status == 200, path
        assert given.headers["content-type"] == "text/plain; charset=utf-8"
        assert given.headers["content-disposition"].startswith("attachment")
        assert given.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in given.headers["content-security-policy"]
    # An image of an unsupported type is not served either.
    for path in (f"/images/{bytes(32).hex()}", "/images/nonsense", "/turns/5/whole/99", "/whole/nonsense"):
        given = await ask.get(f"{server.url}{at}{path}")
        assert given.status == 404, path
