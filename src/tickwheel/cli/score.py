"""`tickwheel score`: the scheduling contest, strategies side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tickwheel.cli.options import COUNT, Verb, as_output
from tickwheel.cli.output import FAILURE, OK, Column, emit_json, say, show_table

if TYPE_CHECKING:
    from tickwheel.score.entrants import Entrant
    from tickwheel.score.report import Scores
    from tickwheel.score.run import Advance, Rules, Tell


@click.command("score", cls=Verb)
@click.option(
    "--minutes", type=click.FloatRange(0.1, 1_440), default=10.0, help="For how long jobs arrive."
)
@click.option("--instances", type=COUNT, default=5, help="Processes of each strategy.")
@click.option("--ha", is_flag=True, help="Kill 3 of 5 instances, by SIGKILL and SIGTERM.")
@click.option(
    "--only", metavar="NAMES", help="Only these strategies, separated by commas; see below."
)
@click.option("--seed", type=int, default=1, help="What decides which jobs come when.")
@click.option(
    "--xlsx", metavar="FILE", type=click.Path(path_type=Path), help="Write a workbook with charts."
)
@click.option(
    "--markdown", metavar="FILE", type=click.Path(path_type=Path), help="Write a page of Markdown."
)
@as_output
def score(
    minutes: float,
    instances: int,
    ha: bool,
    only: str | None,
    seed: int,
    xlsx: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> int:
    """Compare ways to run jobs on time, by cost and lateness.

    Starts servers and instances on this machine, and ends them. Needs the extra `score`. Exits with
    1 if a strategy lost, doubled or delayed a job.

    \b
    Strategies, all at the same time:
      poll-1s           poll a table each second
      poll-10s          poll it each 10 s, with a lock
      prepare-10s       lock jobs of the next 10 s, SKIP LOCKED, timers
      tickwheel-STORE   sqlite, postgresql, redis or nats, with ahead=20s
      tickwheel-default PostgreSQL, without options
    """
    from tickwheel.score import report as reporting
    from tickwheel.score.run import Rules

    plan = Rules(minutes=minutes, instances=instances, seed=seed, ha=ha, entrants=_chosen(only))
    for path in (xlsx, markdown):
        _writable(path)
    report = _run(plan)
    if xlsx is not None:
        reporting.workbook(report, xlsx)
    if markdown is not None:
        markdown.write_text(reporting.markdown(report, markdown.read_text()))
    if as_json:
        emit_json(reporting.document(report))
    else:
        _show(report)
    return OK if report.valid else FAILURE


def _chosen(only: str | None) -> Sequence[Entrant]:
    from tickwheel.errors import BadConfig
    from tickwheel.score.entrants import BY_KEY, ENTRANTS

    if only is None:
        return ENTRANTS
    keys = list(dict.fromkeys(filter(None, (each.strip() for each in only.split(",")))))
    if unknown := [key for key in keys if key not in BY_KEY]:
        raise BadConfig(f"--only {unknown[0]!r}: the strategies are {', '.join(BY_KEY)}")
    if not keys:
        raise BadConfig(f"--only names no strategy; there are {', '.join(BY_KEY)}")
    return [BY_KEY[key] for key in keys]


def _writable(path: Path | None) -> None:
    """Better now than after ten minutes."""
    from tickwheel.errors import BadConfig

    if path is None:
        return
    if path.suffix == ".xlsx":
        from tickwheel.score.servers import require

        require("--xlsx", "xlsxwriter")
    try:
        path.touch()
    except OSError as error:
        raise BadConfig(f"{path} can't be written: {error.strerror}") from None


def _run(plan: Rules) -> Scores:
    import asyncio
    import signal
    import tempfile

    from tickwheel.score.report import Scores
    from tickwheel.score.run import contest

    say(
        f"{len(plan.entrants)} strategies, {plan.instances} instances of each; "
        f"about {plan.last_s / 60 + 0.2:.1f} minutes"
    )
    for each in (signal.SIGINT, signal.SIGTERM):
        # Whatever ends it, also in the background: it ends all that it has started.
        signal.signal(each, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tickwheel-score-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # a server may run as another user
        with _progress(plan) as tell:
            results = asyncio.run(contest(plan, folder, tell))
    return Scores.of(
        results, minutes=plan.minutes, instances=plan.instances, seed=plan.seed, ha=plan.ha
    )


@contextmanager
def _progress(plan: Rules) -> Iterator[Tell]:
    """A bar for each strategy on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from tickwheel.score.contest import arrivals

    total = len(arrivals(plan.seed, plan.minutes))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[phase]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars = {
            each.key: progress.add_task(each.key, total=total, phase="starting")
            for each in plan.entrants
        }

        def show(standings: Mapping[str, Advance]) -> None:
            for key, each in standings.items():
                progress.update(bars[key], completed=each.done, phase=each.phase)

        yield show


def _show(report: Scores) -> None:
    click.echo(report.title)
    click.echo()
    show_table(
        [
            Column("#", right=True),
            Column("STRATEGY", whole=False, least=16),
            Column("ON"),
            Column("COST", right=True),
            Column("EFFICIENCY", right=True),
            Column("WORST", right=True),
            Column("DONE", right=True),
            Column("VALID", whole=False, least=5),
        ],
        [
            (
                str(n),
                each.name,
                each.where,
                f"{each.cost:,}",
                f"{each.efficiency_ms:,.1f} ms",
                f"{each.worst_ms:,.0f} ms",
                f"{each.done / max(each.jobs, 1):.0%}",
                ("yes", "green") if each.valid else (str(row[-1]), "red"),
            )
            for n, (each, row) in enumerate(zip(report.results, report.rows(), strict=True), 1)
        ],
    )
    click.echo()
    click.echo("cost: list queries × 100 + failed locks × 10 + single-job queries")
    click.echo("efficiency: mean lateness + its standard deviation")
