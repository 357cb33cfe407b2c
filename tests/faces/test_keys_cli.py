"""`tickwheel keys` and `tickwheel audit`, on a real file."""

from __future__ import annotations

import asyncio
import getpass
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, cli, one_error

from tickwheel import App
from tickwheel.cli.keys import SCOPES
from tickwheel.errors import StoreUnavailable
from tickwheel.operate.audit import Audit, Entry
from tickwheel.operate.keys import Key, Keys, Scope
from tickwheel.stores.sqlite.store import SqliteStore

__all__ = ["cli"]

WHO = f"cli:{getpass.getuser()}"


async def checked(folder: Path, text: str) -> Key | None:
    async with App(f"sqlite:///{folder}/jobs.db") as app:
        return await Keys(await app.client()).check(text)


async def written(folder: Path, *entries: Entry) -> None:
    async with App(f"sqlite:///{folder}/jobs.db") as app:
        await Audit(await app.client(), retention="3650d").write(entries)


def entry(at_ms: int, **more: Any) -> Entry:
    fields = {"who": "k", "action": "job.cancel", "target": "t", "source": "::1", "outcome": "ok"}
    return Entry(at_ms=at_ms, **(fields | more))


def test_the_scopes_are_those_of_keys() -> None:
    assert tuple(Scope) == SCOPES


def test_a_key_is_created_on_a_new_store_and_only_its_text_is_printed(
    cli: Cli, tmp_path: Path
) -> None:
    said = cli("keys", "create", "ci", "--scope", "enqueue")
    assert said.code == 0, said.err
    [text] = said.out.splitlines()
    key = asyncio.run(checked(tmp_path, text))
    assert key is not None and (key.name, key.scopes) == ("ci", (Scope.ENQUEUE,))
    assert "not shown again" in said.err and text not in said.err


def test_a_key_has_what_its_options_say(cli: Cli, tmp_path: Path) -> None:
    made = cli(
        *("keys", "create", "ci", "--scope", "read", "--scope", "enqueue", "--queue", "mail"),
        *("--queue", "bill", "--task", "mail.*", "--expires", "90d", "--rate", "100/s"),
        *("-o", "json"),
    ).json
    key = asyncio.run(checked(tmp_path, made.pop("key")))
    assert key is not None and key.expires_ms is not None
    assert 0 <= 90 * 86_400_000 - (key.expires_ms - key.created_ms) < 60_000
    assert cli("keys", "list", "-o", "json").json == {"keys": [made]}
    created, expires = made.pop("created"), made.pop("expires")
    assert created < expires
    assert made == {
        "id": key.id,
        "name": "ci",
        "scopes": ["enqueue", "read"],
        "queues": ["mail", "bill"],
        "tasks": ["mail.*"],
        "rate": "100/s",
    }


def test_keys_are_listed_without_their_secrets(cli: Cli) -> None:
    cli("keys", "create", "plain", "--scope", "read")
    said = cli("keys")
    assert said.out.splitlines()[0].split() == ["ID", "NAME", "SCOPES", "EXPIRES"]
    assert said.out.splitlines()[1].split()[1:] == ["plain", "read", "never"]
    texts = [cli("keys", "create", f"k{n}", "--scope", "read").out.strip() for n in range(3)]
    cli("keys", "create", "mail", "--scope", "read", "--task", "mail.*", "--rate", "5/m")
    out = cli("keys").out
    assert "mail.*" in out and "5/m" in out and "all" in out
    for text in texts:
        _, id, secret = text.split("_")
        assert id in out and secret not in out


def test_without_keys_the_list_says_how_to_create_one(cli: Cli) -> None:
    id = cli("keys", "create", "ci", "--scope", "read", "-o", "json").json["id"]
    cli("keys", "revoke", id)
    said = cli("keys")
    assert (said.code, said.out) == (0, "") and "tickwheel keys create" in said.err


