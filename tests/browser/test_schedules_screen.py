"""Schedules: added, tried, changed, and what becomes of their ticks."""

from __future__ import annotations

from pathlib import Path

from stocked_shop import Shop
from visits import Visit, dashboard


async def test_one_is_added_with_a_preview_edited_paused_run_and_deleted(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with (
        dashboard(shop.app, chromium) as its,
        its.visit("/schedules", may_fail=(422,)) as visit,
    ):
        await visit.sees("There are no schedules yet.")
        await visit.button("Add schedule").click()
        form = visit.dialog
        await form.get_by_label("Name", exact=True).fill("report")
        await form.get_by_label("Task").fill("pack")
        await form.get_by_label("Cron expression").fill("0 25 * * *")
        await form.get_by_role("alert").filter(has_text="25").wait_for()
        await form.get_by_label("Cron expression").fill("30 2 * * *")
        await form.get_by_label("Time zone").fill("America/New_York")
        await form.get_by_text("Your time", exact=True).wait_for()
        await form.get_by_label("Arguments").fill('{"order": 7}')
        await form.get_by_role("button", name="Add schedule").click()
        await visit.row("report").wait_for()
        assert [each.task for each in await shop.app.schedules.list()] == ["pack"]
        await edited(visit)
        await visit.button("Pause report").click()
        await visit.confirm("Pause")
        await visit.page.locator(".heading .badge", has_text="paused").wait_for()
        await visit.button("Resume report").click()
        await visit.confirm("Resume")
        await visit.button("Pause report").wait_for()
        await visit.button("Run now: report").click()
        await visit.confirm("Run now")
        await visit.page.locator(".toast a").wait_for()
        assert len((await shop.app.find(task="pack")).jobs) == 1
        await visit.button("Delete report").click()
        await visit.confirm("Delete the schedule")
        await visit.sees("There are no schedules yet.")


async def edited(visit: Visit) -> None:
    await visit.link("report").click()
    await visit.heading("report").wait_for()
    await visit.button("Edit").click()
    await visit.dialog.get_by_label("Cron expression").fill("45 3 * * *")
    await visit.button("Save").click()
    await visit.page.locator("code", has_text="45 3 * * *").wait_for()
    # In both zones.
    ticks = visit.page.get_by_role("table", name="Next ticks")
    await ticks.get_by_text("03:45").first.wait_for()
    await ticks.get_by_role("columnheader", name="Your time").wait_for()


async def test_those_of_the_code_say_so_and_the_agenda_lists_ticks(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with (
        dashboard(shop.app, chromium) as its,
        shop.working(),
        its.visit("/schedules") as visit,
    ):
        await visit.row("nightly").get_by_text("from code").wait_for()
        await visit.link("Next 24 hours").click()
        await visit.row("nightly").wait_for()
        await visit.open("/schedule", name="nightly")
        await visit.button("Edit").click()
        await visit.dialog.get_by_text("The code owns this schedule").wait_for()


async def test_the_last_runs_are_a_strip(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    await shop.app.schedules.put("often", "pack", every="1s", arguments={"order": 1})
    async with (
        dashboard(shop.app, chromium) as its,
        shop.working(),
        its.visit("/schedule?name=often") as visit,
    ):
        await visit.page.locator("a.square.done").nth(1).wait_for()
        await visit.page.locator("a.square.done").first.click()
        await visit.page.get_by_role("heading", name="Job often@", exact=False).wait_for()
