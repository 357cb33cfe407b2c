"""`tickwheel explain`, on a real file with a real worker."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tickwheel import App, JobFailed
from tickwheel.cli import main


class Shell:
    """Explains jobs of one store, and reads what is printed."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys

    def printed(self) -> str:
        return self._capsys.readouterr().out

    def run(self, id: str, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = main(["explain", id, "--store", self.url, *arguments])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def json(self, id: str) -> Any:
        code, out, err = self.run(id, "-o", "json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    yield Shell(f"sqlite:///{tmp_path}/jobs.db", capsys)


def codes(document: Any) -> list[str]:
    return [each["code"] for each in document["reasons"]]


def test_a_job_is_explained_from_its_wait_to_its_death(shell: Shell) -> None:
    app = App(shell.url)

    @app.task(queue="mail", retries=0)
    async def send(to: str) -> None:
        raise ValueError(f"no mailbox for {to}")

    async def live() -> None:
        async with app:
            job = await send.using(id="mail-1").enqueue("ann")
            await asyncio.to_thread(waits)
            async with app.worker(guarded=False):
                with pytest.raises(JobFailed):
                    await job.result(timeout=10)

    def waits() -> None:
        code, out, err = shell.run("mail-1")
        assert (code, err) == (0, "")
        assert out.startswith("It is waiting and has been due")
        assert "No worker is running." in out
        assert "tickwheel worker MODULE:APP --queues mail\n" in out
        assert f"tickwheel jobs cancel mail-1 --store {shell.url}\n" in out
        assert codes(shell.json("mail-1")) == ["no_worker", "failures_left"]

    asyncio.run(live())
    found = shell.json("mail-1")
    assert (found["state"], found["runs"], found["holder"]) == ("dead", None, None)
    assert "no mailbox for ann" in shell.run("mail-1")[1]
    assert f"tickwheel jobs rerun mail-1 --store {shell.url}" in [
        each["command"] for each in found["advice"]
    ]


def test_what_it_advises_works_for_an_id_that_begins_with_a_dash(shell: Shell) -> None:
    app = App(shell.url)
    app.task(_nothing).using(delay="1h", id="-9").enqueue_sync()
    app.sync.close()
    assert main(["explain", "--store", shell.url, "-o", "json", "--", "-9"]) == 0
    [cancel] = [
        each["command"]
        for each in json.loads(shell.printed())["advice"]
        if each["words"] == "To cancel it:"
    ]
    assert main(shlex.split(cancel)[1:]) == 0
    assert "cancelled" in shell.printed()


def _nothing() -> None: ...


def test_a_running_job_names_its_holder(shell: Shell) -> None:
    app = App(shell.url)
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def slow() -> None:
        started.set()
        await finish.wait()

    async def live() -> None:
        async with app, app.worker(guarded=False) as worker:
            while not await app.workers():
                await asyncio.sleep(0.01)
            await slow.using(id="s").enqueue()
            await started.wait()
            await asyncio.to_thread(looks, worker.name)
            finish.set()

    def looks(name: str) -> None:
        found = shell.json("s")
        assert found["holder"]["worker"] == name and found["holder"]["alive"]
        assert found["runs_words"] == "now" and "held" in codes(found)
        assert main(["jobs", "cancel", "s", "--store", shell.url]) == 0
        # Once it is requested, its worker ends it: either may be seen.
        until = time.monotonic() + 10
        while (found := shell.json("s"))["state"] == "running":
            assert found["cancel_requested"] and codes(found)[0] == "cancel_requested"
            assert time.monotonic() < until
        assert codes(found) == ["cancelled"]

    asyncio.run(live())


def test_with_its_app_it_knows_the_tasks_retries(
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "shop_explained.py").write_text(
        "from tickwheel import App\n"
        f"app = App({shell.url!r})\n"
        "@app.task(retries=7)\n"
        "async def pack() -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    app = App(shell.url)

    @app.task
    async def pack() -> None: ...

    pack.using(id="p", delay="1h").enqueue_sync()
    app.sync.close()
    assert shell.json("p")["retries"] is None
    assert main(["explain", "p", "--app", "shop_explained", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["retries"] == 7
    assert found["advice"][-1]["command"] == "tickwheel jobs cancel p --app shop_explained"


def test_an_unknown_job_has_its_own_code(shell: Shell) -> None:
    app = App(shell.url)
    app.sync.queues()
    app.sync.close()
    code, out, err = shell.run("nobody")
    assert (code, out) == (3, "")
    assert err.startswith("error: no job has the id 'nobody'") and err.count("\n") == 1


def test_help_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "-h"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) < 80
    assert main(["-h"]) == 0
    [line] = [
        each for each in capsys.readouterr().out.splitlines() if each.startswith("  explain ")
    ]
    assert not line.endswith("..."), "something was cut"
