"""The command line, mostly in this process, and the worker command in processes of its own."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tickwheel
from tickwheel import App, JobInfo, StoreUnavailable
from tickwheel.cli import main
from tickwheel.cli.loading import without_password
from tickwheel.cli.output import clean, relative
from tickwheel.cli.root import COMMANDS
from tickwheel.client import Client
from tickwheel.job import Cancelled, Job, new_id

UTC_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


# --- Running commands in this process


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Said]


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Run a command in an empty folder, on the store `jobs.db` there unless it says otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TICKWHEEL_STORE", "sqlite:///jobs.db")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    known = set(sys.modules)

    def run(*argv: str) -> Said:
        # Files that a test wrote a moment ago are news to Python.
        importlib.invalidate_caches()
        capsys.readouterr()
        code = main(argv)
        out, err = capsys.readouterr()
        return Said(code, out, err)

    yield run
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def one_error(said: Said) -> str:
    """The one line that a user's mistake is answered with."""
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("error: ")
    return line


class Shop:
    """A store with a job in every state, made through an app."""

    def __init__(self, folder: Path) -> None:
        self.app = App(f"sqlite:///{folder}/jobs.db")
        self.ids: dict[str, str] = {}

    async def fill(self) -> None:
        app = self.app

        @app.task
        async def pack(order: int, note: str = "") -> dict[str, int]:
            return {"order": order}

        @app.task(queue="mail", retries=0)
        async def send(to: str) -> None:
            raise ValueError(f"no mailbox for {to}")

        async with app:
            done = await pack.using(id="order-1").enqueue(1, note="grüße")
            dead = await send.enqueue("ann@example.org")
            async with app.worker(guarded=False):
                await done.result(timeout=10)
                with pytest.raises(tickwheel.JobFailed):
                    await dead.result(timeout=10)
            waiting = await pack.using(delay="30m").enqueue(2)
            cancelled = await pack.using(delay="1h", priority="high").enqueue(3)
            assert await cancelled.cancel() is Cancelled.CANCELLED
        self.ids = {
            "done": done.id,
            "dead": dead.id,
            "waiting": waiting.id,
            "cancelled": cancelled.id,
        }


@pytest.fixture
def ids(tmp_path: Path, runner: asyncio.Runner) -> dict[str, str]:
    """The ids of a job that waits, one that is done, one dead and one cancelled."""
    shop = Shop(tmp_path)
    runner.run(shop.fill())
    return shop.ids


# --- The command itself


def test_version(cli: Cli) -> None:
    assert cli("--version") == Said(0, f"tickwheel {tickwheel.__version__}\n", "")


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",)])
def test_alone_it_prints_help(cli: Cli, argv: tuple[str, ...]) -> None:
    said = cli(*argv)
    assert (said.code, said.err) == (0, "")
    for command in ("worker", "jobs", "dead", "queues"):
        assert f"\n  {command} " in said.out


@pytest.mark.parametrize(
    "command",
    [
        "",
        "worker",
        *("jobs", "jobs list", "jobs show", "jobs cancel", "jobs rerun"),
        *("dead", "dead list", "dead rerun", "dead delete"),
        *("queues", "queues list", "queues pause", "queues resume"),
    ],
)
def test_help_fits_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = cli(*command.split(), "-h")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"Usage: tickwheel {command}".rstrip() + " [OPTIONS]")
    assert max(len(line) for line in said.out.splitlines()) < 80
    assert "..." not in said.out.partition("\n")[2], "something was cut"


def test_help_says_what_arguments_are(cli: Cli) -> None:
    said = cli("dead", "rerun", "-h")
    assert "dead rerun [OPTIONS] [ID]...\n" in said.out
    assert "\nArguments:\n  ID  The ids of dead jobs; or --all.\n" in said.out


