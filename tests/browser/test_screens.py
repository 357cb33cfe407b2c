"""Every screen: it is there, everybody can use it, it fits, and it shows any text as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stocked_shop import ODD, ODD_ID, Shop
from visits import NARROW, Dashboard, Visit, dashboard, poll

SCREENS = {
    "/": "Overview",
    "/jobs": "Jobs",
    "/job?id=held-1": "Job held-1",
    "/job?id=mail-1": "Job mail-1",
    "/dead": "Dead",
    "/schedules": "Schedules",
    "/schedules?view=agenda": "Schedules",
    "/schedule?name=nightly": "nightly",
    "/queues": "Queues",
    "/workers": "Workers",
    "/store": "Store",
    "/audit": "Audit",
}


@asynccontextmanager
async def stocked(folder: Path, chromium: str) -> AsyncIterator[Dashboard]:
    """A dashboard with jobs in every state, and a worker."""
    shop = Shop(folder)
    async with dashboard(shop.app, chromium) as its, shop.working():
        await shop.stock()
        await shop.settled()
        yield its


async def shown(visit: Visit, path: str) -> None:
    """Wait until a screen is drawn, with its data."""
    await visit.open(path)
    await visit.heading(SCREENS[path]).wait_for()
    await visit.until("document.querySelector('main .loading') === null")


async def test_every_screen_in_light_and_dark_is_accessible(tmp_path: Path, chromium: str) -> None:
    async with stocked(tmp_path, chromium) as its:
        for scheme in ("light", "dark"):
            async with its.visit(color_scheme=scheme) as visit:
                for path in SCREENS:
                    await shown(visit, path)
                    await visit.accessible()


async def test_every_screen_fits_a_phone(tmp_path: Path, chromium: str) -> None:
    async with (
        stocked(tmp_path, chromium) as its,
        its.visit(viewport={"width": NARROW, "height": 800}) as visit,
    ):
        for path in SCREENS:
            await shown(visit, path)
            await visit.fits()


async def test_every_screen_moves_nothing_for_those_who_want_none(
    tmp_path: Path, chromium: str
) -> None:
    moving = """() => document.getAnimations()
        .filter((each) => each.effect.getComputedTiming().duration > 10).length"""
    async with (
        stocked(tmp_path, chromium) as its,
        its.visit(reduced_motion="reduce") as visit,
    ):
        for path in SCREENS:
            await shown(visit, path)
            assert await visit.page.evaluate(moving) == 0


async def test_a_screen_that_does_not_exist_says_so(tmp_path: Path, chromium: str) -> None:
    async with dashboard(Shop(tmp_path).app, chromium) as its, its.visit("/jobs") as visit:
        await visit.page.evaluate("history.pushState(null, '', 'nowhere')")
        await visit.page.evaluate("dispatchEvent(new PopStateEvent('popstate'))")
        await visit.heading("Not found").wait_for()
        await visit.link("Go to the overview").click()
        await visit.heading("Overview").wait_for()


# --- Any text


ODD_SCREENS = {
    "/": ODD,
    "/jobs": ODD,
    "/jobs?view=dead": f"ValueError: {ODD}",
    "/dead": ODD,
    "/queues": ODD,
    "/workers": ODD,
    "/audit": ODD_ID,
}


@pytest.mark.parametrize("path", ODD_SCREENS)
async def test_any_text_is_shown_as_it_is(tmp_path: Path, chromium: str, path: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.add_odd()
        async with its.visit("/jobs") as visit:
            if path == "/audit":
                await cancelled(visit)
            await visit.open(path)
            await visible(visit, ODD_SCREENS[path])


async def test_any_text_of_a_job_is_shown_as_it_is(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.add_odd()
        async with its.visit("/jobs") as visit:
            await visit.open("/job", id=ODD_ID)
            await visit.heading(f"Job {ODD_ID}").wait_for()
            for text in (ODD, f"{ODD}={ODD}"):
                await visible(visit, text)
            shown = await visit.page.get_by_role("group", name="Arguments").inner_text()
            assert "<script>" in shown and "\u202e" in shown
            await visit.link(ODD).first.click()
            await visit.heading("Jobs").wait_for()
            await visible(visit, ODD_ID)
            await visit.open("/job", id=f"dead {ODD_ID}")
            await visible(visit, f"ValueError: {ODD}")


async def cancelled(visit: Visit) -> None:
    await visit.open("/job", id=ODD_ID)
    await visit.button("Cancel").click()
    await visit.confirm("Cancel")
    await visit.sees("Cancelled.")


async def visible(visit: Visit, text: str) -> None:
    """The text is there, character by character, and is no markup."""
    script = """text => [...document.querySelectorAll("main *")]
        .some((each) => each.textContent.includes(text))"""
    await poll(lambda: visit.page.evaluate(script, text))
    assert await visit.page.locator("main script, main bdi b").count() == 0
