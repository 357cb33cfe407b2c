"""Pictures of the dashboard for the documents, of a shop on a busy day: `make pictures`."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from visits import NARROW, dashboard

from chromium import found_chromium, running_chromium
from tickwheel import App, current_job
from tickwheel.client import Client
from tickwheel.engine.counts import BOUNDS_MS
from tickwheel.operate.history import FINE, KIND, Point, Stretch, encoded

FOLDER = Path(__file__).parents[2] / "docs" / "images"
SCREENS = {
    "overview": "/",
    "jobs": "/jobs?view=scheduled",
    "job": "/job?id=invoice-1042",
    "dead": "/dead",
    "schedules": "/schedules",
    "schedule": "/schedule?name=daily-report",
    "queues": "/queues",
    "workers": "/workers",
    "store": "/store",
    "audit": "/audit",
}
WIDTH, HEIGHT = 1280, 860
OBJECTIVE = "99% within 100ms"
STOCKTAKING = {"cron": "0 20 L * *", "arguments": {"order_id": 0}}


class Day:
    """The shop."""

    def __init__(self, folder: str) -> None:
        self.app = app = App(f"sqlite:///{folder}/shop.db", name="shop", objective=OBJECTIVE)

        @app.task
        async def cancel_order(order_id: int) -> None: ...

        @app.task(queue="mail", retries=0)
        async def send_mail(to: str, template: str) -> None:
            raise ConnectionRefusedError(f"smtp.example.com refused {to!r}")

        @app.task(queue="billing", retries=0)
        async def charge(invoice: str, cents: int) -> None:
            if cents > 90_000:
                raise LookupError(f"no card on file for customer {cents}")

        @app.task(queue="reports")
        async def build_report(region: str) -> None:
            job = current_job()
            assert job is not None
            job.progress(0.62, f"{region}: 31 of 50 shops")
            await asyncio.sleep(3600)

        @app.cron("0 2 * * *", tz="America/New_York", name="daily-report")
        async def daily_report() -> None: ...

        @app.every("15m", name="sync-stock")
        async def sync_stock() -> None: ...

        @app.cron("0 9 * * MON-FRI", tz="Europe/Paris", name="standup")
        async def remind() -> None: ...

        self.cancel_order, self.send_mail = cancel_order, send_mail
        self.charge, self.build_report = charge, build_report

    async def stock(self) -> None:
        """Add jobs, which end up in every state."""
        rand = random.Random(7)
        jobs = []
        for n in range(1, 1800):
            delay, meta = rand.expovariate(1 / 2400), {"customer": str(n % 97)}
            jobs.append(self.cancel_order.using(id=f"order-{n}", delay=delay, meta=meta).job(n))
        for n in range(400):
            delay = 38 * 60 + n % 50
            jobs.append(self.cancel_order.using(id=f"sale-{n}", delay=delay).job(n))
        for n in range(14):
            mail = self.send_mail.using(id=f"mail-{n}")
            jobs.append(mail.job(f"user{n}@example.com", "welcome"))
        for n in range(5):
            jobs.append(self.charge.using(id=f"charge-{n}").job(f"inv-{n}", 90_001 + n))
        for n in range(1000, 1060):
            jobs.append(self.charge.using(id=f"invoice-{n}").job(f"inv-{n}", 100 + n))
        for region in ("emea", "apac", "amer"):
            jobs.append(self.build_report.using(id=f"report-{region}").job(region))
        await self.app.enqueue_many(jobs)
        await self.app.cancel([f"order-{n}" for n in range(1790, 1800)])


async def remember(client: Client) -> None:
    """An hour of history."""
    rand = random.Random(3)
    now_s = client.clock.now_ms() // 1000
    stretches: dict[str, list[Point]] = {}
    for at_s in range(FINE.slot_s(now_s - 3600), FINE.slot_s(now_s), FINE.step_s):
        wave = 40 + 25 * math.sin(at_s / 500) + rand.uniform(-4, 4)
        late = [0] * (len(BOUNDS_MS) + 1)
        for _ in range(int(wave * 10)):
            ms = rand.lognormvariate(0.5, 0.5) * (9 if at_s % 1700 < 60 else 1)
            late[next((n for n, bound in enumerate(BOUNDS_MS) if ms <= bound), len(BOUNDS_MS))] += 1
        failed = rand.choice((0, 0, 0, 3, 8))
        point = Point(
            at_s, 1, 2300 + 4 * wave, 3 + rand.randint(0, 6), 10.0, sum(late), sum(late) - failed,
            failed, failed // 6, 0, tuple(late),
        )  # fmt: skip
        stretches.setdefault(FINE.record(at_s), []).append(point)
    tasks = {"send_mail": (310, 41, 14), "charge": (1830, 9, 5)}
    records = {
        name: encoded(Stretch(points=tuple(points), tasks=tasks))
        for name, points in stretches.items()
    }
    await client.put_records(KIND, records)


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    async with app.worker(concurrency=50, grace=0.1), app.worker(concurrency=50, grace=0.1):
        yield


async def act(url: str) -> None:
    """What an operator does on a busy day."""
    async with httpx.AsyncClient(base_url=url) as client:
        await client.post("/v1/queues/mail/pause")
        await client.post("/v1/jobs/order-1700/cancel")
        await client.post("/v1/dead/rerun", json={"filter": {"task": "charge"}})
        await client.put("/v1/schedules/stocktaking", json={"task": "cancel_order", **STOCKTAKING})
        await client.post("/v1/schedules/stocktaking/run")
        await client.post("/v1/queues/mail/resume")


async def draw(chromium: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shop = Day(folder)
        app = shop.app
        async with app:
            await remember(await app.client())
        async with dashboard(app, chromium) as its, working(app):
            await shop.stock()
            await act(its.url)
            await asyncio.sleep(8)
            for scheme in ("light", "dark"):
                size = {"width": WIDTH, "height": HEIGHT}
                async with its.visit(color_scheme=scheme, viewport=size) as visit:
                    for name, path in SCREENS.items():
                        await visit.open(path)
                        await asyncio.sleep(1.5)
                        await visit.page.screenshot(path=FOLDER / f"{name}-{scheme}.png")
            size = {"width": NARROW, "height": 844}
            async with its.visit(color_scheme="light", viewport=size) as visit:
                for name in ("overview", "jobs", "job"):
                    await visit.open(SCREENS[name])
                    await asyncio.sleep(1.5)
                    await visit.page.screenshot(path=FOLDER / f"{name}-narrow.png")


if __name__ == "__main__":
    program = found_chromium()
    if program is None:
        sys.exit("Chromium is missing: apt-get install chromium")
    with running_chromium(program) as address:
        asyncio.run(draw(address))