@pytest.mark.parametrize("by", ["id", "text"])
def test_a_key_is_revoked(cli: Cli, tmp_path: Path, by: str) -> None:
    text = cli("keys", "create", "ci", "--scope", "admin").out.strip()
    id = text.split("_")[1]
    said = cli("keys", "revoke", id if by == "id" else text)
    assert (said.code, said.out) == (0, f"{id}: revoked\n")
    assert asyncio.run(checked(tmp_path, text)) is None
    said = cli("keys", "revoke", id, "-o", "json")
    assert (said.code, said.json) == (3, {"id": id, "outcome": "unknown"})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["keys", "create", "ci"], "--scope"),
        (["keys", "create", "ci", "--scope", "write"], "enqueue"),
        (["keys", "create", "", "--scope", "read"], "name"),
        (["keys", "create", "ci", "--scope", "read", "--rate", "5"], "100/s"),
        (["keys", "create", "ci", "--scope", "read", "--expires", "soon"], "--expires"),
        (["keys", "create", "ci", "--scope", "read", "--expires", "2020-01-01"], "not in the fut"),
        (["keys", "create", "ci", "--scope", "read", "--queue", "a b"], "queues"),
        (["keys", "create", "ci", "--scope", "admin", "--task", "a"], "admin"),
        (["keys", "create", "ci", "--scope", "read", "--store", "memory://"], "memory://"),
        (["audit", "--since", "soon"], "--since"),
        (["audit", "--limit", "0"], "--limit"),
        (["audit", "--cursor", "x"], "not a cursor"),
    ],
)
def test_a_mistake_is_told_in_one_line(cli: Cli, argv: list[str], words: str) -> None:
    cli("keys", "create", "first", "--scope", "read")
    said = cli(*argv)
    assert said.code == 2
    assert words in one_error(said)
    assert len(cli("keys", "-o", "json").json["keys"]) == 1


@pytest.mark.parametrize("argv", [["keys"], ["keys", "revoke", "x"], ["audit"]])
def test_nothing_is_created_by_looking(cli: Cli, tmp_path: Path, argv: list[str]) -> None:
    assert cli(*argv).code == 5
    assert not (tmp_path / "jobs.db").exists()


# --- The audit log


def test_the_log_has_who_created_and_revoked_keys(cli: Cli) -> None:
    id = cli("keys", "create", "ci", "--scope", "read", "--scope", "enqueue", "-o", "json").json[
        "id"
    ]
    cli("keys", "revoke", id)
    cli("keys", "revoke", "nobody")
    log = cli("audit", "-o", "json").json
    assert log["cursor"] is None
    assert [
        (each["who"], each["action"], each["target"], each["outcome"], each["detail"])
        for each in log["entries"]
    ] == [
        (WHO, "keys revoke", "nobody", "unchanged", ""),
        (WHO, "keys revoke", id, "ok", ""),
        (WHO, "keys create", id, "ok", "name=ci scopes=read enqueue"),
    ]
    assert all(each["source"] and each["at"].endswith("Z") for each in log["entries"])
    out = cli("audit").out
    assert out.index("nobody") < out.index("keys create") and "scopes=read enqueue" in out


def test_a_revoked_keys_text_is_not_in_the_log(cli: Cli) -> None:
    text = cli("keys", "create", "ci", "--scope", "read").out.strip()
    cli("keys", "revoke", text)
    _, id, secret = text.split("_")
    said = cli("audit", "-o", "json").out
    assert id in said and secret not in said


@pytest.mark.parametrize("around", ["{}x", " {} ", "'{}'", "{},", "Bearer {}"])
def test_a_key_is_revoked_by_its_text_with_what_was_copied_around_it(cli: Cli, around: str) -> None:
    text = cli("keys", "create", "ci", "--scope", "read").out.strip()
    _, id, secret = text.split("_")
    said = cli("keys", "revoke", around.replace("{}", text)).out
    said += cli("jobs", "cancel", around.replace("{}", text)).err
    said += cli("audit", "-o", "json").out
    assert f"{id}: revoked" in said and secret[:8] not in said
    assert cli("keys", "list", "-o", "json").json == {"keys": []}


def log(cli: Cli) -> list[tuple[str, str, str, str]]:
    """What is in the log, the oldest first."""
    entries = cli("audit", "-o", "json").json["entries"]
    assert all(each["who"] == WHO and each["source"] == socket.gethostname() for each in entries)
    return [
        (each["action"], each["target"], each["outcome"], each["detail"])
        for each in reversed(entries)
    ]


TASKS = """
from tickwheel import App
app = App("sqlite:///jobs.db")
@app.task
def mail(to: str) -> None: ...
@app.cron("0 9 * * *", name="report")
def daily() -> None: ...
"""