@pytest.mark.parametrize(
    "words, known",
    [
        ("", list(COMMANDS)),
        ("jobs ", ["list", "show", "cancel", "rerun"]),
        ("jobs list --sta", ["--state"]),
        ("jobs list --output ", ["table", "json"]),
    ],
)
def test_a_shell_completes_commands(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    known: list[str],
) -> None:
    monkeypatch.setenv("_TICKWHEEL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"tickwheel {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(f"tickwheel {words}".split(" ")) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == [f"plain,{word}" for word in known]


# The package's own __init__ is left out: this is about what the command line imports.
LIGHT = """
import sys, types
package = types.ModuleType("tickwheel")
package.__path__ = [sys.argv[1]]
sys.modules["tickwheel"] = package
from tickwheel.cli import main
main(sys.argv[2:])
print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "argv, heavy",
    [
        (["--version"], {"rich", "asyncio", "apsw", "msgspec"}),
        (["--help"], {"rich", "asyncio", "apsw"}),
    ],
)
def test_what_asks_no_store_starts_light(argv: list[str], heavy: set[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIGHT, str(Path(tickwheel.__file__).parent), *argv],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "click" in result.stderr.split()
    assert heavy.isdisjoint(result.stderr.split())


@pytest.mark.parametrize(
    "argv, words",
    [
        (("jobbs",), "No such command 'jobbs'"),
        (("jobs", "lst"), "Did you mean 'list'?"),
        (("jobs", "list", "--state", "sleeping"), "'sleeping' is not one of"),
        (("jobs", "list", "--limit", "0"), "--limit"),
        (("jobs", "list", "--colour"), "No such option: --colour"),
        (("jobs", "show"), "Missing argument 'ID'"),
        (("queues", "pause", "a b"), "a queue name is made of"),
        (("queues", "--store", "sqlite://"), "names no file"),
        (("queues", "--store", "kafka://x"), "no store for 'kafka://'"),
        (("queues", "--store", "sqlite:///a.db", "--app", "shop"), "not both"),
        (("queues", "--store", "memory://"), "lives inside the process"),
        (("worker",), "which app? Name it, as in shop:app"),
        (("worker", "shop", "--lease", "soon"), "--lease: 'soon' is not a length of time"),
        (("worker", "shop", "--queues", "a,,b"), "a queue name has"),
        (("worker", "shop", "--processes", "0"), "--processes"),
    ],
)
def test_wrong_usage_is_one_line(cli: Cli, argv: tuple[str, ...], words: str) -> None:
    said = cli(*argv)
    assert said.code == 2
    assert words in one_error(said)


@pytest.mark.parametrize(
    "argv",
    [
        ("jobs", "show", "{}"),
        ("jobs", "cancel", "good", "{}"),
        ("jobs", "rerun", "{}"),
        ("jobs", "--queue", "{}"),
        ("jobs", "--task", "{}"),
        ("jobs", "--cursor", "{}"),
        ("jobs", "--store", "sqlite:///{}.db"),
        ("jobs", "--app", "{}"),
        ("dead", "rerun", "{}"),
        ("dead", "delete", "{}"),
        ("queues", "pause", "{}"),
        ("schedules", "pause", "{}"),
        ("schedules", "next", "{}"),
        ("explain", "{}"),
        ("worker", "{}"),
        ("dev", "{}"),
        ("migrate-jobs", "sqlite:///jobs.db", "sqlite:///{}"),
        ("{}",),
    ],
)
def test_words_that_are_not_utf_8_are_wrong_usage(
    cli: Cli, ids: dict[str, str], argv: tuple[str, ...]
) -> None:
    # As Python reads bytes of another encoding on a command line.
    said = cli(*(each.format("caf\udce9") for each in argv))
    assert said.code == 2
    assert r"caf\udce9" in one_error(said) and "is not valid UTF-8" in one_error(said)


def test_bytes_on_a_real_command_line_are_wrong_usage(tmp_path: Path) -> None:
    command: list[str | bytes] = [sys.executable, "-m", "tickwheel", "jobs", "show", b"caf\xe9"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("error: ") and len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["store", "app", "queues", "lease", "log_level"])
def test_a_setting_that_is_not_utf_8_is_wrong_usage(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"TICKWHEEL_{name.upper()}", "caf\udce9")
    said = cli("config")
    assert said.code == 2
    assert f"TICKWHEEL_{name.upper()}: the value is not valid UTF-8" in one_error(said)


def test_a_failing_store_has_its_own_code(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: Client) -> None:
        raise StoreUnavailable("the disk\nis on fire")

    monkeypatch.setattr(Client, "queues", away)
    said = cli("queues")
    assert (said.code, one_error(said)) == (5, "error: the disk is on fire")


def test_a_mistake_of_ours_is_not_hidden(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Client) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Client, "queues", broken)
    with pytest.raises(ZeroDivisionError):
        cli("queues")


def test_an_interrupt_has_its_own_code(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(_: Client) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "queues", interrupted)
    assert cli("queues").code == 130


# --- Which store


def test_looking_never_creates_a_store(cli: Cli, tmp_path: Path) -> None:
    for argv in (("queues",), ("jobs",), ("queues", "pause", "mail"), ("dead",)):
        said = cli(*argv)
        assert said.code == 5
        assert f"there is no store at {tmp_path / 'jobs.db'}" in one_error(said)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_store(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("milk, eggs\n" * 100)
    said = cli("queues", "--store", "sqlite:///notes.db")
    assert said.code == 5
    assert one_error(said).startswith("error: sqlite:///notes.db: ")


def test_the_store_of_an_app(
    cli: Cli, ids: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_a.py").write_text(
        "from tickwheel import App\napp = App('sqlite:///jobs.db')\n"
    )
    monkeypatch.setenv("TICKWHEEL_STORE", "sqlite:///elsewhere.db")
    assert len(cli("jobs", "--app", "shop_a:app", "-o", "json").json["jobs"]) == 4
    assert len(cli("jobs", "--store", "sqlite:///jobs.db", "-o", "json").json["jobs"]) == 4
    assert cli("jobs").code == 5


def test_passwords_are_not_shown() -> None:
    assert without_password("postgresql://ann:s3cret@db/x") == "postgresql://ann:***@db/x"
    assert without_password("sqlite:///jobs.db") == "sqlite:///jobs.db"


# --- Which app


@pytest.mark.parametrize(
    "target, text, words",
    [
        ("nowhere", "", "no module named 'nowhere' in "),
        ("nowhere.app", "", "did you mean nowhere:app?"),
        ("m_b.py", "", "'m_b.py' is a path; name the module: m_b:app"),
        ("src/m_b:app", "", "name the module: src.m_b:app"),
        ("a b", "", "write module:app"),
        ("m_c", "x = 1\n", "m_c has no 'app'"),
        ("m_d:shop", "from tickwheel import App\nmain = App('memory://')\n", "it has m_d:main"),
        ("m_e", "app = 3\n", "m_e:app is no tickwheel.App but of type int"),
        ("m_f", "import sys\n\nimport not_there\n", "error: m_f.py:3: No module named 'not_there'"),
        ("m_g", "from os import nothing\n", "error: m_g.py:1: cannot import name 'nothing'"),
        ("m_h", "from tickwheel import App\napp = App('x://')\n", "error: m_h.py:2: no store for"),
    ],
)
def test_an_app_that_can_not_be_loaded(
    cli: Cli, tmp_path: Path, target: str, text: str, words: str
) -> None:
    if text:
        (tmp_path / f"{target.partition(':')[0]}.py").write_text(text)
    for command in (("worker", target), ("queues", "--app", target)):
        said = cli(*command)
        assert said.code == 2
        assert words in one_error(said)


def test_an_import_that_fails_deeper_is_shown_where_it_fails(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "outer_a.py").write_text("import inner_a\n")
    (tmp_path / "inner_a.py").write_text("\n\nimport not_there\n")
    assert "inner_a.py:3: No module named" in one_error(cli("worker", "outer_a"))


@pytest.mark.parametrize(
    "text, trace, words",
    [
        ("def f():\n    return 1 / 0\n\nf()\n", "line 4, in <module>", "2: ZeroDivisionError: div"),
        ("import json\njson.loads('{')\n", "line 2, in <module>", "2: JSONDecodeError: "),
        ("def f(:\n", "def f(:", "1: invalid syntax"),
        ("import sys\nsys.exit('no')\n", "line 2", "2: SystemExit: no"),
    ],
)
def test_an_error_in_the_users_module_shows_the_users_frames(
    cli: Cli, tmp_path: Path, text: str, trace: str, words: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    said = cli("worker", "broken")
    assert said.code == 2
    *frames, last = said.err.splitlines()
    assert last.startswith(f"error: broken.py:{words}")
    assert trace in "\n".join(frames)
    files = re.findall(r'File "(.*?)"', said.err)
    assert set(files) == {str(tmp_path / "broken.py")}


def test_a_worker_whose_store_can_not_be_opened(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(
        "from tickwheel import App\napp = App('sqlite:////proc/jobs.db')\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "tickwheel", "worker", "lost"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 5
    [line] = result.stderr.splitlines()
    assert line.startswith("error: sqlite:////proc/jobs.db: ")


# --- Queues


def test_queues_in_a_table(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("queues")
    assert (said.code, said.err) == (0, "")
    assert [line.split() for line in said.out.splitlines()] == [
        ["QUEUE", "WAITING", "RUNNING", "DONE", "DEAD", "CANCELLED", "PAUSED"],
        ["default", "1", "0", "1", "0", "1"],
        ["mail", "0", "0", "0", "1", "0"],
    ]
    assert cli("queues", "list") == said


def test_queues_as_json(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("queues", "-o", "json")
    assert said.err == ""
    assert said.json["queues"][1] == {
        "name": "mail",
        "paused": False,
        "waiting": 0,
        "running": 0,
        "done": 0,
        "dead": 1,
        "cancelled": 0,
    }


def test_pause_and_resume(cli: Cli, ids: dict[str, str]) -> None:
    assert cli("queues", "pause", "mail") == Said(0, "mail: paused\n", "")
    assert cli("queues").out.splitlines()[2].endswith("paused")
    assert cli("queues", "resume", "mail", "-o", "json").json == {"name": "mail", "paused": False}
    assert "mail was not paused" in cli("queues", "resume", "mail").err
    assert "check the name" in cli("queues", "pause", "mial").err


# --- Jobs


def test_jobs_in_a_table(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs")
    assert (said.code, said.err) == (0, "")
    head, *rows = said.out.splitlines()
    assert head.split() == ["ID", "STATE", "TASK", "QUEUE", "WHEN"]
    assert {row.split()[0]: row.split()[1] for row in rows} == {
        id: state for state, id in ids.items()
    }
    assert re.search(r"waiting +pack +default +due in 29m \d+s$", rows[0])
    assert cli("jobs", "list") == said


def test_jobs_are_narrowed(cli: Cli, ids: dict[str, str]) -> None:
    def found(*options: str) -> list[str]:
        return [job["id"] for job in cli("jobs", *options, "-o", "json").json["jobs"]]

    assert found("--state", "waiting") == [ids["waiting"]]
    assert found("--queue", "mail") == [ids["dead"]]
    assert found("--task", "send") == [ids["dead"]]
    assert found("--task", "send", "--state", "done") == []


def test_jobs_page_by_page(cli: Cli, ids: dict[str, str]) -> None:
    seen: list[str] = []
    page = cli("jobs", "--limit", "3", "-o", "json").json
    while True:
        seen += [job["id"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        page = cli("jobs", "--limit", "3", "--cursor", page["cursor"], "-o", "json").json
    assert sorted(seen) == sorted(ids.values())


def test_the_next_page_is_a_message_that_can_be_pasted(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "--limit", "3")
    assert len(said.out.splitlines()) == 4
    assert re.match(r"there may be more: add --cursor '.+'$", said.err)
    assert cli("jobs", "--cursor", "nonsense").code == 2


def test_no_jobs_say_so(cli: Cli, tmp_path: Path, runner: asyncio.Runner) -> None:
    runner.run(App(f"sqlite:///{tmp_path}/jobs.db").queues())
    assert cli("jobs") == Said(0, "", "no jobs\n")
    assert cli("jobs", "--queue", "mail") == Said(0, "", "no such jobs\n")
    assert cli("dead") == Said(0, "", "no dead jobs\n")
    assert cli("dead", "rerun", "--all", "--yes") == Said(0, "", "no dead jobs\n")
    assert cli("queues") == Said(0, "", "no queues: no job was added yet\n")
    assert cli("jobs", "-o", "json").json == {"jobs": [], "cursor": None}
    assert cli("queues", "-o", "json").json == {"queues": []}


def test_one_job(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", ids["done"])
    assert (said.code, said.err) == (0, "")
    for line in (
        r"id +order-1",
        r"state +done",
        r"priority +normal",
        r"due +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z  (\d+s ago|now)",
        r"attempts +1 \(0 failed, 0 taken over\)",
        r' +"note": "grüße"',
        r' +"order": 1',
        r"#  OUTCOME +STARTED +LATE +TOOK +WORKER",
        r"1  done +\d{4}-.*Z +\d+ms +\d+ms +\S+",
    ):
        assert re.search(f"^{line}$", said.out, re.MULTILINE), line


def test_one_dead_job(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", ids["dead"])
    assert re.search(r"^error +ValueError: no mailbox for ann@example.org$", said.out, re.MULTILINE)


def test_one_job_as_json(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", ids["done"], "-o", "json")
    assert said.err == ""
    job = said.json
    [run] = job["history"]
    for moment in (job["due"], job["created"], job["ended"], run["due"], run["started"]):
        assert UTC_TIME.fullmatch(moment)
    assert run["lateness_ms"] >= 0
    assert run["outcome"] == "done"
    assert {name: job[name] for name in ("id", "task", "queue", "priority", "state")} == {
        "id": "order-1",
        "task": "pack",
        "queue": "default",
        "priority": "normal",
        "state": "done",
    }
    assert job["arguments"] == {"order": 1, "note": "grüße"}
    assert job["result"] == {"order": 1}
    assert (job["attempts"], job["failures"], job["takeovers"]) == (1, 0, 0)
    assert (job["error"], job["lease_until"], job["asked"]) == (None, None, False)
    assert cli("jobs", "-o", "json", "--state", "done").json["jobs"] == [job]


def test_an_unknown_job(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", "nobody")
    assert said.code == 3
    assert "'nobody'" in one_error(said)


def test_cancel_says_what_it_achieved(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "cancel", ids["waiting"])
    assert said.code == 0
    assert f"{ids['waiting']}  cancelled: it will not run\n" in said.out
    said = cli("jobs", "cancel", ids["done"], "-o", "json")
    assert said.code == 4
    assert said.json == {"jobs": [{"id": "order-1", "outcome": "too_late"}]}
    said = cli("jobs", "cancel", ids["done"], "nobody", "nobody")
    assert said.code == 3
    assert len(said.out.splitlines()) == 3


def test_rerun(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "rerun", ids["done"], ids["dead"])
    assert said.code == 0
    assert said.out.count("rerun: it is due now") == 2
    said = cli("jobs", "rerun", ids["done"])
    assert said.code == 4
    assert "not ended: it is waiting" in said.out
    assert cli("jobs", "rerun", "nobody").code == 3
    assert cli("jobs", "rerun", ids["done"], "-o", "json").json["jobs"] == [
        {"id": ids["done"], "outcome": "not_ended"}
    ]


# --- Dead jobs


def test_dead_jobs(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("dead")
    [_, row] = said.out.splitlines()
    assert row.startswith(ids["dead"])
    assert row.endswith("ValueError: no mailbox for ann@example.org")
    assert cli("dead", "list", "-o", "json").json["jobs"][0]["state"] == "dead"
    assert cli("dead", "--queue", "default") == Said(0, "", "no such dead jobs\n")


def test_dead_commands_leave_other_jobs_alone(cli: Cli, ids: dict[str, str]) -> None:
    for verb in ("rerun", "delete"):
        said = cli("dead", verb, ids["done"])
        assert said.code == 4
        assert "not dead: it is done" in said.out
        assert cli("dead", verb, "nobody").code == 3
    assert cli("jobs", "show", ids["done"]).code == 0


def test_dead_rerun_by_id(cli: Cli, ids: dict[str, str]) -> None:
    assert "rerun: it is due now" in cli("dead", "rerun", ids["dead"]).out
    assert cli("dead").err == "no dead jobs\n"


def test_dead_delete_by_id(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("dead", "delete", ids["dead"], "-o", "json")
    assert said.json == {"jobs": [{"id": ids["dead"], "outcome": "deleted"}]}
    assert cli("jobs", "show", ids["dead"]).code == 3


def test_all_dead_jobs(cli: Cli, ids: dict[str, str]) -> None:
    assert cli("dead", "rerun", "--all", "--yes", "--task", "pack").err == "no dead jobs\n"
    assert cli("dead", "rerun", "--all", "--yes") == Said(0, "rerun: 1 dead job\n", "")
    assert cli("jobs", "show", ids["dead"], "-o", "json").json["state"] == "waiting"


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "say which"),
        (("x", "--all"), "say which"),
        (("x", "--yes"), "go with --all"),
        (("x", "--queue", "mail"), "go with --all"),
        (("--all",), "needs --yes where nobody can be asked"),
    ],
)
def test_dead_commands_refuse_to_guess(
    cli: Cli, ids: dict[str, str], argv: tuple[str, ...], words: str
) -> None:
    for verb in ("rerun", "delete"):
        said = cli("dead", verb, *argv)
        assert said.code == 2
        assert words in one_error(said)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer, code, left", [("y\n", 0, 0), ("n\n", 1, 1), ("", 1, 1)])
def test_all_asks_first(
    cli: Cli,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    left: int,
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    said = cli("dead", "delete", "--all", "-o", "json")
    assert said.code == code
    assert said.err.startswith("delete 1 dead job? [y/N] ")
    assert said.out == "" or said.json["jobs"][0]["outcome"] == "deleted"
    assert len(cli("dead", "-o", "json").json["jobs"]) == left


# --- How it looks


def test_in_a_pipe_a_row_is_a_line_without_colour(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for command in (("jobs",), ("dead",), ("queues",), ("jobs", "show", ids["dead"])):
        said = cli(*command)
        assert "\x1b" not in said.out
        assert not any(line.endswith(" ") for line in said.out.splitlines())
    assert len(cli("dead").out.splitlines()) == 2


@pytest.mark.parametrize("width", [40, 80])
def test_on_a_terminal_ids_stay_whole(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    for command, expected in ((("jobs",), set(ids.values())), (("dead",), {ids["dead"]})):
        out = cli(*command).out
        assert "\x1b" not in out
        assert expected <= set(out.split())
        assert width < 80 or max(len(line) for line in out.splitlines()) <= width


def test_colour_is_for_terminals(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in cli("queues").out
    assert "\x1b[" not in cli("queues", "-o", "json").out


def test_a_job_can_not_steer_the_terminal() -> None:
    assert clean("a\x1b[2Jb\rc") == "a\\x1b[2Jb\\rc"
    assert clean("grüße\n") == "grüße\n"


@pytest.mark.parametrize(
    "ms, words",
    [
        (0, "now"),
        (999, "now"),
        (-999, "now"),
        (61_500, "in 1m 1s"),
        (-3_700_000, "1h 1m ago"),
        (26 * 3_600_000, "in 1d 2h"),
    ],
)
def test_relative_times(ms: int, words: str) -> None:
    assert relative(1_800_000_000_000 + ms, 1_800_000_000_000) == words


# --- The worker, in a process of its own

SHOP = """
import asyncio, os, sys, threading, time
from pathlib import Path

from tickwheel import App

app = App("sqlite:///jobs.db")

@app.task
async def mark(name: str) -> None:
    Path(name).write_text(str(os.getpid()))

@app.task
def nap(seconds: float) -> None:
    Path("napping").touch()
    time.sleep(seconds)
    Path("rested").touch()

@app.task
async def to_thread(seconds: float) -> None:
    Path("napping").touch()
    await asyncio.to_thread(time.sleep, seconds)

@app.task
async def block(seconds: float) -> None:
    Path("napping").touch()
    time.sleep(seconds)

@app.task
async def leave(behind: bool) -> None:
    if not behind:
        raise SystemExit(2)
    asyncio.get_running_loop().call_soon(sys.exit, 2)
"""


def environment() -> dict[str, str]:
    """For child processes: our package, and nothing that would change what they print."""
    ours = str(Path(tickwheel.__file__).parents[1])
    known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return known | {"PYTHONPATH": ours}


def until(condition: Callable[[], Any], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


class Command:
    """`python -m tickwheel …` in a folder, and what it has said so far."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self._log = folder / f"log-{time.monotonic_ns()}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tickwheel", *argv],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until_it_says(self, words: str) -> None:
        until(lambda: words in self.said or self.process.poll() is not None, words)
        assert words in self.said

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def code(self, seconds: float = 20) -> int:
        return self.process.wait(seconds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def enqueue(folder: Path, runner: asyncio.Runner, task: str, **arguments: Any) -> str:
    """Add a job for one of the shop's tasks, as another process would."""

    async def add() -> str:
        app = App(f"sqlite:///{folder}/jobs.db")
        async with app:
            now_ms = time.time_ns() // 1_000_000
            job = Job(
                id=new_id(now_ms),
                task=task,
                payload=json.dumps(arguments),
                due_ms=now_ms,
                created_ms=now_ms,
            )
            await (await app.client()).add(job)
            return job.id

    return runner.run(add())


def look(folder: Path, runner: asyncio.Runner, id: str) -> JobInfo:
    async def info() -> JobInfo:
        async with App(f"sqlite:///{folder}/jobs.db") as app:
            return await app.job(id).info()

    return runner.run(info())


@pytest.mark.slow
def test_a_worker_runs_jobs_and_stops_when_told(folder: Path, runner: asyncio.Runner) -> None:
    id = enqueue(folder, runner, "mark", name="packed")
    with Command(folder, "worker", "shop:app", "--concurrency", "7") as worker:
        until(lambda: look(folder, runner, id).state == "done", "the job")
        assert (folder / "packed").read_text() == str(worker.process.pid)
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        said = worker.said
    for line in (
        rf"tickwheel +{re.escape(tickwheel.__version__)}",
        r"app +shop:app",
        r"store +sqlite:///jobs\.db",
        r"queues +default",
        r"concurrency +7",
        rf"pid +{worker.process.pid}",
        r"tasks +block, leave, mark, nap, to_thread",
        r"\S+ \S+Z INFO    tickwheel: stopping: 0 running, grace 30s; again to end at once",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), (line, said)
    assert "\x1b" not in said


@pytest.mark.slow
def test_running_jobs_may_finish(folder: Path, runner: asyncio.Runner) -> None:
    id = enqueue(folder, runner, "nap", seconds=1.5)
    with Command(folder, "worker", "shop") as worker:
        until((folder / "napping").exists, "the job's start")
        worker.signal(signal.SIGINT)
        worker.until_it_says("stopping: 1 running, grace 30s")
        assert worker.code() == 0
    assert (folder / "rested").exists()
    assert look(folder, runner, id).state == "done"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nap", "block"])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it_at_once(
    folder: Path, runner: asyncio.Runner, task: str, number: signal.Signals, code: int
) -> None:
    enqueue(folder, runner, task, seconds=600)
    with Command(folder, "worker", "shop") as worker:
        until((folder / "napping").exists, "the job's start")
        worker.signal(signal.SIGTERM)
        # A task that blocks the event loop keeps it from saying anything.
        time.sleep(0.3) if task == "block" else worker.until_it_says("stopping: 1 running")
        worker.signal(number)
        assert worker.code(10) == code
        assert "ended at once" in worker.said


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nap", "to_thread"])
def test_a_hung_thread_does_not_hang_the_exit(
    folder: Path, runner: asyncio.Runner, task: str
) -> None:
    enqueue(folder, runner, task, seconds=600)
    with Command(folder, "worker", "shop", "--grace", "100ms") as worker:
        until((folder / "napping").exists, "the job's start")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        assert "left behind, for a thread can't be ended" in worker.said
        assert worker.said.endswith("tickwheel: stopped\n")


@pytest.mark.slow
def test_a_task_that_exits_fails_alone(folder: Path, runner: asyncio.Runner) -> None:
    id = enqueue(folder, runner, "leave", behind=False)
    with Command(folder, "worker", "shop") as worker:
        until(lambda: look(folder, runner, id).failures, "the failure")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0


@pytest.mark.slow
def test_what_a_task_left_behind_and_exits_is_no_usage_error(
    folder: Path, runner: asyncio.Runner
) -> None:
    enqueue(folder, runner, "leave", behind=True)
    with Command(folder, "worker", "shop") as worker:
        assert worker.code() == 1
        assert "called sys.exit(2)" in worker.said


# What the installed script does.
INSTALLED = "import sys; from tickwheel.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_the_current_folder_is_searched_by_the_installed_command(
    folder: Path, runner: asyncio.Runner
) -> None:
    enqueue(folder, runner, "mark", name="packed")
    # -P: Python itself adds no folder to its path.
    result = subprocess.run(
        [sys.executable, "-P", "-c", INSTALLED, "queues", "--app", "shop:app"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("QUEUE")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(folder: Path, runner: asyncio.Runner) -> None:
    for _ in range(3):
        enqueue(folder, runner, "mark", name="packed")
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "tickwheel", "jobs", "--store", "sqlite:///jobs.db"],
        cwd=folder,
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")
