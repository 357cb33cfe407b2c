"""Around the screens: keys, themes, a prefix, the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from stocked_shop import Shop
from visits import Dashboard, dashboard

from tickwheel.http.server import Listening, serving


async def test_every_screen_has_a_key(tmp_path: Path, chromium: str) -> None:
    titles = {
        "j": "Jobs", "d": "Dead", "s": "Schedules", "q": "Queues", "w": "Workers", "t": "Store",
        "a": "Audit", "o": "Overview",
    }  # fmt: skip
    async with dashboard(Shop(tmp_path).app, chromium) as its, its.visit("/") as visit:
        await visit.heading("Overview").wait_for()
        for key, title in titles.items():
            await visit.page.keyboard.press("g")
            await visit.page.keyboard.press(key)
            await visit.heading(title).wait_for()
        await visit.page.keyboard.press("?")
        await visit.dialog.get_by_role("heading", name="Keyboard shortcuts").wait_for()
        await visit.accessible()
        await visit.page.keyboard.press("Escape")
        await visit.dialog.wait_for(state="hidden")
        await visit.page.keyboard.press("g")
        await visit.page.keyboard.press("j")
        await visit.heading("Jobs").wait_for()
        await visit.page.keyboard.press("/")
        await visit.until("document.activeElement.getAttribute('role') === 'combobox'")
        # What is typed there is text.
        await visit.page.keyboard.type("g?j")
        assert await visit.page.get_by_label("Search jobs").input_value() == "g?j"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_theme_is_the_systems_until_one_is_chosen(
    tmp_path: Path, chromium: str, scheme: str
) -> None:
    other = {"light": "Dark", "dark": "Light"}[scheme]
    ground = "getComputedStyle(document.documentElement).colorScheme"
    bright = """() => {
        const [red] = getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g);
        return red > 128 ? "light" : "dark";
    }"""
    async with (
        dashboard(Shop(tmp_path).app, chromium) as its,
        its.visit("/jobs", color_scheme=scheme) as visit,
    ):
        await visit.heading("Jobs").wait_for()
        assert await visit.page.evaluate(bright) == scheme
        await visit.page.get_by_role("button", name="Theme").click()
        await visit.button(other).click()
        assert await visit.page.evaluate(bright) == other.lower()
        # From the first paint on, before any module has run.
        await visit.page.route("**/js/main.js", lambda route: route.abort())
        visit.may_fail = (0,)
        await visit.page.reload(wait_until="domcontentloaded")
        assert await visit.page.evaluate(bright) == other.lower()
        assert await visit.page.evaluate(ground) == other.lower()


async def test_it_works_below_a_path(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    outer = Starlette(routes=[Mount("/ops/queue", app=shop.app.dashboard())])
    async with serving(outer, Listening(port=0)) as url:
        its = Dashboard(app=shop.app, url=f"{url}/ops/queue", chromium=chromium)
        await shop.pack.using(id="a/b", delay=3600).enqueue(1)
        async with its.visit("/") as visit:
            await visit.heading("Overview").wait_for()
            await visit.link("Jobs", exact=False).first.click()
            await visit.row("a/b").wait_for()
            assert visit.page.url == f"{url}/ops/queue/jobs"
            await visit.link("a/b").click()
            await visit.heading("Job a/b").wait_for()
            await visit.page.reload()
            await visit.button("Cancel").click()
            await visit.confirm("Cancel")
            await visit.sees("Cancelled.")


async def test_the_environment_has_a_badge(
    tmp_path: Path, chromium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TICKWHEEL_ENVIRONMENT", "staging:#b45309")
    async with dashboard(Shop(tmp_path).app, chromium) as its, its.visit("/jobs") as visit:
        badge = visit.page.locator(".environment")
        await badge.filter(has_text="staging").wait_for()
        style = await badge.get_attribute("style")
        assert style is not None and "#b45309" in style
        assert "staging" in await visit.page.title()
