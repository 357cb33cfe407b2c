"""What is shown keeps up with what happens, and says so when it can't."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from playwright.async_api import Route
from stocked_shop import Shop
from visits import dashboard, poll

from tickwheel.http.server import Listening, serving

# From now on, notes the kind and size of each event.
LISTEN = """() => {
  window.heard = [];
  const own = EventSource.prototype.addEventListener;
  EventSource.prototype.addEventListener = function (kind, act) {
    own.call(this, kind, (event) => {
      window.heard.push([kind, (event.data ?? "").length]);
      act(event);
    });
  };
}"""


async def test_a_job_changes_as_it_runs(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with (
        dashboard(shop.app, chromium) as its,
        its.visit("/job?id=held-1", may_fail=(404,)) as visit,
    ):
        await visit.sees("There is no such job.")
        await shop.hold.using(id="held-1").enqueue()
        badge = visit.page.locator(".heading .badge")
        await badge.filter(has_text="ready").wait_for()
        async with shop.working():
            await badge.filter(has_text="running").wait_for()
            shop.released.set()
            await badge.filter(has_text="done").wait_for()
        await visit.page.get_by_label("Result", exact=True).get_by_text("released").wait_for()


async def test_a_dialog_stays_open_while_everything_changes(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.hold.using(id="held-1", delay=3600).enqueue()
        async with its.visit("/job?id=held-1", may_fail=(409,)) as visit:
            await visit.button("Cancel").click()
            question = visit.dialog.get_by_role("heading", name="Cancel job")
            await question.wait_for()
            await shop.app.cancel("held-1")
            await visit.page.locator(".heading .badge", has_text="cancelled").wait_for()
            assert await question.is_visible()
            await visit.confirm("Cancel")
            await visit.dialog.wait_for(state="hidden")


async def test_a_hidden_tab_asks_for_nothing(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    async with dashboard(shop.app, chromium) as its, its.visit("/jobs") as visit:
        live = visit.page.get_by_role("button", name="Live updates")
        await live.get_by_text("Live").wait_for()
        await visit.page.evaluate(hide, True)
        await live.get_by_text("Paused").wait_for()
        asked: list[str] = []
        visit.page.on("request", lambda request: asked.append(request.url))
        await shop.pack.using(id="one", delay=3600).enqueue(1)
        await asyncio.sleep(3)
        assert asked == []
        assert await visit.row("one").count() == 0
        await visit.page.evaluate(hide, False)
        await visit.row("one").wait_for()


async def test_it_says_when_it_last_heard_and_recovers(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        port = int(its.url.rsplit(":", 1)[1])
        visiting = its.visit("/jobs", may_fail=(0, 503))
        visit = await visiting.__aenter__()
        await visit.page.get_by_role("button", name="Live updates").get_by_text("Live").wait_for()
    await visit.sees("Last heard")
    await shop.pack.using(id="one", delay=3600).enqueue(1)
    async with serving(shop.app.dashboard(), Listening(port=port)):
        await visit.row("one").wait_for()
        await visiting.__aexit__(None, None, None)


async def test_updates_can_be_turned_off_and_asked_for(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, its.visit("/jobs") as visit:
        await visit.sees("No jobs.")
        menu = visit.page.get_by_role("button", name="Live updates")
        await menu.click()
        await visit.button("Off").click()
        await menu.get_by_text("Off").wait_for()
        await shop.pack.using(id="one", delay=3600).enqueue(1)
        await visit.page.keyboard.press("r")
        await visit.row("one").wait_for()
        await visit.page.reload()
        await menu.get_by_text("Off").wait_for()


async def test_only_what_has_changed_is_sent(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        jobs = [shop.pack.using(id=f"n-{n}", delay=3600 + n).job(n) for n in range(50)]
        await shop.app.enqueue_many(jobs)
        async with its.visit("/jobs?view=scheduled") as visit:
            await visit.page.evaluate(LISTEN)
            # Another stream, which is listened to.
            await visit.page.keyboard.press("r")
            await poll(lambda: visit.page.evaluate("heard.some(([kind]) => kind === 'document')"))
            await shop.app.cancel("n-49")
            await poll(lambda: visit.page.evaluate("heard.some(([kind]) => kind === 'change')"))
            sizes = await visit.page.evaluate(
                "heard.filter(([kind]) => kind === 'change').map(([, size]) => size)"
            )
            whole = await visit.page.evaluate("Math.max(...heard.map(([, size]) => size))")
            assert max(sizes) < whole / 3


async def test_a_refused_stream_is_trouble_and_not_asked_for_again_and_again(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.pack.using(id="one", delay=3600).enqueue(1)
        async with its.visit("/store", may_fail=(429,)) as visit:
            asked: list[str] = []
            refusing = True

            async def answer(route: Route) -> None:
                asked.append(route.request.url)
                if not refusing:
                    return await route.continue_()
                problem = {"title": "Too many", "status": 429, "detail": "20 streams are open"}
                await route.fulfill(
                    status=429, content_type="application/problem+json", body=json.dumps(problem)
                )

            await visit.page.route("**/v1/watch?*", answer)
            for path in ("/", "/jobs", "/queues", "/workers", "/schedules"):
                await visit.open(path)
                await visit.sees("20 streams are open")
                assert await visit.page.locator("main .loading").count() == 0, path
            await visit.open("/jobs")
            await visit.sees("20 streams are open")
            asked.clear()
            await asyncio.sleep(5)
            assert asked == []
            refusing = False
            await visit.button("Try again").click()
            await visit.row("one").wait_for()
            assert await visit.page.get_by_role("alert").count() == 0
