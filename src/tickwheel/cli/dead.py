"""`tickwheel dead`: jobs that are out of retries and wait for a person."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from tickwheel.cli.answers import Answer, emit_answers, report
from tickwheel.cli.codes import CONFLICT, FAILURE
from tickwheel.cli.finding import BATCH, find_ids, list_jobs
from tickwheel.cli.loading import ask
from tickwheel.cli.options import (
    AppOption,
    CursorOption,
    LimitOption,
    Noun,
    OutputOption,
    QueueOption,
    StoreOption,
    TaskOption,
)
from tickwheel.cli.output import Output, say
from tickwheel.cli.views import show_dead
from tickwheel.client import Client
from tickwheel.errors import BadConfig
from tickwheel.job import State
from tickwheel.store import Query

noun = typer.Typer(
    cls=Noun, help="Look at dead jobs (the dead letters), run them again, or delete them."
)

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID...]", help="The ids of dead jobs, or --all.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All dead jobs, instead of ids.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before --all.")]


@noun.command("list")
def list_(
    queue: QueueOption = None,
    task: TaskOption = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List dead jobs with their errors, the last one first."""
    list_jobs(
        store,
        app,
        output,
        Query(state=State.DEAD, queue=queue, task=task),
        cursor=cursor,
        limit=limit,
        show=show_dead,
        none="no such dead jobs" if queue or task else "no dead jobs",
    )


@noun.command()
def rerun(
    ids: Ids = None,
    all_: AllOption = False,
    yes: YesOption = False,
    queue: QueueOption = None,
    task: TaskOption = None,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run dead jobs again, now, with all their retries. --queue and --task narrow --all."""
    _Step("rerun", "rerun: it is due now", Client.rerun, store, app, output).take(
        ids, all_, yes, queue, task
    )


@noun.command()
def delete(
    ids: Ids = None,
    all_: AllOption = False,
    yes: YesOption = False,
    queue: QueueOption = None,
    task: TaskOption = None,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete dead jobs for good. --queue and --task narrow --all."""
    _Step("delete", "deleted", Client.delete, store, app, output).take(ids, all_, yes, queue, task)


@dataclass(frozen=True, slots=True)
class _Step:
    """Something done to dead jobs: to some by id, or to all that match after a question."""

    verb: str
    words: str
    act: Callable[[Client, Sequence[str]], Awaitable[list[bool]]]
    store: str | None
    app: str | None
    output: Output

    def take(
        self, ids: list[str] | None, all_: bool, yes: bool, queue: str | None, task: str | None
    ) -> None:
        if bool(ids) == all_:
            raise BadConfig(f"say which: tickwheel dead {self.verb} ID..., or --all")
        if all_:
            self._to_all(Query(state=State.DEAD, queue=queue, task=task), yes)
            return
        if queue or task or yes:
            raise BadConfig("--queue, --task and --yes go with --all, not with ids")
        chosen = list(dict.fromkeys(ids or ()))
        report(ask(self.store, self.app, lambda client: self._each(client, chosen)), self.output)

    def _to_all(self, query: Query, yes: bool) -> None:
        if not yes and not sys.stdin.isatty():
            raise BadConfig(f"dead {self.verb} --all needs --yes where nobody can be asked")
        ids = ask(self.store, self.app, lambda client: find_ids(client, query))
        if ids and not yes:
            self._confirm(len(ids))
        answers = ask(self.store, self.app, lambda client: self._each(client, ids)) if ids else []
        if self.output is Output.JSON:
            emit_answers(answers)
        else:
            done = sum(not answer.code for answer in answers)
            say(f"{self.words.partition(':')[0]}: {_jobs(done)}" if ids else "no dead jobs")

    def _confirm(self, count: int) -> None:
        if not typer.confirm(f"{self.verb} {_jobs(count)}?", err=True):
            say("nothing was changed")
            raise typer.Exit(FAILURE)

    async def _each(self, client: Client, ids: Sequence[str]) -> list[Answer]:
        answers: list[Answer] = []
        for start in range(0, len(ids), BATCH):
            answers += await self._batch(client, ids[start : start + BATCH])
        return answers

    async def _batch(self, client: Client, ids: Sequence[str]) -> list[Answer]:
        # The store's step takes any ended job; this command is for dead ones alone.
        before = dict(zip(ids, await client.store.get(ids), strict=True))
        dead = [id for id, job in before.items() if job is not None and job.state is State.DEAD]
        done = dict(zip(dead, await self.act(client, dead), strict=True)) if dead else {}
        return [
            self._answer(id, None if (job := before[id]) is None else job.state, done) for id in ids
        ]

    def _answer(self, id: str, state: State | None, done: dict[str, bool]) -> Answer:
        if done.get(id):
            return Answer(id, self.words.partition(":")[0], self.words)
        if state is None:
            return Answer.unknown(id)
        if state is State.DEAD:
            return Answer(id, "changed", "changed meanwhile: it is no longer dead", CONFLICT)
        return Answer(id, "not_dead", f"not dead: it is {state}", CONFLICT)


def _jobs(count: int) -> str:
    return f"{count:,} dead job{'' if count == 1 else 's'}"
