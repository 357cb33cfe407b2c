"""The jobs screen: views, search, pages, and steps for many jobs."""

from __future__ import annotations

from pathlib import Path

from stocked_shop import Shop
from visits import Visit, dashboard, poll

from tickwheel.job import State


async def test_views_filters_and_search_are_all_in_the_address(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, shop.working():
        await shop.stock()
        await shop.settled()
        async with its.visit("/jobs") as visit:
            await visit.row("order-1").wait_for()
            found = {
                "Scheduled": "later-1", "Running": "held-1", "Retrying": "fetch-1",
                "Done": "order-1", "Dead": "mail-1", "Cancelled": "stopped-1",
            }  # fmt: skip
            tabs = visit.page.get_by_role("navigation", name="Views")
            for view, id in found.items():
                await tabs.get_by_role("link", name=view).click()
                await found_by(visit)
                await visit.row(id).wait_for()
                assert f"view={view.lower()}" in visit.page.url
                # What is to be retried is scheduled too.
                for other in {*found.values()} - {"fetch-1"}:
                    assert await visit.row(other).count() == (other == id), (view, other)
            await tabs.get_by_role("link", name="All").click()
            await searched(visit, "queue:mail mailbox")
            await visit.row("mail-1").wait_for()
            assert await visit.row("order-1").count() == 0
            assert "queue=mail" in visit.page.url and "text=mailbox" in visit.page.url
            await visit.page.reload()
            await visit.row("mail-1").wait_for()
            box = visit.page.get_by_role("combobox", name="Search jobs")
            assert await box.input_value() == "queue:mail mailbox"
            await searched(visit, "meta.customer:42")
            await visit.row("order-1").wait_for()
            assert await visit.page.locator("tbody tr").count() == 1
            await searched(visit, "due<10m")
            await visit.page.go_back()
            await visit.row("order-1").wait_for()
            await searched(visit, "id:later-2")
            await visit.heading("Job later-2").wait_for()


async def searched(visit: Visit, text: str) -> None:
    box = visit.page.get_by_role("combobox", name="Search jobs")
    await box.fill(text)
    await box.press("Enter")
    await found_by(visit)


async def found_by(visit: Visit) -> None:
    """Wait until what is shown is what was asked for last."""
    await visit.until("document.querySelector('section.jobs[aria-busy=true]') === null")


async def test_the_search_box_suggests_what_there_is(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.stock()
        async with its.visit("/jobs") as visit:
            await visit.row("order-1").wait_for()
            box = visit.page.get_by_role("combobox", name="Search jobs")
            await box.click()
            await box.press_sequentially("queue:m")
            option = visit.page.get_by_role("option", name="queue:mail")
            await option.wait_for()
            await box.press("ArrowDown")
            await box.press("Enter")
            assert await box.input_value() == "queue:mail "
            await box.press("Enter")
            await visit.until("new URLSearchParams(location.search).get('queue') === 'mail'")


async def test_pages_are_stable_and_lead_back(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.app.enqueue_many(
            [shop.pack.using(id=f"n-{n:03}", delay=3600 + n).job(n) for n in range(120)]
        )
        async with its.visit("/jobs?view=scheduled") as visit:
            await visit.row("n-000").wait_for()
            await visit.link("Next").click()
            await visit.row("n-050").wait_for()
            assert await visit.row("n-000").count() == 0
            # What is added now does not move this page.
            await shop.pack.using(id="n-first", delay=3500).enqueue(0)
            await visit.link("Next").click()
            await visit.row("n-119").wait_for()
            assert await visit.page.locator("tbody tr").count() == 20
            await visit.link("Back").click()
            await visit.row("n-099").wait_for()
            await visit.link("First page").click()
            await visit.row("n-first").wait_for()


async def states(shop: Shop, state: State) -> int:
    queues = await shop.app.queues()
    return sum(getattr(queue, state) for queue in queues)


async def test_selected_jobs_are_cancelled_after_a_question(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        for n in range(5):
            await shop.pack.using(id=f"n-{n}", delay=3600 + n).enqueue(n)
        async with its.visit("/jobs?view=scheduled") as visit:
            await visit.page.get_by_role("checkbox", name="Select n-1").check()
            await visit.page.get_by_role("checkbox", name="Select n-3").click(modifiers=["Shift"])
            await visit.sees("3 jobs selected")
            await visit.button("Cancel").click()
            await visit.dialog.get_by_role("heading", name="Cancel 3 jobs?").wait_for()
            await visit.button("Keep as it is").click()
            assert await states(shop, State.WAITING) == 5
            await visit.button("Cancel").click()
            await visit.confirm("Cancel 3 jobs")
            await visit.dialog.get_by_text("3 jobs cancelled.").wait_for()
            await visit.button("Close").click()
            assert await states(shop, State.WAITING) == 2


async def test_all_that_match_are_deleted_with_a_count_a_typed_word_and_progress(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        jobs = [shop.pack.using(id=f"n-{n}", queue="mail", delay=9999).job(n) for n in range(2500)]
        await shop.app.enqueue_many(jobs)
        await shop.pack.using(id="other", delay=9999).enqueue(0)
        await shop.app.cancel([*(f"n-{n}" for n in range(2500)), "other"])
        async with its.visit("/jobs?view=cancelled&queue=mail") as visit:
            await visit.page.get_by_role("button", name="All jobs that match").click()
            await visit.button("Delete all that match").click()
            await visit.dialog.get_by_role("heading", name="Delete 2,500 jobs?").wait_for()
            go_on = visit.dialog.get_by_role("button", name="Delete 2,500 jobs")
            assert await go_on.is_disabled()
            await visit.dialog.get_by_role("textbox").fill("delete")
            await go_on.click()
            await visit.dialog.get_by_text("2,500 jobs deleted.").wait_for()
            await visit.button("Close").click()
            await visit.sees("No cancelled jobs match.")
            assert await states(shop, State.CANCELLED) == 1


async def test_all_dead_jobs_that_match_are_rerun(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        async with shop.working():
            await shop.stock()
            await shop.settled()
        async with its.visit("/jobs?view=dead") as visit:
            await visit.row("mail-0").wait_for()
            await visit.page.get_by_role("button", name="All jobs that match").click()
            await visit.button("Rerun all that match").click()
            await visit.confirm("Rerun 3 jobs")
            await visit.dialog.get_by_text("3 jobs rerun.").wait_for()
        assert await states(shop, State.DEAD) == 0


async def test_rows_can_be_chosen_by_keys(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        for n in range(3):
            await shop.pack.using(id=f"n-{n}", delay=3600 + n).enqueue(n)
        async with its.visit("/jobs?view=scheduled") as visit:
            await visit.row("n-2").wait_for()
            for key in "jjx":
                await visit.page.keyboard.press(key)
            await visit.sees("1 job selected")
            assert await visit.page.get_by_role("checkbox", name="Select n-1").is_checked()
            await visit.page.keyboard.press("k")
            await visit.page.keyboard.press("Enter")
            await visit.heading("Job n-0").wait_for()


async def test_a_row_under_the_mouse_stays_where_it_is(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.pack.using(id="second", delay=7200).enqueue(1)
        async with its.visit("/jobs?view=scheduled") as visit:
            await visit.row("second").hover()
            await shop.pack.using(id="first", delay=3600).enqueue(1)
            await visit.sees("1 new row: show")
            assert await visit.page.locator("tbody tr").count() == 1
            await visit.page.mouse.move(5, 5)
            await visit.row("first").wait_for()

            async def ordered() -> bool:
                texts = await visit.page.locator("tbody tr").all_inner_texts()
                return len(texts) == 2 and "first" in texts[0]

            await poll(ordered)


NO_TIMES = [
    "yesterday", "tomorrow", "18.11.2026", "10:00", "5", "1h", "2026", "2026-02-30",
    "2026-11-18 10:00", "2026-11-18T25:00", "+", "-1x", "+99999999999999w",
]  # fmt: skip


async def test_what_is_no_time_is_refused_and_nothing_can_be_done(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.pack.using(id="n-1", delay=9999).enqueue(1)
        await shop.app.cancel(["n-1"])
        async with its.visit("/jobs?view=cancelled") as visit:
            actions = visit.page.get_by_role("button", name="All jobs that match")
            asked: list[str] = []
            for name, text in [*(("until", text) for text in NO_TIMES), ("from", "tomorrow")]:
                await searched(visit, "")
                await visit.row("n-1").wait_for()
                await actions.wait_for()
                await searched(visit, f'{name}:"{text}"')
                alert = visit.page.get_by_role("alert")
                await alert.get_by_text(f"{name}:{text} is no time: ").wait_for()
                assert await actions.count() == 0 and await visit.row("n-1").count() == 0, text
            await searched(visit, "until:1h")
            await visit.sees("write -1h for that long ago, or +1h for that long from now")
            # The same by its address, and nothing is asked for.
            visit.page.on("request", lambda request: asked.append(request.url))
            await visit.open("/jobs?view=cancelled&until=yesterday")
            await visit.sees("until:yesterday is no time")
            assert await actions.count() == 0

            async def watched() -> bool:
                return any("/v1/watch" in url for url in asked)

            await poll(watched)
            assert not [url for url in asked if "v1%2Fjobs" in url or "/v1/jobs" in url]
            await searched(visit, "due<yesterday")
            await visit.sees("until:yesterday is no time")
            await searched(visit, "view:gone")
            await visit.sees("view:gone is no view")


# What is exported by the module of a name; the page has loaded it already.
MODULE = """async ([name, script]) => {
  const entries = performance.getEntriesByType("resource");
  const module = await import(entries.find((each) => each.name.endsWith(name)).name);
  return module[script[0]](...script.slice(1));
}"""


async def test_times_without_a_zone_are_local_and_texts_come_back_as_they_were(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, its.visit("/jobs") as visit:

        async def call(*script: object) -> object:
            return await visit.page.evaluate(MODULE, ["/jobs-query.js", list(script)])

        # The browser is in Paris.
        for text, iso in {
            "2026-11-18": "2026-11-17T23:00:00.000Z",
            "2026-11-18T10:00": "2026-11-18T09:00:00.000Z",
            "2026-11-18T10:00:01Z": "2026-11-18T10:00:01.000Z",
            "2026-11-18T10:00+05:30": "2026-11-18T04:30:00.000Z",
            "-1h30m": "1969-12-31T22:30:00.000Z",
            "+10m": "1970-01-01T00:10:00.000Z",
        }.items():
            assert await call("asked", {"until": text}, 0) == {"until": iso}
        texts = [
            "meta.-=x", "meta.a:b", "until:5", "due<x", "a b", " a", "a  b", 'say "hi"', "\\", '"',
            "view:x", "id:7", "a:b", "x meta.y=z", 'a\\"b c',
        ]  # fmt: skip
        for text in texts:
            query = {
                "queue": "mail",
                "until": "-1h",
                "meta": f"{text.split('=')[0]}=v=w:x",
                "text": text,
            }
            assert await call("parse", await call("compose", query)) == query, text


async def test_a_list_of_large_jobs_is_shown(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        for n in range(8):
            await shop.pack.using(id=f"large-{n}", delay=3600).enqueue(n, "x" * 900_000)
        async with its.visit("/jobs?view=scheduled") as visit:
            for n in range(8):
                await visit.row(f"large-{n}").wait_for()


async def test_waiting_jobs_are_listed_and_cancelled_ready_or_not(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        await shop.pack.using(id="ready-1").enqueue(1)
        await shop.pack.using(id="later-1", delay=3600).enqueue(1)
        for path in ("/", "/queues"):
            async with its.visit(path) as visit:
                await visit.page.locator("a[href*='view=waiting']").first.click()
                await visit.row("ready-1").wait_for()
                await visit.row("later-1").wait_for()
        async with its.visit("/jobs?view=waiting") as visit:
            await visit.page.get_by_role("button", name="All jobs that match").click()
            await visit.button("Cancel all that match").click()
            await visit.confirm("Cancel 2 jobs")
            await visit.dialog.get_by_text("2 jobs cancelled.").wait_for()
        assert await states(shop, State.WAITING) == 0
