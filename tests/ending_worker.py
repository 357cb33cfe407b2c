"""A worker in a process of its own that records when each of its settles was acknowledged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tickwheel import App
from tickwheel.job import Settlement
from tickwheel.store import Store, open_store
from tickwheel.testing import FaultyStore

ended: dict[str, int] = {}


class Recording(FaultyStore):
    """By the monotonic clock, which all processes of a machine share."""

    def new_handle(self) -> Recording:
        return Recording(self._store.new_handle())

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers = await self._store.settle(settlements, now_ms=now_ms)
        now_ns = time.monotonic_ns()
        ended.update((each.job.id, now_ns) for each in settlements)
        return answers


async def main() -> None:
    app = App(cast(Store, Recording(open_store(os.environ["TICKWHEEL_STORE"]))))

    @app.task
    async def echo(n: int) -> int:
        return n

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with app, app.worker(concurrency=1000):
        print("ready", flush=True)
        await stopped.wait()
    Path(os.environ["RECORD"]).write_text(json.dumps(ended))


if __name__ == "__main__":
    asyncio.run(main())
