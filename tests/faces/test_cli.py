"""The command line as a whole: help, usage, which store, which app, how it looks."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli, Said, cli, ids, one_error

import tickwheel
from tickwheel import App, StoreUnavailable
from tickwheel.cli import main
from tickwheel.cli.output import Column, clean, fitted, relative, show_table
from tickwheel.cli.root import COMMANDS
from tickwheel.client import Client
from tickwheel.masking import masked

__all__ = ["cli", "ids"]
from worker_process import environment

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
        *("jobs", "jobs list", "jobs show", "jobs add", "jobs cancel", "jobs rerun", "jobs delete"),
        *("tasks", "config", "schedules simulate", "doctor", "explain", "top"),
        *("dead", "dead list", "dead rerun", "dead delete"),
        *("queues", "queues list", "queues pause", "queues resume"),
        *("keys", "keys list", "keys create", "keys revoke", "audit", "bench"),
        *("verify", "score"),
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
    assert "\nArguments:\n  ID  The ids of dead jobs; or use --all.\n" in said.out


@pytest.mark.parametrize(
    "words, known",
    [
        ("", list(COMMANDS)),
        ("jobs ", ["list", "show", "add", "cancel", "move", "rerun", "delete"]),
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
        (("jobs", "list", "--since", "10000w"), "'10000w' is out of range: more than 10 years"),
        (("jobs", "list", "--since", "1969-01-01"), "is out of range: from the year 1970 to 8999"),
        (("jobs", "list", "--since", "9999-12-31"), "is out of range: from the year 1970 to 8999"),
        (("jobs", "list", "--since", "0001-01-01"), "is out of range: from the year 1970 to 8999"),
        (("jobs", "list", "--since", "soon"), "neither an ISO time (2026-03-29T01:00) nor a"),
        (("jobs", "cancel"), "which jobs? Use tickwheel jobs cancel ID..., or --state"),
        (("jobs", "cancel", "x", "--queue", "q"), "not both"),
        (("jobs", "cancel", "x", "--yes"), "not both"),
        (("jobs", "cancel", "--state", "done"), "'done' is not one of"),
        (("jobs", "cancel", "--queue", "q"), "needs --yes when stdin is not a terminal"),
        (("jobs", "rerun", "--queue", "q", "--yes"), "in which state? Add --state: done, dead"),
        (("jobs", "delete", "--since", "1h", "--yes"), "in which state?"),
        (("jobs", "add", "x"), "which app? Name it, as in shop:app"),
        (("jobs", "add", "x", "--delay", "1m", "--at", "2030-01-01"), "--delay or --at, not both"),
        (("tasks",), "which app?"),
        (("queues", "pause", "a b"), "a queue name may contain"),
        (("queues", "--store", "sqlite://"), "names no file"),
        (("queues", "--store", "kafka://x"), "no store for 'kafka://'"),
        (("queues", "--store", "sqlite:///a.db", "--app", "shop"), "not both"),
        (("queues", "--store", "memory://"), "exists only in the process"),
        (("worker",), "which app? Name it, as in shop:app"),
        (("worker", "shop", "--lease", "soon"), "--lease: 'soon' is not a duration"),
        (("worker", "shop", "--queues", "a,,b"), "a queue name must have"),
        (("worker", "shop", "--processes", "0"), "--processes"),
        (("worker", "shop", "--threads", "0"), "--threads"),
        (("migrate-jobs", "sqlite:///jobs.db", "memory://"), "its jobs would be lost"),
        (("migrate-jobs", "sqlite:///jobs.db", "Memory://"), "its jobs would be lost"),
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
    assert masked("postgresql://ann:s3cret@db/x") == "postgresql://ann:***@db/x"
    assert masked("sqlite:///jobs.db") == "sqlite:///jobs.db"


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
        ("m_e", "app = 3\n", "m_e:app is of type int, not a tickwheel.App"),
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


WHOLE, WRAPS, CUT = Column("A"), Column("B", whole=False), Column("C", whole=False, cut=True)


@pytest.mark.parametrize(
    ("wanted", "room", "widths"),
    [
        ([10, 20, 30], 60, [10, 20, 30]),
        ([10, 20, 30], 59, [10, 20, 29]),
        ([10, 20, 30], 38, [10, 20, 8]),
        ([10, 20, 30], 30, [10, 12, 8]),
        # Not below what can be read: the terminal wraps the line.
        ([10, 20, 30], 10, [10, 8, 8]),
        ([10, 3, 2], 10, [10, 3, 2]),
    ],
)
def test_a_table_is_fitted_to_the_room(wanted: list[int], room: int, widths: list[int]) -> None:
    assert fitted([WHOLE, WRAPS, CUT], wanted, room) == widths


def test_nothing_is_lost_in_a_table_that_is_too_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    wide, narrow = (Column("X", whole=False, least=least) for least in (16, 12))
    columns = [wide, narrow, WRAPS, WHOLE, WHOLE, WHOLE, narrow]
    last = [f"g{n}" for n in range(11)]
    row = ("a" * 18, "b1 b2 b3 b4 b5 b6", "c" * 7, "d" * 7, "e" * 7, "f" * 7, " ".join(last))
    show_table(columns, [row])
    out = capsys.readouterr().out
    assert set(last) <= set(out.split())
    assert max(map(len, out.splitlines())) <= 80


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


@pytest.mark.parametrize("argv", [("queues",), ("jobs",), ("doctor",), ("jobs", "show", "x")])
def test_a_command_leaves_the_file_of_another_program_alone(
    cli: Cli, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    path = tmp_path / "customers.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("create table customer (name text)")
    before = path.read_bytes()
    said = cli(*argv, "--store", "sqlite:///customers.db")
    assert said.code == 5
    assert f"there is no store in {path}" in one_error(said)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["customers.db"]


# --- Streams that are closed, full or of another encoding


def shell(folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `tickwheel …` with its streams as the shell sets them up."""
    return subprocess.run(
        ["sh", "-c", command.replace("tickwheel", f"{sys.executable} -m tickwheel", 1)],
        cwd=folder,
        env=environment() | {"TICKWHEEL_STORE": "sqlite:///jobs.db"} | variables,
        capture_output=True,
        encoding=variables.get("PYTHONIOENCODING", "utf-8"),
        timeout=60,
    )


