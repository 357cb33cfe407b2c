"""What an app counts, what it promises about punctuality, and whom it alerts."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import TypeVar

from tickwheel.access import StoreAccess
from tickwheel.client import Client
from tickwheel.clock import Clock
from tickwheel.config import setting
from tickwheel.engine.alerts import Alerts, Hook
from tickwheel.engine.counts import Counts
from tickwheel.errors import BadConfig, shown
from tickwheel.objective import Objective, parse_objective
from tickwheel.registry import Registry

A = TypeVar("A", bound=Hook)


class Monitored:
    """The part of an app that is for those who watch it."""

    name: str
    tasks: Registry
    _access: StoreAccess
    _clock: Clock

    @cached_property
    def objective(self) -> Objective | None:
        """How punctual its runs should be."""
        text = setting("objective")
        return parse_objective(text) if text else None

    def _set_objective(self, text: str | None) -> None:
        """None leaves it to the settings."""
        if text is not None:
            self.objective = parse_objective(text)

    @cached_property
    def _alert_hooks(self) -> list[Hook]:
        return []

    @property
    def counts(self) -> Counts | None:
        """What is counted, if metrics are on."""
        return self._access.counts

    def enable_metrics(self) -> Counts:
        """Count jobs, runs and store calls from now on. Call it before the app is first used: a
        store that is open already is not counted."""
        if self._access.counts is None:
            self._access.counts = Counts(self._clock)
        return self._access.counts

    def on_alert(self, hook: A) -> A:
        """Call this async function, in a worker, with each `Alert`: a job is dead, the objective is
        missed, or due jobs have no worker that knows their task.

        At most once per kind and subject in five minutes. What it raises is logged, and a call that
        takes longer than 30 seconds is cancelled. Also turns metrics on.
        """
        try:
            fits = inspect.iscoroutinefunction(hook)
            inspect.signature(hook).bind(None)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise BadConfig(
                f"on_alert needs an async function of one parameter, the alert, not {shown(hook)}"
            )
        self._alert_hooks.append(hook)
        self.enable_metrics()
        return hook

    def _worker_counts(self) -> Counts | None:
        """The counts of a worker that starts now."""
        counts = self._access.counts
        if counts is not None:
            counts.set_objective(self.objective)
            for task in self.tasks.all():
                counts.know(task.name, task.queue)
        return counts

    def _alerts(self, client: Client, worker: str) -> Alerts | None:
        """What tells the functions that want to know; None if there are none."""
        if not self._alert_hooks:
            return None
        return Alerts(
            self._alert_hooks,
            self.enable_metrics(),
            client.store,
            client.clock,
            worker=worker,
            app=self.name,
            objective=self.objective,
        )
