"""The overview: figures, the wheel, what needs a person."""

from __future__ import annotations

from pathlib import Path

from stocked_shop import Shop
from visits import dashboard, poll


async def test_the_figures_say_how_things_stand(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, shop.working():
        await shop.stock()
        await shop.settled()
        async with its.visit("/") as visit:
            figures = visit.page.locator("dl.figures")
            await figures.wait_for()

            async def figure(label: str) -> str:
                one = figures.locator(".figure").filter(has_text=label)
                return (await one.locator("dd").inner_text()).strip()

            # One more while it is to be retried, or runs again.
            assert await figure("Waiting") in ("2", "3")
            assert await figure("Running") in ("1", "2")
            assert await figure("Dead") == "3"
            assert await figure("Workers") == "1"
            await figures.locator(".figure", has_text="Dead").get_by_role("link").click()
            await visit.heading("Dead").wait_for()


async def test_the_wheel_shows_what_falls_due_and_leads_there(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its:
        for n in range(25):
            await shop.pack.using(id=f"due-{n}", delay=1800).enqueue(n)
        for minute in (5, 10, 45):
            await shop.pack.using(id=f"minute-{minute}", delay=f"{minute}m").enqueue(0)
        await shop.pack.using(id="far", delay=7200).enqueue(0)
        async with its.visit("/") as visit:
            slot = visit.page.locator("a.wheel-slot.hot")
            await slot.wait_for()
            assert await slot.count() == 1
            await visit.page.locator(".wheel-total", has_text="28").wait_for()
            await slot.hover(force=True)
            await visit.sees("25 jobs")
            await visit.button("24 hours", exact=True).last.click()
            await visit.page.locator(".wheel-total", has_text="29").wait_for()
            await visit.button("60 minutes").click()
            await slot.first.dispatch_event("click")
            await visit.heading("Jobs").wait_for()
            await visit.row("due-24").wait_for()
            assert "from=" in visit.page.url and "until=" in visit.page.url
            assert await visit.row("far").count() == await visit.row("minute").count() == 0


async def test_the_wheel_turns(tmp_path: Path, chromium: str) -> None:
    shop = Shop(tmp_path)
    async with dashboard(shop.app, chromium) as its, its.visit("/") as visit:
        ring = visit.page.locator(".wheel-slots")
        await ring.wait_for()
        first = await ring.get_attribute("style")

        async def turned() -> bool:
            return await ring.get_attribute("style") != first

        await poll(turned)


async def test_tasks_that_no_worker_serves_and_paused_queues_are_named(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    other = Shop(tmp_path).app

    @other.task(queue="mail")
    async def only_here() -> None: ...

    async with other:
        await only_here.enqueue()
    async with dashboard(shop.app, chromium) as its, shop.working():
        await shop.app.pause("slow")
        async with its.visit("/") as visit:
            await visit.sees("No worker serves")
            await visit.sees("only_here")
            await visit.sees("1 queue paused:")


async def test_a_chart_has_lines_at_decades_and_the_value_of_the_last_slot(
    tmp_path: Path, chromium: str
) -> None:
    shop = Shop(tmp_path)
    # Draws a chart and says its legend, and at which marks there are lines.
    script = """async () => {
      const load = (name) => {
        const entries = performance.getEntriesByType("resource");
        return import(entries.find((each) => each.name.endsWith(name)).name);
      };
      const { Chart } = await load("/chart.js");
      const { html, render } = await load("/js/lib.js");
      const Plot = window.uPlot;
      let axis;
      window.uPlot = function (options, ...more) {
        axis = options.axes[1];
        return new Plot(options, ...more);
      };
      const place = document.createElement("div");
      document.body.append(place);
      const series = [
        { label: "old", values: [5, null], colour: "accent" },
        { label: "new", values: [5, 7], colour: "dead" },
      ];
      const format = (n) => (n === null ? "–" : String(n));
      const more = { label: "x", times: [1, 2], series, format, log: true };
      render(html`<${Chart} ...${more} />`, place);
      while (!axis) await new Promise(requestAnimationFrame);
      const marks = [0.1, 0.5, 1, 2, 3, 9, 10, 20, 1000];
      const lines = [axis, axis.grid, axis.ticks].map((each) => each.filter(null, marks));
      return [place.querySelector(".legend").innerText, ...lines];
    }"""
    async with dashboard(shop.app, chromium) as its, its.visit("/") as visit:
        await visit.page.locator("dl.figures").wait_for()
        legend, *lines = await visit.page.evaluate(script)
        assert legend.split() == ["old", "–", "new", "7"]
        assert lines == [[0.1, None, 1, None, None, None, 10, None, 1000]] * 3
