"""Real worker processes for the fault tests: started, killed, frozen, and always ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from freezing import freeze, thaw

HERE = Path(__file__).parent
LEASE_S = 1.5


@dataclass
class Event:
    kind: str
    id: str
    attempt: int
    pid: int
    at: float


class WorkerProcess:
    def __init__(self, shop: Shop, number: int, *options: str, **env: str) -> None:
        self._log = shop.folder / f"worker-{number}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tickwheel", "worker", "shop:app"),
                    *("--lease", f"{LEASE_S}s", "--concurrency", "50", *options),
                ],
                cwd=HERE,
                env={**os.environ, **shop.env, **env},
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        thaw(self.pid)

    def died(self) -> bool:
        return self._process.poll() is not None

    @property
    def log(self) -> str:
        return self._log.read_text()


class Shop:
    """A store, a record of what ran, and the processes that work on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            "TICKWHEEL_STORE": f"sqlite:///{folder}/jobs.db",
            "RECORD": str(folder / "record"),
            "PYTHONUNBUFFERED": "1",
        }
        self._workers: list[WorkerProcess] = []

    def worker(self, *options: str, **env: str) -> WorkerProcess:
        self._workers.append(WorkerProcess(self, len(self._workers), *options, **env))
        return self._workers[-1]

    def events(self, kind: str | None = None) -> list[Event]:
        record = Path(self.env["RECORD"])
        if not record.exists():
            return []
        found = []
        for line in record.read_text().splitlines():
            event, id, attempt, pid, at = line.split()
            if kind in (None, event):
                found.append(Event(event, id, int(attempt), int(pid), float(at)))
        return found

    def close(self) -> None:
        for worker in self._workers:
            if not worker.died():
                worker.thaw()
                worker.kill()


@contextmanager
def running_shop(folder: Path) -> Iterator[Shop]:
    shop = Shop(folder)
    try:
        yield shop
    finally:
        shop.close()


def wait_until(happened: Callable[[], bool], *, within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)
