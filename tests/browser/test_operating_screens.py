"""Queues, workers, the store, the audit log."""

from __future__ import annotations

from pathlib import Path

from stocked_shop import Shop
from visits import dashboard


async def test_a_queue_is_paused_and_resumed(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.stock()
        async with its.visit("/queues") as visit:
            row = visit.row("mail")
            await row.get_by_text("no worker serves this queue").wait_for()
            await visit.button("Pause mail").click()
            await visit.confirm("Pause the queue")
            await row.get_by_text("paused").wait_for()
            assert [queue.name for queue in await shop.app.queues() if queue.paused] == ["mail"]
            await visit.button("Resume mail").click()
            await visit.confirm("Resume the queue")
            await visit.button("Pause mail").wait_for()
            async with shop.working():
                await row.get_by_text("no worker serves this queue").wait_for(state="detached")
            await visit.open("/audit")
            await visit.row("pause queue").wait_for()
            await visit.row("resume queue").wait_for()


async def test_workers_say_what_they_run(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, its.visit("/workers") as visit:
        await visit.sees("No worker is running, so no job runs.")
        async with shop.working():
            await shop.stock()
            await shop.settled()
            worker = visit.page.locator("section.worker")
            await worker.get_by_text("held-1").wait_for()
            await worker.get_by_role("table").get_by_text("hold", exact=True).wait_for()
            await worker.get_by_text("agrees with the store").wait_for()
            await worker.get_by_text("5 tasks").click()
            await worker.get_by_role("link", name="fetch", exact=True).wait_for()


async def test_the_store_says_what_it_guarantees(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.stock()
        async with its.visit("/store") as visit:
            await visit.sees("A killed process")
            rows = visit.page.locator(".guarantees li")
            assert await rows.filter(has_text="yes").count() == 2
            assert await rows.filter(has_text="A lost machine").get_by_text("no").count() == 1
            await visit.page.get_by_role("table", name="Calls").get_by_text("add").first.wait_for()
            await visit.page.get_by_role("table", name="Findings").wait_for()
