"""The page of one job."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from stocked_shop import BIG, Shop
from visits import dashboard


async def test_it_says_what_became_of_each_attempt(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, shop.working():
        await shop.stock()
        await shop.settled()
        async with its.visit("/job?id=mail-1") as visit:
            await visit.sees("Attempt 1")
            await visit.sees("ValueError: no mailbox for 'user1'")
            await visit.page.get_by_label("Traceback").wait_for()
            await visit.open("/job", id="held-1")
            await visit.sees("40%")
            await visit.sees("loading")
            await visit.open("/job", id="order-2")
            await visit.page.get_by_label("Arguments", exact=True).get_by_text(str(BIG)).wait_for()
            await visit.page.get_by_label("Result", exact=True).get_by_text(str(BIG)).wait_for()
            await visit.open("/job", id="order-1")
            await (
                visit.page.get_by_label("Arguments", exact=True).get_by_text("password").wait_for()
            )
            assert "hunter2" not in await visit.page.content()
            await visit.open("/job", id="fetch-1")
            await visit.sees("failed, to be retried")


async def test_it_is_cancelled_rerun_and_deleted(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.pack.using(id="one", delay=3600).enqueue(1)
        async with its.visit("/job?id=one", may_fail=(404,)) as visit:
            badge = visit.page.locator(".heading .badge")
            await visit.button("Cancel").click()
            await visit.confirm("Cancel")
            await visit.sees("Cancelled.")
            await badge.filter(has_text="cancelled").wait_for()
            await visit.button("Rerun").click()
            await visit.confirm("Rerun")
            await badge.filter(has_text="ready").wait_for()
            await visit.button("Cancel").click()
            await visit.confirm("Cancel")
            await badge.filter(has_text="cancelled").wait_for()
            await visit.button("Delete").click()
            await visit.confirm("Delete")
            await visit.sees("There is no such job.")
        assert (await shop.app.find()).jobs == []


async def test_a_copy_adds_the_same_job_again(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    note = 'it\'s "quoted" \\ $HOME `x` é\n</script>'
    async with dashboard(shop.app, chromium) as its:
        await shop.pack.using(id="one", queue="mail", meta={"customer": "42"}).enqueue(
            BIG, note=note
        )
        async with its.visit("/job?id=one") as visit:
            texts = []
            for label in ("Python", "curl"):
                await visit.page.locator("summary", has_text=label).click()
                texts.append(await visit.page.get_by_label(label, exact=True).inner_text())
        python, curl = texts
        for command in ([sys.executable, "-c", python], ["sh", "-c", curl]):
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, timeout=60, text=True
            )
            assert done.returncode == 0, done.stderr
        found = (await shop.app.find(queue="mail")).jobs
        assert len(found) == 3
        assert len({job.id for job in found}) == 3
        for job in found:
            assert job.arguments == {"order": BIG, "note": note}
            assert (job.task, job.meta) == ("pack", {"customer": "42"})
