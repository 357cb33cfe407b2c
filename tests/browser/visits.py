"""Somebody looks at a served dashboard. What a page must never do is checked on every visit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Locator, Page, async_playwright

from tickwheel import App
from tickwheel.http.server import Listening, serving
from tickwheel.operate.keys import Keys

# How long a page may take to show what it is waited for: machines are busy.
PATIENCE_MS = 30_000
NARROW, WIDE = 390, 1280


@dataclass(kw_only=True)
class Dashboard:
    """A served dashboard, and the Chromium to look at it with."""

    app: App
    url: str
    chromium: str

    async def key(self, *scopes: str, **limits: Any) -> str:
        """A new API key, as text."""
        _, text = await Keys(await self.app.client()).create("ann", scopes, **limits)
        return text

    @asynccontextmanager
    async def visit(
        self, path: str = "/", *, may_fail: Sequence[int] = (), **options: Any
    ) -> AsyncIterator[Visit]:
        """Open a page in a window of its own, and close it. Fails if the page has asked another
        server for anything, has broken its own security policy, or has raised an error; answers
        with the statuses in `may_fail` are no error."""
        options.setdefault("viewport", {"width": WIDE, "height": 900})
        async with async_playwright() as playwright:
            browser = await playwright.chromium.connect_over_cdp(self.chromium)
            context = await browser.new_context(
                locale="en-GB", timezone_id="Europe/Paris", **options
            )
            context.set_default_timeout(PATIENCE_MS)
            try:
                page = await context.new_page()
                visit = Visit(page=page, url=self.url, may_fail=tuple(may_fail))
                visit.listen()
                await visit.open(path)
                yield visit
                visit.check()
            finally:
                await context.close()


@dataclass(kw_only=True)
class Visit:
    """A page, and what went wrong on it."""

    page: Page
    url: str
    may_fail: tuple[int, ...] = ()
    faults: list[str] = field(default_factory=list)

    def listen(self) -> None:
        here = urlsplit(self.url).netloc

        def requested(request: Any) -> None:
            if urlsplit(request.url).netloc not in ("", here):
                self.faults.append(f"asked elsewhere: {request.url}")

        def said(message: Any) -> None:
            text = str(message.text)
            expected = any(f"status of {status}" in text for status in self.may_fail)
            gone = "net::ERR_" in text and 0 in self.may_fail
            if message.type in ("error", "warning") and not expected and not gone:
                self.faults.append(f"console: {text}")

        self.page.on("request", requested)
        self.page.on("console", said)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))

    def check(self) -> None:
        assert not self.faults, "\n".join(self.faults)

    async def open(self, path: str, **query: str) -> None:
        """Go to a screen by its address."""
        text = f"?{urlencode(query)}" if query else ""
        await self.page.goto(f"{self.url}{path}{text}", wait_until="load")

    # --- What is there

    def button(self, name: str, *, exact: bool = True) -> Locator:
        return self.page.get_by_role("button", name=name, exact=exact)

    def link(self, name: str, *, exact: bool = True) -> Locator:
        return self.page.get_by_role("link", name=name, exact=exact)

    def heading(self, name: str) -> Locator:
        return self.page.get_by_role("heading", name=name, level=1)

    @property
    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    def row(self, text: str) -> Locator:
        return self.page.locator("tbody tr").filter(has_text=text)

    async def sees(self, text: str) -> None:
        """Wait until a text is in sight."""
        await self.page.get_by_text(text).first.wait_for()

    async def until(self, script: str) -> None:
        """Wait until an expression is true on the page. Without `eval`, which the policy forbids:
        Playwright's own look passes by it."""
        await poll(lambda: self.page.evaluate(script))

    async def confirm(self, action: str) -> None:
        """Press the button of the open dialog that says to go on."""
        await self.dialog.get_by_role("button", name=action, exact=False).last.click()

    # --- What it must be like

    async def accessible(self) -> None:
        """axe-core finds nothing serious."""
        found = await Axe().run(self.page)
        bad = [
            f"{each['id']} ({each['impact']}): {each['nodes'][0]['html'][:200]}"
            for each in found.response["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert not bad, "\n".join(bad)

    async def fits(self) -> None:
        """Nothing is wider than the window."""
        wide, seen = await self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= seen, f"{self.page.url}: {wide} px wide in a window of {seen}"


async def poll(look: Callable[[], Awaitable[Any]], patience_ms: int = PATIENCE_MS) -> Any:
    """Wait until it is true."""
    async with asyncio.timeout(patience_ms / 1000):
        while not (found := await look()):
            await asyncio.sleep(0.05)
        return found


@asynccontextmanager
async def dashboard(app: App, chromium: str, **options: Any) -> AsyncIterator[Dashboard]:
    """Serve an app's dashboard on a free port."""
    async with serving(app.dashboard(**options), Listening(port=0)) as url:
        yield Dashboard(app=app, url=url, chromium=chromium)