@pytest.mark.parametrize("argv", ["jobs cancel --queue q", "dead rerun --all", "jobs list"])
def test_stdin_may_be_closed(tmp_path: Path, ids: dict[str, str], argv: str) -> None:
    run = shell(tmp_path, f"tickwheel {argv} <&-")
    assert "Traceback" not in run.stderr
    if argv == "jobs list":
        assert run.returncode == 0
    else:
        assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
        assert "needs --yes when stdin is not a terminal" in run.stderr


@pytest.mark.parametrize("argv", ["jobs list", "jobs list -o json", "--version", "--help"])
def test_output_on_a_full_device_is_one_line(
    tmp_path: Path, ids: dict[str, str], argv: str
) -> None:
    run = shell(tmp_path, f"tickwheel {argv} > /dev/full")
    assert run.stderr == "error: the output can't be written: No space left on device\n"
    assert run.returncode == 1


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", ">&- 2>&- <&-"])
def test_an_error_that_nobody_hears_has_its_exit_code(tmp_path: Path, where: str) -> None:
    assert shell(tmp_path, f"tickwheel jobs --limit 0 {where}").returncode == 2
    assert shell(tmp_path, f"tickwheel jobs {where}").returncode == 5


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path, ids: dict[str, str]) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def smile() -> None: ...

    smile.using(id="\N{GRINNING FACE}").enqueue_sync()
    app.sync.close()
    run = shell(tmp_path, "tickwheel jobs list", PYTHONIOENCODING="latin-1")
    assert (run.returncode, run.stderr) == (0, "")
    assert r"\U0001f600" in run.stdout
    run = shell(tmp_path, "tickwheel jobs list -o json", PYTHONIOENCODING="latin-1")
    assert "\N{GRINNING FACE}" in [job["id"] for job in json.loads(run.stdout)["jobs"]]


@pytest.mark.parametrize("option", ["--store", "--app"])
def test_an_empty_option_is_not_the_default(cli: Cli, ids: dict[str, str], option: str) -> None:
    said = cli("jobs", option, "")
    assert said.code == 2
    assert option in one_error(said) and "it is empty" in one_error(said)


# --- Arguments that no task takes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"y":' + "[" * 50_000 + "]" * 50_000 + "}", "nested too deeply"),
        ("[" * 900 + "]" * 900, "must be a JSON object"),
        ('{"self": 1}', "self"),
        ('{"nothing": 1}', "nothing"),
    ],
    ids=["deep", "no object", "self", "unknown"],
)
def test_arguments_that_a_task_does_not_take_are_one_line(
    cli: Cli, tmp_path: Path, arguments: str, words: str
) -> None:
    (tmp_path / "deep.py").write_text(
        "import tickwheel\n"
        "app = tickwheel.App('sqlite:///jobs.db')\n"
        "@app.task\n"
        "def pack(other=1): ...\n"
    )
    said = cli("jobs", "add", "pack", arguments, "--app", "deep")
    assert said.code == 2
    assert words in one_error(said) and len(one_error(said)) < 1000
    assert not (tmp_path / "jobs.db").exists()


@pytest.mark.parametrize(
    "argv", [("jobs", "--app", "chatty"), ("tasks", "chatty"), ("config", "--app", "chatty")]
)
def test_what_an_app_prints_is_not_in_the_output(
    cli: Cli, tmp_path: Path, ids: dict[str, str], argv: tuple[str, ...]
) -> None:
    (tmp_path / "chatty.py").write_text(
        "import tickwheel\nprint('hello')\napp = tickwheel.App('sqlite:///jobs.db')\n"
    )
    said = cli(*argv, "-o", "json")
    assert (said.code, said.err) == (0, "hello\n")
    assert said.json


def test_an_app_name_is_refused_in_good_english() -> None:
    with pytest.raises(tickwheel.BadConfig, match=r"^an app name may contain letters"):
        App("memory://", name="my shop")
