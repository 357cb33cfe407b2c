"""`tickwheel nats`: real servers in the foreground, and a configuration that servers accept."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from tickwheel import App, CancelOutcome, State, Task, job as life
from tickwheel.cli import main
from tickwheel.job import Job
from tickwheel.store import Store, open_store
from tickwheel.stores.nats.servers.permissions import ROLES
from tickwheel.stores.nats.servers.process import find_binary
from tickwheel.stores.nats.servers.production import production_text, variables

PASSWORDS = dict.fromkeys(variables(), "secret")
SOON_S = 30


# --- Servers in the foreground


@contextmanager
def command(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tickwheel", "nats", *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stopped(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code after Ctrl-C, and what was said."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SOON_S)
    return process.returncode, err


def exported(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("export TICKWHEEL_STORE="), line
    return shlex.split(line)[1].partition("=")[2]


def document(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "}\n")
    return json.loads("".join(lines) + "}")


async def enqueued(url: str) -> State:
    """What becomes of a job in the store that was printed."""
    app = App(url)

    @app.task
    async def greet() -> None: ...

    async with app:
        job = await greet.using(delay=60).enqueue()
        return (await job.info()).state


def test_up_runs_a_server_until_it_is_told_to_stop(tmp_path: Path) -> None:
    with command("up", "--dir", "jobs", cwd=tmp_path) as process:
        url = exported(process)
        assert asyncio.run(enqueued(url)) is State.WAITING
        code, said = stopped(process)
    assert code == 0
    assert "strict" in said and str(tmp_path / "jobs") in said and "stopped" in said
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(url).port or 0))


def test_up_as_json_has_the_same_url_the_next_time(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with command("up", "--durability", "fast", "-o", "json", cwd=tmp_path) as process:
            found.append(document(process))
            stopped(process)
    assert found[0]["url"] == found[1]["url"]
    assert found[0]["durability"] == "fast"
    assert found[0]["folder"] == str(tmp_path / "tickwheel-nats")


def test_a_second_up_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with command("up", cwd=tmp_path) as process:
        exported(process)
        with command("up", cwd=tmp_path) as second:
            _, said = second.communicate(timeout=SOON_S)
            assert second.returncode == 5
        assert re.search(r"^error: another NATS server runs on .* \(pid \d+\): stop it", said)
        stopped(process)


def test_up_says_so_when_its_server_dies(tmp_path: Path) -> None:
    with command("up", "-o", "json", cwd=tmp_path) as process:
        os.kill(document(process)["pid"], signal.SIGKILL)
        _, said = process.communicate(timeout=SOON_S)
        assert process.returncode == 5
    assert said.startswith("error: the server exited unexpectedly")


def test_a_cluster_in_the_foreground(tmp_path: Path) -> None:
    with command("cluster", "--dir", "jobs", "-o", "json", cwd=tmp_path) as process:
        found = document(process)
        assert [node["name"] for node in found["nodes"]] == ["n1", "n2", "n3"]
        assert found["url"].endswith("&replicas=3")
        assert asyncio.run(enqueued(found["url"])) is State.WAITING
        os.kill(found["nodes"][0]["pid"], signal.SIGKILL)
        assert process.stderr is not None
        assert "n1 is down" in process.stderr.readline()
        assert "n1 is back" in process.stderr.readline()
        code, said = stopped(process)
    assert (code, said) == (0, "stopped\n")


def test_a_cluster_for_people_says_what_to_try(tmp_path: Path) -> None:
    with command("cluster", cwd=tmp_path) as process:
        url = exported(process)
        assert url.startswith("nats://") and url.count("127.0.0.1:") == 3
        code, said = stopped(process)
    assert code == 0
    assert re.search(r"^n3 +pid \d+", said, re.MULTILINE)
    [leader] = re.findall(r"pid (\d+), the leader", said)
    assert f"kill -9 {leader}" in said


# --- A configuration


def checked(text: str, folder: Path) -> str:
    """What the server has to say about a configuration; nothing if it is fine."""
    (folder / "nats.conf").write_text(text)
    done = subprocess.run(
        [find_binary(), "-t", "-c", str(folder / "nats.conf")],
        env={**os.environ, **PASSWORDS},
        capture_output=True,
        text=True,
    )
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("words", [[], ["--hosts", "one.example.com"], ["--durability", "fast"]])
def test_servers_accept_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["nats", "conf", "--no-tls", *words]) == 0
    out, err = capsys.readouterr()
    assert checked(out, tmp_path) == ""
    assert ("sync_interval: always" in out) is ("fast" not in words)
    assert ("cluster {" in out) is ("--hosts" not in words)
    assert all(name in err for name in PASSWORDS)


@pytest.mark.parametrize(("hosts", "most"), [("a", "40GB"), ("a,b,c", "120GB")])
def test_the_account_is_limited_below_its_servers(
    capsys: pytest.CaptureFixture[str], hosts: str, most: str
) -> None:
    """A store survives a full account, but not full servers. Each copy of a job counts."""
    assert main(["nats", "conf", "--hosts", hosts]) == 0
    out = capsys.readouterr().out
    assert "\n  max_file: 50GB\n" in out
    assert f"jetstream: {{ max_file: {most} }}" in out


def test_a_waiting_job_is_reckoned_with_its_padding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nats", "conf"]) == 0
    assert "0.75 KB on disk" in capsys.readouterr().out


def test_with_tls_only_the_certificates_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nats", "conf", "--tls", str(tmp_path / "tls")]) == 0
    complaints = checked(capsys.readouterr().out, tmp_path).strip().splitlines()
    # One for clients, one for the other servers.
    assert len(complaints) == 2
    assert all(f"{tmp_path}/tls/server.crt: no such file" in each for each in complaints)


@pytest.mark.parametrize(
    "words", [["--hosts", "a,,b"], ["--name", 'x"'], ["--tls", 'x"'], ["--hosts", "a b"]]
)
def test_what_can_not_be_written_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nats", "conf", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


def test_an_even_number_of_servers_is_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nats", "conf", "--hosts", "a,b,c,d"]) == 0
    assert "4 servers tolerate no more failures than 3" in capsys.readouterr().err


def test_the_command_alone_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nats"]) == 2
    assert capsys.readouterr().err == "error: Missing command. (see tickwheel nats --help)\n"


@pytest.mark.parametrize("verb", ["", "up", "cluster", "conf"])
def test_help_fits_a_terminal(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nats", *verb.split(), "-h"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) < 80
    assert "..." not in out.partition("\n")[2], "something was cut"


# --- What the roles may do, on a server with that configuration


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[str]:
    """Host and port of a server with the configuration for production, without TLS."""
    text = production_text(name="nats-1", hosts=("nats-1",), tls=None)
    for old, new in (
        ("0.0.0.0:4222", "127.0.0.1:-1"),
        ("127.0.0.1:8222", "127.0.0.1:-1"),
        ("/var/lib/nats", str(tmp_path)),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "nats.conf").write_text(f'{text}\nports_file_dir: "{tmp_path}"\n')
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [find_binary(), "-c", str(tmp_path / "nats.conf")],
            env={**os.environ, **PASSWORDS},
            stderr=log,
        )
    try:
        yield asyncio.run(_address(tmp_path))
    finally:
        server.kill()
        server.wait()


async def _address(folder: Path) -> str:
    async with asyncio.timeout(SOON_S):
        while True:
            for file in folder.glob("*.ports"):
                if text := file.read_text():
                    [url] = json.loads(text)["nats"]
                    return str(url).removeprefix("nats://")
            await asyncio.sleep(0.02)


async def allowed(where: str, role: str, subjects: list[str]) -> list[str]:
    """Those of the subjects that this role may publish to."""
    denied = asyncio.Queue[str]()

    async def note(error: Exception) -> None:
        await denied.put(str(error).rpartition(" to ")[2].strip('"'))

    client = await nats.connect(
        f"nats://{role}:secret@{where}", inbox_prefix=f"_INBOX_{role}", error_cb=note
    )
    # The last one is denied to all: when that is known, so is what became of those before it.
    for subject in (*subjects, "denied"):
        await client.publish(subject, b"", reply=f"_INBOX_{role}.x")
    seen = set()
    async with asyncio.timeout(SOON_S):
        while "denied" not in seen:
            seen.add(await denied.get())
    await client.close()
    # The client tells them in small letters.
    return [subject for subject in subjects if subject.lower() not in seen]


STREAM = "TICKWHEEL-default-0"
ADD, LOOK = "tw.default.0.t.s.mail.1", f"$JS.API.STREAM.MSG.GET.{STREAM}"
DONE, SCHEDULE = "tw.default.0.t.d.mail.1", "tw.default.0.k.daily"
RECORD, GROUP = "tw.default.0.n.key-abc.abc", "tw.default.0.g.key.abc"
TAKE, PAUSE = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.x", f"$JS.API.CONSUMER.PAUSE.{STREAM}.x"
MOVE = f"$JS.API.CONSUMER.LEADER.STEPDOWN.{STREAM}.x"
DELETE, OTHER = f"$JS.API.STREAM.DELETE.{STREAM}", "tw.other.0.t.s.mail.1"
SUBJECTS = [ADD, LOOK, DONE, SCHEDULE, RECORD, GROUP, TAKE, MOVE, PAUSE, DELETE, OTHER]


@pytest.mark.parametrize(
    ("role", "may"),
    [("producer", SUBJECTS[:2]), ("worker", SUBJECTS[:8]), ("operator", SUBJECTS[:10])],
)
async def test_each_role_may_do_its_own_work_alone(
    configured: str, role: str, may: list[str]
) -> None:
    assert role in ROLES
    assert await allowed(configured, role, SUBJECTS) == may


async def test_workers_may_park_and_producers_may_see_and_cancel_what_is_parked(
    configured: str,
) -> None:
    async with AsyncExitStack() as stack:
        stores: dict[str, Store] = {}
        for role in ("operator", "producer", "worker"):
            stores[role] = open_store(f"nats://{role}:secret@{configured}")
            await stores[role].open()
            stack.push_async_callback(stores[role].close)
        other = stores["worker"].new_handle()
        await other.open()
        stack.push_async_callback(other.close)
        producer, worker = stores["producer"], stores["worker"]
        now = time.time_ns() // 1_000_000
        jobs = [
            Job(id=id, task="mail", payload="{}", queue="parking", due_ms=now, created_ms=now)
            for id in ("a", "b", "c")
        ]
        assert await producer.add(jobs[:2]) == [True, True]

        async def claim(store: Store, *tasks: str) -> list[Job]:
            return await store.claim(
                ["parking"], worker="w", limit=2, now_ms=now, lease_ms=60_000, tasks=tasks
            )

        held = await claim(worker)
        until_ms = now + 1000 * SOON_S
        waiting = asyncio.create_task(
            other.wait(["parking"], now_ms=now, until_ms=until_ms, tasks=["mail"])
        )
        assert await claim(other, "mail") == []
        settlements = [life.park(job, ended_ms=now) for job in held]
        assert await worker.settle(settlements, now_ms=now) == [True, True]
        assert [job.task for job in await producer.parked()] == ["mail"]
        queues = {queue.name: queue.waiting for queue in await producer.queues()}
        assert queues["parking"] == 2
        assert await producer.cancel(["a"], now_ms=now) == [CancelOutcome.CANCELLED]
        async with asyncio.timeout(SOON_S):
            await waiting
            while not (again := await claim(other, "mail")):
                await asyncio.sleep(0.02)
        assert [job.id for job in again] == ["b"]
        assert await producer.parked() == []
        await worker.put_records("key", {"a": "1", "b": "2"})
        assert await worker.delete_records("key", ["b"]) == [True]
        assert await producer.records("key") == await worker.records("key") == [("a", "1")]
        assert await producer.add(jobs[2:]) == [True]
        async with asyncio.timeout(SOON_S):
            while not (parked := await claim(worker, "bill")):
                await asyncio.sleep(0.02)
        assert [(job.id, job.parked) for job in parked] == [("c", True)]


async def test_each_role_may_do_all_of_its_work(configured: str) -> None:
    """The real store, opened by each of them: jobs are added, cancelled and run."""

    def app_of(role: str) -> tuple[App, Task[[int], int, Any]]:
        app = App(f"nats://{role}:secret@{configured}")

        @app.task(name="double")
        async def double(n: int) -> int:
            return 2 * n

        if role == "worker":

            @app.every("1h")
            async def hourly() -> None: ...

        return app, double

    operator, _ = app_of("operator")
    producer, double = app_of("producer")
    working, _ = app_of("worker")
    async with operator, producer:
        never = await double.using(delay=60).enqueue(1)
        assert (await never.cancel()) is CancelOutcome.CANCELLED
        async with working, working.worker() as worker:
            job = await double.using(delay=0.2).enqueue(21)
            assert await job.result(timeout=SOON_S) == 42
            assert [each.name for each in await producer.workers()] == [worker.name]
        await operator.pause("default")
        assert [queue.paused for queue in await producer.queues()] == [True]