def test_every_write_of_a_command_is_in_the_log(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(TASKS)
    add = ("jobs", "add", "mail", '{"to": "secret-address"}', "--app", "shop:app", "--delay", "1h")
    for id in ("a", "b", "c"):
        assert cli(*add, "--id", id).code == 0
    assert cli(*add, "--id", "a").code == 4
    cli("jobs", "cancel", "a")
    cli("jobs", "cancel", "--task", "mail", "--meta", "customer=42", "--yes")
    cli("jobs", "cancel", "--task", "mail", "--yes")
    cli("jobs", "cancel", "a")
    cli("jobs", "rerun", "a", "b")
    cli("jobs", "delete", "--state", "cancelled", "--yes")
    cli("dead", "rerun", "a")
    cli("queues", "pause", "audit")
    cli("queues", "resume", "audit")
    for look in ("jobs", "dead", "queues", "schedules", "keys", "audit", "workers"):
        assert cli(look).code == 0
    entries = log(cli)
    assert "secret" not in str(entries)
    assert entries[:4] == [
        *(("jobs add", id, "ok", "task=mail delay=1h") for id in ("a", "b", "c")),
        ("jobs add", "a", "unchanged", "task=mail delay=1h"),
    ]
    assert entries[4] == ("jobs cancel", "a", "ok", "")
    action, target, outcome, detail = entries[5]
    assert (action, target, outcome) == ("jobs cancel", "", "ok")
    assert detail.startswith("task=mail; 2 of 2 changed: ")
    assert sorted(detail.split()[-2:]) == ["b", "c"]
    assert entries[6:] == [
        ("jobs cancel", "a", "unchanged", ""),
        ("jobs rerun", "", "ok", "2 of 2 changed: a b"),
        ("jobs delete", "c", "ok", "state=cancelled"),
        ("queues pause", "audit", "ok", ""),
        ("queues resume", "audit", "ok", ""),
    ]


def test_writes_to_schedules_are_in_the_log(cli: Cli, tmp_path: Path) -> None:
    async def declared() -> None:
        async with App(f"sqlite:///{tmp_path}/jobs.db") as app:

            @app.task(name="daily")
            def daily() -> None: ...

            await app.schedules.put("report", "daily", cron="0 9 * * *")

    asyncio.run(declared())
    id = cli("schedules", "run", "report").out.strip()
    for verb in ("pause", "resume", "delete", "delete"):
        cli("schedules", verb, "report")
    assert log(cli) == [
        ("schedules run", id, "ok", "name=report"),
        ("schedules pause", "report", "ok", ""),
        ("schedules resume", "report", "ok", ""),
        ("schedules delete", "report", "ok", ""),
        ("schedules delete", "report", "unchanged", ""),
    ]


def test_a_command_whose_write_can_not_be_audited_says_so_and_does_not_fail(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("keys", "create", "first", "--scope", "read")

    async def down(*_: object) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(Audit, "write", down)
    said = cli("keys", "create", "second", "--scope", "read")
    assert said.code == 0 and said.out.startswith("tw_")
    assert "could not be written to the audit log: the disk is full" in said.err
    assert len(cli("keys", "-o", "json").json["keys"]) == 2


def test_a_write_that_fails_half_way_is_in_the_log(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("keys", "create", "first", "--scope", "read")

    async def fails(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(SqliteStore, "cancel", fails)
        assert cli("jobs", "cancel", "--task", "x", "--yes").code == 0  # no such job
        assert cli("queues", "pause", "mail").code == 0
        broken.setattr(SqliteStore, "pause", fails)
        assert cli("queues", "pause", "mail").code == 5
    assert log(cli)[1:] == [
        ("queues pause", "mail", "ok", ""),
        ("queues pause", "mail", "failed", ""),
    ]


def test_the_log_is_paged_and_narrowed(cli: Cli, tmp_path: Path) -> None:
    at_ms = 1_800_000_000_000
    entries = [entry(at_ms + n * 60_000, target=f"{n}") for n in range(600)]
    asyncio.run(written(tmp_path, *entries))
    page = cli("audit", "--limit", "400", "-o", "json").json
    found = [each["target"] for each in page["entries"]]
    page = cli("audit", "--limit", "400", "--cursor", page["cursor"], "-o", "json").json
    found += [each["target"] for each in page["entries"]]
    assert found == [f"{n}" for n in reversed(range(600))]
    assert page["cursor"] is None
    said = cli("audit", "--limit", "2")
    assert len(said.out.splitlines()) == 3
    assert "--cursor" in said.err
    since = cli("audit", "--since", page["entries"][0]["at"], "-o", "json").json
    assert len(since["entries"]) == 50
    everything = cli("audit", "--since", page["entries"][0]["at"], "--limit", "600", "-o", "json")
    assert [each["target"] for each in everything.json["entries"]] == found[:401]
    said = cli("audit", "--since", "2100-01-01T00:00Z")
    assert (said.code, said.out, said.err) == (0, "", "no matching entries\n")


def test_both_fit_80_columns(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deploy-of-the-whole-shop", "b"):
        cli(
            *("keys", "create", name, "--scope", "enqueue", "--scope", "read"),
            *("--queue", "mail.*", "--task", "newsletter.*", "--rate", "100/s", "--expires", "90d"),
        )
    long = entry(1_800_000_000_000, who="0123456789abcdef", source="2001:db8:85a3::8a2e:370:7334")
    asyncio.run(written(tmp_path, long))
    keys = cli("keys", "-o", "json").json["keys"]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    for command in ("keys", "audit"):
        said = cli(command)
        assert said.code == 0
        assert max(len(line) for line in said.out.splitlines()) <= 80
        # Ids stay whole.
        assert {each["id"] for each in keys} <= set(said.out.split())
