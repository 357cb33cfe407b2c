"""Who runs a command that changes a store, and what it changes: one entry of the audit log.

Commands don't say what they write: the store that they get notes it, so none can forget to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import click

from tickwheel.cli.output import say
from tickwheel.errors import TickwheelError
from tickwheel.job import CancelOutcome
from tickwheel.operate.audit import KIND, NAMED, Audit, Entry, in_words

if TYPE_CHECKING:
    from tickwheel.app import App
    from tickwheel.client import Client
    from tickwheel.store import Store

# How long the entry may take: the command is done.
AUDIT_S = 5.0

# What each step of a store that changes something is about, by its arguments.
_STEPS: dict[str, Callable[..., list[str]]] = {
    "add": lambda jobs: [job.id for job in jobs],
    "cancel": lambda ids, **_: list(ids),
    "rerun": lambda ids, **_: list(ids),
    "delete": lambda ids: list(ids),
    "pause": lambda queue, paused: [queue],
    "put_schedule": lambda schedule: [schedule.name],
    "replace_schedule": lambda schedule: [schedule.name],
    "delete_schedule": lambda name: [name],
    "put_records": lambda kind, records: list(records),
    "delete_records": lambda kind, names: list(names),
}
_CHANGED = (True, CancelOutcome.CANCELLED, CancelOutcome.REQUESTED)
# Arguments and options that are worth noting. Others may be secrets: arguments of jobs, texts of
# keys; of `--meta`, only the name is.
_NOTED = ("name", "state", "queue", "task", "since", "delay", "at", "priority", "scopes", "queues",
          "tasks", "expires", "rate")  # fmt: skip


@asynccontextmanager
async def audited(app: App, opening: Callable[[App], Any]) -> AsyncIterator[Client]:
    """Open the app's store for a command; what the command changes is noted at its end. That it
    can't be is said on stderr, and is no failure: what was changed is changed."""
    notes = Notes()
    app._access.around = notes.noting
    outcome = "failed"
    try:
        await opening(app)
        try:
            client = await app.client()
            yield client
            outcome = "ok" if notes.changed or not notes.count else "unchanged"
        finally:
            if notes.count:
                await _write(client, notes.entry(client.clock.now_ms(), outcome))
            await app.__aexit__()
    finally:
        app._access.around = None


class Notes:
    """What was changed in a store, or was to be."""

    def __init__(self) -> None:
        self.count = self.changed = 0
        self._names: dict[str, None] = {}

    def noting(self, store: Store) -> Store:
        """The same store; tells what is changed in it."""
        return cast("Store", _Noting(store, self))

    def attempt(self, names: Sequence[str]) -> None:
        self.count += sum(name not in self._names for name in names)
        for name in names[: NAMED - len(self._names)]:
            self._names[name] = None

    def entry(self, at_ms: int, outcome: str) -> Entry:
        import getpass
        import socket

        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user without a name, as in some containers
            user = "unknown"
        context = click.get_current_context(silent=True)
        names, alone = list(self._names), ""
        if self.count == 1:
            [alone] = names
        noted = {} if context is None else _noted(context.params, without=alone)
        done = min(self.changed, self.count)
        return Entry(
            at_ms=at_ms,
            who=f"cli:{user}",
            action="" if context is None else context.command_path.partition(" ")[2],
            target=alone,
            source=socket.gethostname(),
            outcome=outcome,
            detail=in_words(noted) if alone else in_words(noted, names, done, self.count),
        )


class _Noting:
    def __init__(self, inner: Store, notes: Notes) -> None:
        self._inner = inner
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        step = getattr(self._inner, name)
        return self._noted(name, step) if name in _STEPS else step

    def _noted(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(*args: Any, **kwargs: Any) -> Any:
            if name.endswith("_records") and args[0] == KIND:
                return await step(*args, **kwargs)  # the log itself
            names = _STEPS[name](*args, **kwargs)
            self._notes.attempt(names)
            answer = await step(*args, **kwargs)
            if isinstance(answer, list):
                self._notes.changed += sum(each in _CHANGED for each in answer)
            elif answer is not False:
                self._notes.changed += len(names)
            return answer

        return noted


async def _write(client: Client, entry: Entry) -> None:
    try:
        async with asyncio.timeout(AUDIT_S):
            await Audit(client).write([entry])
    except (TickwheelError, TimeoutError) as error:
        why = str(error) or "the store does not answer"
        say(f"note: this could not be written to the audit log: {why}")


def _noted(params: Mapping[str, Any], without: str) -> dict[str, str]:
    noted: dict[str, str] = {}
    for name in _NOTED:
        value = params.get(name)
        text = " ".join(value) if isinstance(value, tuple) else value
        if text and text != without:
            noted[name] = str(text)
    if (meta := params.get("meta")) is not None:
        noted["meta"] = f"{meta[0]}=…"
    return noted
