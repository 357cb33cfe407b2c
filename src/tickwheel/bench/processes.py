"""Processes of a subject: the one that adds jobs, and its workers; what they cost."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tickwheel.bench.catalogue import PROGRAMS, Subject, python_of
from tickwheel.bench.servers import family
from tickwheel.clock import S_NS, SystemClock, sleep_blocking

# How long a worker may take to stop before it is killed.
STOP_S = 5.0
# How often a look is taken at workers that should start.
SLICE_S = 1.0
Pids = Callable[[], list[int]]
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class SubjectFailed(Exception):
    """A subject did not do what it was asked; the run goes on with the next."""


class Deployment:
    """A subject with an empty store, its record of runs, and the processes it needs."""

    def __init__(
        self, subject: Subject, url: str, environment: Path | None, folder: Path, server: Pids
    ) -> None:
        self.subject = subject
        self._server = server
        self._folder = folder
        self._python = python_of(subject, environment)
        bin_folder = str(Path(self._python).parent)
        # Settings of the user's own project are not ours.
        own = {name: text for name, text in os.environ.items() if name[:10] != "TICKWHEEL_"}
        self._environ = own | {
            "BENCH_URL": url,
            "BENCH_RECORD": str(folder / "record"),
            "PATH": os.pathsep.join((bin_folder, os.environ.get("PATH", ""))),
            "PYTHONPATH": str(PROGRAMS),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._url = url
        self._workers: list[subprocess.Popen[bytes]] = []
        with self._log("driver") as log:
            self._driver = subprocess.Popen(
                [self._python, str(PROGRAMS / "drive.py"), subject.program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ,
                cwd=PROGRAMS,
                start_new_session=True,
            )

    def _log(self, name: str) -> Any:
        return (self._folder / f"{name}.log").open("ab")

    # --- The process that adds jobs

    def ask(self, what: str, *, within_s: float, **details: Any) -> dict[str, Any]:
        """Send a request and return the answer; SubjectFailed if there is none in time."""
        driver = self._driver
        assert driver.stdin is not None and driver.stdout is not None
        try:
            driver.stdin.write(json.dumps({"do": what} | details).encode() + b"\n")
            driver.stdin.flush()
        except BrokenPipeError:
            raise SubjectFailed(f"its program ended: {self._last_words('driver')}") from None
        ready, _, _ = select.select([driver.stdout], [], [], within_s)
        if not ready:
            raise SubjectFailed(f"no answer to {what!r} within {within_s:g} s")
        line = driver.stdout.readline()
        if not line:
            raise SubjectFailed(f"its program ended: {self._last_words('driver')}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SubjectFailed(f"{what}: {answer['error']}")
        return answer

    def _last_words(self, name: str) -> str:
        lines = (self._folder / f"{name}.log").read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return said[-1][:300] if said else "it said nothing"

    # --- Workers

    def start_workers(self, processes: int = 1) -> None:
        if self.subject.inside:
            self.ask("work", within_s=30)
            return
        for words in self.subject.worker_commands(processes, self._url):
            with self._log("workers") as log:
                self._workers.append(
                    subprocess.Popen(
                        words,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=self._environ,
                        cwd=PROGRAMS,
                        start_new_session=True,
                    )
                )

    def probe(self, within_s: float) -> None:
        """Wait until the workers have run one job more."""
        before = self.ask("probe", within_s=within_s)["runs"]
        self.until_ran(before + 1, within_s)

    def until_ran(self, count: int, within_s: float) -> None:
        """Wait until so many runs are recorded in all; SubjectFailed if that takes too long, or the
        workers end."""
        clock = SystemClock()
        deadline = clock.monotonic_ns() + within_s * S_NS
        while self.ask("until_ran", within_s=60, count=count, seconds=SLICE_S)["runs"] < count:
            if self._workers and all(each.poll() is not None for each in self._workers):
                raise SubjectFailed(f"its workers ended: {self._last_words('workers')}")
            if clock.monotonic_ns() > deadline:
                raise SubjectFailed(f"its workers ran nothing within {within_s:g} s")

    @property
    def worker_pids(self) -> list[int]:
        running = [self._driver] if self.subject.inside else self._workers
        return [pid for process in running for pid in family(process.pid)]

    @property
    def server_pids(self) -> list[int]:
        return self._server()

    # --- The end

    def close(self) -> None:
        """End all processes: first by asking, then by force. Only those started here."""
        started = [*self._workers, self._driver]
        everyone = [pid for process in started for pid in family(process.pid)]
        for process in started:
            _send(process, signal.SIGTERM)
        clock = SystemClock()
        deadline = clock.monotonic_ns() + STOP_S * S_NS
        while clock.monotonic_ns() < deadline and any(each.poll() is None for each in started):
            sleep_blocking(0.02)
        for pid in everyone:
            if _session(pid) in {each.pid for each in started}:
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()
        for pipe in (self._driver.stdin, self._driver.stdout):
            if pipe is not None:
                pipe.close()


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _session(pid: int) -> int | None:
    """The session of a process: those we started lead one each."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


@contextmanager
def deployed(
    subject: Subject, url: str, environment: Path | None, server: Pids
) -> Iterator[Deployment]:
    """Start a subject on an empty store; end all of its processes at the end."""
    with tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
        deployment = Deployment(subject, url, environment, Path(folder), server)
        try:
            deployment.ask("open", within_s=60)
            yield deployment
        finally:
            deployment.close()


# --- What processes cost, where the system tells


def cpu_s(pids: Iterable[int]) -> float | None:
    """The CPU time of these processes and of their children that have ended; None if unknown."""
    total, seen = 0, False
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
        seen = True
    return total / TICKS if seen else None


def memory_mb(pids: Iterable[int]) -> float | None:
    """The memory of these processes, shared pages counted in parts; None if unknown."""
    total, seen = 0.0, False
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(text.partition("\nPss:")[2].split()[0]) / 1024
        seen = True
    return total if seen else None
