"""`client.schedules`: schedules, over the HTTP API."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tickwheel.checks import checked_options
from tickwheel.duration import Duration
from tickwheel.errors import BadSchedule, UnknownSchedule
from tickwheel.http_client import answers, requests
from tickwheel.http_client.answers import Listing, RemoteSchedule, RunReceived, TicksReceived
from tickwheel.http_client.exchange import Exchange
from tickwheel.http_client.requests import ApiRequest
from tickwheel.schedules import MisfireName, OverlapName


class AsyncHttpSchedules:
    """`client.schedules`: as in an app, but a schedule is known only as the API shows it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @checked_options
    async def put(
        self,
        name: str,
        task: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
        misfire: MisfireName = "one",
        misfire_limit: int = 100,
        overlap: OverlapName = "allow",
        spread: Duration = 0,
    ) -> RemoteSchedule:
        """Add a schedule for the task of that name, or replace the schedule; the options are those
        of `app.schedules.put`."""
        form = requests.schedule_form(
            task,
            cron=cron,
            every=every,
            tz=tz,
            start=start,
            end=end,
            arguments=arguments,
            misfire=misfire,
            misfire_limit=misfire_limit,
            overlap=overlap,
            spread=spread,
        )
        path = requests.schedule_path(name)
        request = ApiRequest(method="PUT", path=path, body=form, invalid=BadSchedule)
        return answers.read(await self._exchange.ask(request), RemoteSchedule)

    async def get(self, name: str) -> RemoteSchedule:
        """Raises UnknownSchedule if there is none of that name."""
        path = requests.schedule_path(name)
        body = await self._exchange.ask(requests.get(path, missing=UnknownSchedule))
        return answers.read(body, RemoteSchedule)

    async def list(self) -> list[RemoteSchedule]:
        """All schedules, by name."""
        body = await self._exchange.ask(requests.get("/v1/schedules"))
        return answers.read(body, Listing).schedules

    async def next(
        self, name: str, *, count: int = 10, after: datetime | None = None
    ) -> builtins.list[datetime]:
        """Its next ticks, as its rule says, also while it is paused."""
        query = {"count": count, "after": requests.time_text("after", after)}
        path = requests.schedule_path(name, "/next")
        body = await self._exchange.ask(requests.get(path, query, missing=UnknownSchedule))
        return [tick.at for tick in answers.read(body, TicksReceived).ticks]

    async def pause(self, name: str) -> None:
        """Stop its ticks until it is resumed; ticks missed in the meantime are skipped."""
        await self._step(name, "/pause")

    async def resume(self, name: str) -> None:
        """Resume with the first tick from now on."""
        await self._step(name, "/resume")

    async def _step(self, name: str, step: str) -> None:
        path = requests.schedule_path(name, step)
        await self._exchange.ask(requests.post(path, missing=UnknownSchedule))

    async def run(self, name: str) -> str:
        """Add its job once, now, in addition to its ticks; returns the job's id."""
        path = requests.schedule_path(name, "/run")
        request = requests.post(path, missing=UnknownSchedule, repeatable=False)
        return answers.read(await self._exchange.ask(request), RunReceived).job

    async def delete(self, name: str) -> bool:
        """Delete a schedule; False if there was none. One in code returns when a worker starts."""
        path = requests.schedule_path(name)
        request = ApiRequest(method="DELETE", path=path, missing=UnknownSchedule, repeatable=False)
        try:
            await self._exchange.ask(request)
            return True
        except UnknownSchedule:
            return False
