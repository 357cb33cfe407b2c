"""Who may see and do what."""

from __future__ import annotations

from pathlib import Path

from stocked_shop import Shop
from visits import Visit, dashboard

from tickwheel.operate.keys import Keys


async def signed_in(visit: Visit, key: str) -> None:
    await visit.page.get_by_label("API key").fill(key)
    await visit.button("Sign in").click()


async def test_a_key_signs_in_and_out_again(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        key = await its.key("operate")
        await shop.pack.using(id="one", delay=3600).enqueue(1)
        async with its.visit("/jobs?view=scheduled", may_fail=(401, 403)) as visit:
            await visit.heading("Sign in").wait_for()
            await visit.accessible()
            assert await visit.page.locator("table").count() == 0
            await signed_in(visit, "tw_wrong")
            await visit.sees("This key is not valid")
            await signed_in(visit, key)
            await visit.row("one").wait_for()
            [cookie] = await visit.page.context.cookies()
            assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
            assert key not in cookie["value"]
            assert key not in await visit.page.evaluate("JSON.stringify(localStorage)")
            await visit.page.reload()
            await visit.row("one").wait_for()
            await visit.page.get_by_role("button", name="Signed in").click()
            await visit.button("Sign out").click()
            await visit.heading("Sign in").wait_for()
            await visit.page.reload()
            await visit.heading("Sign in").wait_for()


async def test_a_key_that_may_only_read_sees_no_buttons_and_is_refused(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        key = await its.key("read")
        await shop.pack.using(id="one", delay=3600).enqueue(1)
        async with its.visit("/job?id=one", may_fail=(401, 403)) as visit:
            await signed_in(visit, key)
            await visit.sees("Read-only")
            assert await visit.button("Cancel").count() == 0
            status = await visit.page.evaluate(
                "fetch('v1/jobs/one/cancel', { method: 'POST' }).then((answer) => answer.status)"
            )
            assert status == 403
            for path in ("/schedules", "/queues"):
                await visit.open(path)
                await visit.page.locator("main h1").wait_for()
                for name in ("Add schedule", "Pause default"):
                    assert await visit.button(name).count() == 0
            await visit.open("/audit")
            await visit.sees("The audit log is for keys with the scope admin.")


async def test_a_revoked_key_ends_its_session(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await its.key("admin")
        key = await its.key("read")
        async with its.visit("/jobs", may_fail=(401,)) as visit:
            await signed_in(visit, key)
            await visit.sees("No jobs.")
            keys = Keys(await shop.app.client())
            for each in await keys.list():
                if "read" in each.scopes:
                    await keys.revoke(each.id)
            await visit.heading("Sign in").wait_for()


async def test_without_keys_it_is_open_on_this_machine_alone(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, its.visit("/jobs") as visit:
        await visit.sees("No jobs.")
        await visit.sees("No sign-in")


async def test_a_key_that_may_not_read_is_told_so_and_can_sign_out(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        key = await its.key("enqueue")
        async with its.visit("/", may_fail=(401,)) as visit:
            await signed_in(visit, key)
            await visit.sees("it may not read")
            await visit.accessible()
            await visit.button("Sign out").click()
            await visit.heading("Sign in").wait_for()


async def test_a_key_for_some_tasks_sees_dashes_and_why_there_are_no_charts(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.pack.using(id="one", delay=3600).enqueue(1)
        key = await its.key("operate", tasks=[shop.pack.name])
        async with its.visit("/", may_fail=(401, 403)) as visit:
            await signed_in(visit, key)
            await visit.sees("Your key does not see this.")
            await visit.until("document.querySelector('main .loading') === null")
            await visit.open("/queues")
            row = visit.row("default")
            await row.wait_for()
            texts = await row.locator("td.right").all_inner_texts()
            assert texts == ["–"] * 5
            assert await visit.button("Pause default").count() == 0
