"""A run: rounds of all subjects, one after the other, so that slow minutes hit all of them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tickwheel.bench.catalogue import Subject
from tickwheel.bench.environments import InstallFailed, environment, version
from tickwheel.bench.figures import Figures
from tickwheel.bench.measure import Turn, steps
from tickwheel.bench.plan import Plan
from tickwheel.bench.processes import SubjectFailed
from tickwheel.bench.servers import STORES, check
from tickwheel.clock import S_NS, SystemClock
from tickwheel.errors import TickwheelError
from tickwheel.version import __version__

# A load above this part of the cores, before anything was started, is somebody else's.
BUSY = 0.5


@dataclass(slots=True)
class Report:
    """What was measured, on what, and how it went."""

    plan: Plan
    subjects: list[Subject]
    figures: Figures = field(default_factory=Figures)
    machine: dict[str, str] = field(default_factory=dict)
    # Whether other work took much of the machine when the run began.
    busy: bool = False
    # By store and by subject.
    servers: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def stores(self) -> dict[str, list[str]]:
        """The libraries on each store."""
        found: dict[str, list[str]] = {}
        for subject in self.subjects:
            found.setdefault(subject.store, []).append(subject.library)
        return found


class Listener:
    """Hears how a run goes; this one does nothing with it."""

    def plan(self, steps: int) -> None: ...
    def step(self, subject: str, what: str) -> None: ...
    def done(self) -> None: ...
    def note(self, words: str) -> None: ...


def run(plan: Plan, subjects: Sequence[Subject], folder: Path, listener: Listener) -> Report:
    """Measure these subjects. One that fails, or whose store can't be started, is noted and left
    out; the run goes on."""
    clock = SystemClock()
    report = Report(plan, list(subjects), machine=machine(clock.now_ns()), busy=_busy())
    if report.busy:
        listener.note("the machine is busy with other work: the figures will be too low")
    start_ns = clock.monotonic_ns()
    places = _prepared(report, folder, listener)
    rounds = range(1, plan.rounds + 1)
    listener.plan(
        sum(len(steps(each, plan, n)) for each in subjects if each.name in places for n in rounds)
    )
    for number in rounds:
        for store in report.stores:
            here = [each for each in subjects if each.store == store and each.name in places]
            if here:
                _round(report, number, store, here, places, listener)
    report.took_s = (clock.monotonic_ns() - start_ns) / S_NS
    return report


def _prepared(report: Report, folder: Path, listener: Listener) -> dict[str, Path | None]:
    """The environments of all subjects that can be measured here, by name."""
    places: dict[str, Path | None] = {}
    for subject in report.subjects:
        listener.step(subject.name, "prepare")
        try:
            check(subject.store)
            places[subject.name] = environment(subject, folder)
            report.versions[subject.name] = version(subject, places[subject.name])
        except (TickwheelError, InstallFailed) as error:
            _left_out(report, subject, str(error), listener)
            places.pop(subject.name, None)
    return places


def _round(
    report: Report,
    number: int,
    store: str,
    subjects: Sequence[Subject],
    places: dict[str, Path | None],
    listener: Listener,
) -> None:
    try:
        with STORES[store]() as server:
            report.servers[store] = server.version
            for subject in subjects:
                turn = Turn(subject, server, places[subject.name], report.plan, report.figures)
                _measure(turn, number, listener)
    except (OSError, RuntimeError, TickwheelError, subprocess.SubprocessError) as error:
        for subject in subjects:
            report.figures.fail(subject.name, "all", ("",), f"its server failed: {error}")
        listener.note(f"round {number} without {store}: its server failed: {error}")


def _measure(turn: Turn, number: int, listener: Listener) -> None:
    name = turn.subject.name
    for what, keys, step in steps(turn.subject, turn.plan, number):
        listener.step(name, what)
        try:
            step(turn)
        except SubjectFailed as failure:
            turn.figures.fail(name, what, keys or ("",), str(failure))
            listener.note(f"{name}: {what}: {failure}")
        listener.done()


def _left_out(report: Report, subject: Subject, reason: str, listener: Listener) -> None:
    report.figures.excuse(subject.name, "", reason)
    listener.note(f"{subject.name} is left out: {reason}")


def _busy() -> bool:
    return os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)


def machine(now_ns: int) -> dict[str, str]:
    """What the figures were measured with."""
    return {
        "date": datetime.fromtimestamp(now_ns // S_NS, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "tickwheel": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{each:.1f}" for each in os.getloadavg()),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()
