"""A real browser on the real server. Every test requires: no error in the console, nothing blocked by the content
security policy, and no request to another host.
"""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    ViewportSize,
    async_playwright,
)

from tests.conftest import StrataServer
from tests.support.browser_driver import find_faint_texts, find_unnamed_controls

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Fewer processes: starting one for every page takes longer than most pages do.
    "--renderer-process-limit=1",
    "--disable-site-isolation-trials",
    "--disable-features=SpareRendererForSitePerProcess,BackForwardCache",
    # Requests of the browser to other hosts find no server.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
PHONE: ViewportSize = {"width": 390, "height": 844}
DESK: ViewportSize = {"width": 1280, "height": 800}


# No slots: Playwright stores its listeners on the objects whose methods they are.
@dataclass(kw_only=True)
class Visit:
    """An operator with a separate browser."""

    server: StrataServer
    context: BrowserContext
    page: Page
    shots: Path | None
    troubles: list[str] = field(default_factory=list)
    """Errors that must not occur, and did."""
    refusals: set[int] = field(default_factory=set)
    """Statuses that the test provokes: a browser reports each as an error in its console."""

    async def go(self, path: str) -> None:
        """Open a page and wait until its scripts have run."""
        await self.page.goto(f"{self.server.url}{path}", wait_until="load")

    async def log_in(self, key: str | None = None) -> None:
        """Log in through the form."""
        await self.go("/admin/login")
        await self.page.get_by_label("Admin key").fill(self.server.admin_key if key is None else key)
        await self.page.get_by_role("button", name="Log in").click()
        await self.page.wait_for_load_state("load")

    async def look(self, name: str) -> None:
        """Both themes, at a desk and on a phone. What a program sees is checked: nothing sticks out of a phone, every
        text has enough contrast, every control has a name. `--shots` takes pictures for people to look at.
        """
        for width, size in (("desk", DESK), ("phone", PHONE)):
            await self.page.set_viewport_size(size)
            for theme in ("light", "dark"):
                await self.page.emulate_media(color_scheme=theme)
                where = f"{name}-{width}-{theme}"
                if self.shots is not None:
                    await self.page.screenshot(path=self.shots / f"{where}.png", full_page=True)
                assert await find_faint_texts(self.page) == [], where
            assert await self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{name} on a {width}"
            )
        assert await find_unnamed_controls(self.page) == [], name
        await self.page.set_viewport_size(DESK)
        await self.page.emulate_media(color_scheme="light")

    def note_console(self, message: ConsoleMessage) -> None:
        """An error or warning, unless it tells of an answer that the test provokes."""
        is_expected = any(f"status of {status}" in message.text for status in self.refusals)
        if message.type in {"error", "warning"} and not is_expected:
            self.troubles.append(f"console {message.type}: {message.text}")

    def note_request(self, request: Request) -> None:
        """Record every request to anything but this server and data in the page itself."""
        parts = urlsplit(request.url)
        if parts.scheme != "data" and f"{parts.scheme}://{parts.netloc}" != self.server.url:
            self.troubles.append(f"request to {request.url}")


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("there is no Chromium on this machine; `apt-get install chromium` brings it")
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=executable, headless=True, args=list(FLAGS))
        yield opened
        await opened.close()


@pytest.fixture
async def visit(browser: Browser, strata_server: StrataServer, pytestconfig: pytest.Config) -> AsyncIterator[Visit]:
    context = await browser.new_context(viewport=DESK)
    context.set_default_timeout(10_000)
    visit = Visit(
        server=strata_server, context=context, page=await context.new_page(), shots=pytestconfig.getoption("--shots")
    )

    async def note_violation(_source: object, directive: str, stopped: str) -> None:
        visit.troubles.append(f"stopped by {directive}: {stopped}")

    await context.expose_binding("noteViolation", note_violation)
    await context.add_init_script(
        "document.addEventListener('securitypolicyviolation', (e) => noteViolation(e.violatedDirective, e.blockedURI))"
    )
    context.on("console", visit.note_console)
    context.on("weberror", lambda error: visit.troubles.append(f"script: {error.error}"))
    context.on("request", visit.note_request)
    yield visit
    await context.close()
    assert visit.troubles == []
