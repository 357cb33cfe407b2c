"""The peak memory of an idle worker process, in MB: python -m bench.idle URL

Runs in its own process, which imports only what a worker needs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tickwheel import App


async def idle(url: str) -> None:
    app = App(url)

    @app.task
    async def nothing() -> None: ...

    async with app, app.worker():
        await asyncio.sleep(3)


if __name__ == "__main__":
    asyncio.run(idle(sys.argv[1]))
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)
