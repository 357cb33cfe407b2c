"""`tickwheel worker --http`, scraped; and what the files in docs/monitoring ask of it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text
from worker_process import Command, enqueue, until

from tickwheel import App
from tickwheel.store import WorkerCounts

DOCS = Path(__file__).parents[2] / "docs"
OPEN = "application/openmetrics-text; version=1.0.0"

SHOP = """
import asyncio
from pathlib import Path
from tickwheel import Alert, App

app = App("sqlite:///jobs.db", objective="99% within 1h")

@app.task
async def mark(name: str) -> None:
    Path(name).touch()

@app.task(retries=0)
async def fail() -> None:
    raise ValueError("no luck")

@app.task
async def linger() -> None:
    Path("lingering").touch()
    while not Path("go").exists():
        await asyncio.sleep(0.05)

@app.on_alert
async def tell(alert: Alert) -> None:
    Path("alert").write_text(f"{alert.kind} {alert.task}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def ports(command: Command, count: int = 1) -> list[int]:
    def found() -> list[int]:
        return [
            int(each) for each in re.findall(r"metrics at http://127\.0\.0\.1:(\d+)/", command.said)
        ]

    until(lambda: len(found()) >= count or command.process.poll() is not None, "the port")
    return sorted(set(found()))


def get(port: int, path: str, accept: str = "") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def scraped(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by name."""
    _, _, text = get(port, "/metrics")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parse_text(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(port: int, name: str, **labels: str) -> float:
    [found] = [value for each, value in scraped(port)[name] if labels.items() <= each.items()]
    return found


@pytest.mark.slow
def test_a_worker_is_scraped_while_it_works_and_while_it_stops(
    folder: Path, runner: asyncio.Runner
) -> None:
    with Command(folder, "worker", "shop", "--http", ":0") as worker:
        [port] = ports(worker)
        until(lambda: get(port, "/healthz")[0] == 200, "the start")
        enqueue(folder, runner, "mark", name="packed")
        enqueue(folder, runner, "fail")
        until(lambda: value(port, "tickwheel_jobs_done_total", task="mark") == 1, "the job")
        until(lambda: value(port, "tickwheel_jobs_dead_total", task="fail") == 1, "the other")
        assert value(port, "tickwheel_punctuality_seconds_count", task="mark") == 1
        assert value(port, "tickwheel_objective_good_total", task="mark") == 1
        assert value(port, "tickwheel_objective_ratio") == 0.99
        assert value(port, "tickwheel_workers") == 1
        assert value(port, "tickwheel_store_calls_total", method="claim") >= 2
        until((folder / "alert").exists, "the alert")
        until(lambda: (folder / "alert").read_text() == "dead fail", "its text")
        status, kind, text = get(port, "/metrics", OPEN)
        assert status == 200 and kind.startswith("application/openmetrics-text")
        families: Any = parse_open  # untyped
        assert len(list(families(text))) > 20
        enqueue(folder, runner, "linger")
        until((folder / "lingering").exists, "a run")
        assert value(port, "tickwheel_slots_used", pool="async") == 1
        worker.signal(signal.SIGTERM)
        until(lambda: get(port, "/healthz")[0] == 503, "the stop")
        assert get(port, "/healthz")[2] == "stopping\n"
        assert value(port, "tickwheel_slots_used", pool="async") == 1
        (folder / "go").touch()
        assert worker.code() == 0


@pytest.mark.slow
def test_each_of_several_processes_has_its_own(folder: Path) -> None:
    with Command(folder, "worker", "shop", "--processes", "2", "--http", "127.0.0.1:0") as worker:
        first, second = ports(worker, 2)
        for port in (first, second):
            until(lambda port=port: get(port, "/healthz")[0] == 200, "the start")  # type: ignore[misc]
        names = {scraped(port)["tickwheel_worker_info"][0][0]["worker"] for port in (first, second)}
        assert len(names) == 2
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0


@pytest.mark.slow
def test_a_port_in_use_or_an_address_that_is_none_is_one_line(folder: Path) -> None:
    with Command(folder, "worker", "shop", "--http", ":0") as worker:
        [port] = ports(worker)
        with Command(folder, "worker", "shop", "--http", f":{port}") as other:
            assert other.code() == 2
            assert f"error: http=127.0.0.1:{port} can't be used" in other.said
    with Command(folder, "worker", "shop", "--http", ":65535", "--processes", "2") as other:
        assert other.code() == 2
        assert "2 processes need as many ports" in other.said
    with Command(folder, "worker", "shop", "--http", "http://here") as other:
        assert other.code() == 2
        assert other.said.startswith("error: --http: http='http://here': write HOST:PORT")


@pytest.mark.slow
def test_config_shows_the_objective_of_the_code(folder: Path) -> None:
    with Command(folder, "config", "--app", "shop") as command:
        assert command.code() == 0
        assert re.search(r"^objective +99% within 1h +shop$", command.said, re.MULTILINE)


# --- docs/monitoring

# What Prometheus adds to every series.
OWN = {"instance", "job", "le"}
NAME = re.compile(r"\btickwheel_[a-z_]+")
SELECTOR = re.compile(r"\b(tickwheel_[a-z_]+)\{([^}]*)\}")


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DOCS / "monitoring/alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    board = json.loads((DOCS / "monitoring/grafana.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (each["query"] for each in board["templating"]["list"] if each["type"] == "query")


def labels_of(expression: str) -> Iterator[tuple[str, str]]:
    """Each label that an expression uses, with a metric that must have it."""
    names = NAME.findall(expression)
    for name, inside in SELECTOR.findall(expression):
        yield from ((name, label) for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))
    for inside in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        yield from ((names[0], label) for label in re.findall(r"\w+", inside))
    for name, label in re.findall(r"label_values\((\w+), (\w+)\)", expression):
        yield name, label


@pytest.mark.slow
def test_every_metric_and_label_in_the_alerts_and_the_dashboard_is_exported(
    folder: Path, runner: asyncio.Runner
) -> None:
    enqueue(folder, runner, "unheard_of")
    with Command(folder, "worker", "shop", "--http", ":0") as worker:
        [port] = ports(worker)
        until(lambda: scraped(port).get("tickwheel_unserved_task"), "the parked job")
        exported = {
            name: {label for labels, _ in samples for label in labels}
            for name, samples in scraped(port).items()
        }
    used = {name for each in expressions() for name in NAME.findall(each)}
    assert used - exported.keys() == set()
    # The other way round: nothing is exported that the dashboard and the alerts leave out.
    series = {re.sub("_(bucket|count|sum)$", "", name) for name in exported}
    assert series - {re.sub("_bucket$", "", name) for name in used} == set()
    wrong = {
        (name, label)
        for each in expressions()
        for name, label in labels_of(each)
        if label not in OWN and label not in exported[name]
    }
    assert wrong == set()


def test_every_rule_says_how_urgent_it_is_and_what_to_do() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) > 5
    for rule in found:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"] and rule["annotations"]["action"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_every_metric_is_in_the_docs() -> None:
    page = (DOCS / "metrics.md").read_text()
    used = {name for each in expressions() for name in NAME.findall(each)}
    assert {name for name in used if name.removesuffix("_bucket") not in page} == set()


@pytest.mark.parametrize(
    ("verb", "env", "tells"),
    [
        (["worker"], {}, True),
        (["worker"], {"TICKWHEEL_METRICS": "off"}, False),
        (["serve", "--worker", "--port", "0"], {}, True),
    ],
)
def test_a_worker_tells_the_store_what_it_counts_unless_told_otherwise(
    tmp_path: Path, verb: list[str], env: dict[str, str], tells: bool
) -> None:
    (tmp_path / "plain.py").write_text(SHOP.partition("@app.on_alert")[0])
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    async def told() -> list[WorkerCounts | None]:
        async with app:
            return [each.counts for each in await app.workers()]

    with Command(tmp_path, *verb, "plain:app", "--lease", "1s", **env):
        with asyncio.Runner() as runner:
            enqueue(tmp_path, runner, "mark", name="marked")
        until((tmp_path / "marked").exists, "the run")
        if tells:
            until(lambda: [each.done for each in asyncio.run(told()) if each] == [1], "counts")
        else:
            until(lambda: asyncio.run(told()) == [None], "a worker")
