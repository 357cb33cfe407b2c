"""Dead jobs by what they died of."""

from __future__ import annotations

from pathlib import Path

from stocked_shop import Shop
from visits import dashboard


async def test_groups_have_a_sample_and_are_rerun_and_deleted(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)

    @shop.app.task(retries=0)
    async def bill(order: int) -> None:
        raise LookupError(f"no price for order {order}")

    async with dashboard(shop.app, chromium) as its:
        async with shop.working():
            await shop.stock()
            await bill.using(id="bill-1").enqueue(1)
            await bill.using(id="bill-2").enqueue(2)
            await shop.settled(also={"bill-1": "dead", "bill-2": "dead"})
        async with its.visit("/dead") as visit:
            await visit.sees("2 groups of 5 dead jobs")
            groups = visit.page.locator("li.group")
            mail = groups.filter(has_text="no mailbox")
            assert (await mail.locator(".group-count").inner_text()).split() == ["3", "jobs"]
            await mail.locator("summary").click()
            await mail.get_by_label("Traceback").wait_for()
            await mail.get_by_role("button", name="Rerun").click()
            await visit.confirm("Rerun 3 jobs")
            await visit.dialog.get_by_text("3 jobs rerun.").wait_for()
            await visit.button("Close").click()
            bills = groups.filter(has_text="no price")
            await bills.get_by_role("button", name="Delete").click()
            await visit.dialog.get_by_role("textbox").fill("delete")
            await visit.confirm("Delete 2 jobs")
            await visit.dialog.get_by_text("2 jobs deleted.").wait_for()
            await visit.button("Close").click()
            await visit.sees("Nothing is dead.")
        assert (await shop.app.find(task="bill")).jobs == []
        assert (await shop.app.job("mail-1").info()).state == "waiting"
