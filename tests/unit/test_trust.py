"""Keys and the wrapper: how keys are given and rotated, what a program without them says."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from tickwheel import Alert, App, BadConfig, GiveUp, JobFailed, ResultError, Retry, Snooze
from tickwheel.config import load
from tickwheel.envelope import ENCRYPTED, is_sealed
from tickwheel.job import Job, Settlement, State
from tickwheel.outbox import TABLE
from tickwheel.schedule import Schedule
from tickwheel.store import Page, Store
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import sandbox
from tickwheel.trust import Trust, new_key, sealed, trust_of, unsealed
from tickwheel.trust.store import SealedDatabase

SIGN, NEW, ENCRYPT = new_key("2026-01"), new_key("2026-02"), new_key("e1")
SECRET = "4111-1111"
PATIENCE_S = 30


def trust(signing: Sequence[str], encryption: Sequence[str], mode: str = "require") -> Trust:
    found = trust_of(signing, encryption, mode)
    assert found is not None
    return found


def a_job(id: str = "job", payload: str = "{}") -> Job:
    return Job(id=id, task="t", payload=payload, due_ms=1_000, created_ms=0)


async def claimed(store: Store) -> list[str]:
    jobs = await store.claim(["default"], worker="w", limit=100, now_ms=2_000, lease_ms=1_000)
    return [job.id for job in jobs]


# --- Keys


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("no colon", "key 1 must be written id:base64"),
        (f":{'QUJD' * 10}QUI=", "key 1 must be written id:base64"),
        (f"a b:{'QUJD' * 10}QUI=", "key 1 must be written id:base64"),
        ("k:not base64!", "'k' is not valid base64"),
        ("k:" + base64.b64encode(b"0123456789").decode(), "'k' has 10 bytes; it must have 32"),
    ],
)
@pytest.mark.parametrize("kind", ["signing_keys", "encryption_keys"])
def test_a_wrong_key_is_refused_at_once_and_not_shown(kind: str, key: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words) as refused:
        App("memory://", **{kind: [key]})  # type: ignore[arg-type]
    secret = key.partition(":")[2]
    assert not secret or secret not in str(refused.value)


def test_two_keys_of_one_id_and_one_key_for_both_uses_are_refused() -> None:
    with pytest.raises(BadConfig, match="two keys have the id '2026-01'"):
        App("memory://", signing_keys=[SIGN, new_key("2026-01")])
    with pytest.raises(BadConfig, match="use different ones"):
        App("memory://", signing_keys=[SIGN], encryption_keys=["other:" + SIGN.partition(":")[2]])
    with pytest.raises(BadConfig, match="list of keys"):
        App("memory://", signing_keys=SIGN)
    with pytest.raises(BadConfig, match="can't be the id of a key"):
        new_key("a:b")


def test_a_key_may_be_written_in_either_alphabet_without_padding() -> None:
    secret = bytes(range(224, 256))
    for text in (base64.b64encode(secret), base64.urlsafe_b64encode(secret).rstrip(b"=")):
        job = trust([f"k:{text.decode()}"], []).seal(a_job())
        assert trust(["k:" + base64.b64encode(secret).decode()], []).open(job).payload == "{}"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(BadConfig, match="must be one of require, prefer"):
        App("memory://", signing_keys=[SIGN], signing="perhaps")  # type: ignore[arg-type]


def test_encryption_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(BadConfig, match=r"tickwheel\[crypto\]"):
        App("memory://", encryption_keys=[ENCRYPT])
    App("memory://", signing_keys=[SIGN])


async def test_keys_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TICKWHEEL_SIGNING_KEYS", f"{SIGN}, {NEW}")
    monkeypatch.setenv("TICKWHEEL_ENCRYPTION_KEYS", ENCRYPT)
    app, off = App("memory://"), App("memory://", signing_keys=[], encryption_keys=[])
    assert unsealed(app._access.store) is not app._access.store
    assert unsealed(off._access.store) is off._access.store
    for text in (repr(app), repr(load().settings), repr(app._access.store)):
        assert SIGN.partition(":")[2] not in text
    monkeypatch.setenv("TICKWHEEL_SIGNING", "perhaps")
    with pytest.raises(BadConfig, match="TICKWHEEL_SIGNING: must be one of require, prefer"):
        _ = App("memory://")._access.store


def test_keys_in_a_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tickwheel.toml").write_text(f'signing_keys = ["{SIGN}"]')
    with pytest.raises(BadConfig, match="don't belong in a file") as refused:
        App()
    assert SIGN not in str(refused.value)


# --- Rotation


async def test_the_first_key_seals_and_all_keys_open() -> None:
    store = MemoryStore()
    e2 = new_key("e2")
    old = sealed(store, trust([SIGN], [ENCRYPT]))
    both = sealed(store, trust([SIGN, NEW], [ENCRYPT, e2]))
    new = sealed(store, trust([NEW, SIGN], [e2, ENCRYPT]))
    late = sealed(store, trust([NEW], [e2]))
    await old.add([a_job("a"), a_job("b")])
    await new.add([a_job("c")])
    assert sorted(await claimed(both)) == ["a", "b", "c"]
    await old.add([a_job("d")])
    await new.add([a_job("e")])
    assert await claimed(late) == ["e"]
    [d] = await store.get(["d"])
    assert d is not None and d.error is not None
    assert "signed with the key '2026-01', which this program does not have" in d.error


async def test_a_signed_job_is_not_run_by_a_program_that_can_only_decrypt() -> None:
    store = MemoryStore()
    await sealed(store, trust([SIGN], [ENCRYPT])).add([a_job()])
    assert await claimed(sealed(store, trust([], [ENCRYPT]))) == []
    [job] = await store.get(["job"])
    assert job is not None and job.error is not None and "signed with the key" in job.error


# --- The wrapper


def test_everything_that_has_to_do_with_jobs_or_schedules_goes_through_the_wrapper() -> None:
    """A store's new method would be passed through as it is."""
    carriers = (Job, Settlement, Schedule, Page)
    names = {
        name
        for name, step in vars(Store).items()
        if callable(step)
        and not name.startswith("_")
        and any(kind.__name__ in str(hint) for hint in hints(step) for kind in carriers)
    }
    assert {"add", "claim", "settle", "fire", "find", "parked"} <= names
    assert names <= {name for kind in SealedDatabase.__mro__[:-1] for name in vars(kind)}


def hints(step: Any) -> list[Any]:
    import tickwheel.store as module

    return list(get_type_hints(step, vars(module)).values())


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.settles: list[int] = []

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        self.settles.append(len(settlements))
        return await super().settle(settlements, now_ms=now_ms)


async def test_a_batch_stays_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    inner = Counting()
    store = sealed(inner, trust([SIGN], [ENCRYPT]))
    await store.add([a_job(f"good {n}") for n in range(20)])
    await inner.add([a_job(f"bad {n}") for n in range(30)])
    with caplog.at_level(logging.ERROR):
        assert len(await claimed(store)) == 20
    assert inner.settles == [30]
    assert len(caplog.records) == 11 and "refused as well: 20" in caplog.text


def test_a_claimed_job_is_like_any_other() -> None:
    keys = trust([SIGN], [ENCRYPT])
    job = keys.open(keys.seal(a_job()))
    assert job == a_job() and a_job() == job and job != a_job("other")
    assert pickle.loads(pickle.dumps(job)) == job


# --- Apps


def apps(url: str, **options: Any) -> tuple[App, App]:
    """An app with keys, and one without, on the same store."""
    if url == "memory://":
        store = MemoryStore()
        return App(store, name="a", **options), App(store, name="a")
    return App(url, name="a", **options), App(url, name="a")


KEYS: dict[str, Any] = {"signing_keys": [SIGN], "encryption_keys": [ENCRYPT]}


def declare(app: App) -> dict[str, Any]:
    tries: list[int] = []

    @app.task(retries=3)
    async def pay(card: str) -> str:
        tries.append(1)
        if len(tries) == 1:
            raise Retry(0)
        if len(tries) == 2:
            raise Snooze(0)
        return card

    @app.task(retries=0)
    async def fail(card: str) -> None:
        raise ValueError(card)

    @app.batch(size=3, linger=0)
    async def many(cards: list[str]) -> list[str]:
        return [card[::-1] for card in cards]

    return {"pay": pay, "fail": fail, "many": many}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_jobs_run_with_keys_and_are_secret_without(kind: str, tmp_path: Path) -> None:
    app, other = apps(f"sqlite:///{tmp_path}/jobs.db" if kind == "sqlite" else "memory://", **KEYS)
    tasks = declare(app)
    async with app, other, app.worker(guarded=False):
        paid = await tasks["pay"].enqueue(SECRET)
        assert await paid.result(timeout=PATIENCE_S) == SECRET
        several = [await tasks["many"].enqueue(f"{n}-x") for n in range(5)]
        for job in several:
            assert (await job.result(timeout=PATIENCE_S)).startswith("x-")
        failed = await tasks["fail"].enqueue(SECRET)
        with pytest.raises(JobFailed, match=SECRET):
            await failed.result(timeout=PATIENCE_S)
        info = await paid.info()
        assert (info.arguments, info.result, info.attempts) == ({"card": SECRET}, SECRET, 3)

        with pytest.raises(ResultError, match="its result is encrypted; give this program the"):
            await other.job(paid.id).result(timeout=PATIENCE_S)
        with pytest.raises(JobFailed) as hidden:
            await other.job(failed.id).result(timeout=PATIENCE_S)
        assert str(hidden.value).endswith(ENCRYPTED)
        for id in (paid.id, failed.id):
            shown = await other.job(id).info()
            assert SECRET not in repr(shown) and (shown.arguments, shown.state.ended) == ({}, True)
        assert (await other.job(failed.id).info()).traceback == ENCRYPTED


async def test_a_worker_without_keys_says_that_a_job_is_sealed() -> None:
    app, other = apps("memory://", **KEYS)
    fail = declare(app)["fail"]
    declare(other)
    async with app, other:
        job = await fail.enqueue(SECRET)
        async with other.worker(guarded=False):
            with pytest.raises(JobFailed, match="this job is sealed; give this program the keys"):
                await other.job(job.id).result(timeout=PATIENCE_S)


async def test_what_is_only_signed_can_be_read_without_a_key() -> None:
    app, other = apps("memory://", signing_keys=[SIGN])
    tasks = declare(app)
    async with app, other:
        job = await tasks["pay"].enqueue("x")
        info = await other.job(job.id).info()
        assert (info.arguments, info.payload) == ({"card": "x"}, '{"card":"x"}')


async def ticked(store: MemoryStore, keys: dict[str, Any]) -> App:
    """An app with a schedule in its code, which has ticked."""
    app = App(store, name="a", **keys)
    ran = asyncio.Event()

    @app.every("1s", arguments={"card": SECRET})
    @app.task(name="tick")
    async def tick(card: str) -> None:
        assert card == SECRET
        ran.set()

    async with app.worker(guarded=False), asyncio.timeout(PATIENCE_S):
        await ran.wait()
    return app


async def test_the_code_signs_its_schedules_again() -> None:
    """As when signing is turned on: those from before are refused, and then replaced."""
    store = MemoryStore()
    await ticked(store, {})
    [schedule] = await store.schedules()
    assert SECRET in schedule.rule
    app = await ticked(store, KEYS)
    [schedule] = await store.schedules()
    assert is_sealed(schedule.rule) and SECRET not in schedule.rule
    async with app:
        [info] = await app.schedules.list()
        assert info.rule is not None and SECRET in info.rule.payload
    async with App(store, name="b") as other:
        [info] = await other.schedules.list()
        assert info.problem is not None and "it is sealed" in info.problem


async def test_a_relay_does_not_sign_what_somebody_put_into_the_outbox(tmp_path: Path) -> None:
    shop = tmp_path / "shop.db"
    app = App(MemoryStore(), outbox=f"sqlite:///{shop}", **KEYS)
    ran: list[str] = []

    @app.task(name="pay")
    async def pay(card: str) -> None:
        ran.append(card)

    assert app.outbox is not None
    assert await app.outbox.aside() == 0  # which creates the table
    with closing(sqlite3.connect(shop)) as db, db:
        handle = await pay.using(connection=db).enqueue(SECRET)
        forged = Job(id="forged", task="pay", payload='{"card":"y"}', due_ms=0, created_ms=0)
        db.execute(f"insert into {TABLE} (job) values (?)", [msgspec.json.encode(forged).decode()])
        [row] = db.execute(f"select job from {TABLE} order by n limit 1").fetchone()
        assert SECRET not in row
    async with app.worker(guarded=False):
        await handle.result(timeout=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(JobFailed, match="refused: it is not signed"):
                while True:
                    try:
                        await app.job("forged").result(timeout=PATIENCE_S)
                    except LookupError:
                        await asyncio.sleep(0.01)
    assert ran == [SECRET]


async def test_a_transaction_adds_sealed_jobs(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db", **KEYS)
    pay = declare(app)["many"]
    async with app:
        pass  # creates the file
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as db, db:
        handle = pay.using(connection=db).enqueue_sync(SECRET)
        [payload] = db.execute("select payload from job").fetchone()
        assert is_sealed(payload) and SECRET not in payload
    async with app.worker(guarded=False):
        assert await handle.result(timeout=PATIENCE_S) == SECRET[::-1]


def test_a_sandbox_runs_apps_with_keys() -> None:
    app = App("memory://", **KEYS)
    tasks = declare(app)
    with sandbox(app, start=datetime(2026, 3, 1, tzinfo=UTC)) as box:
        job = tasks["pay"].enqueue_sync(SECRET)
        assert [run.result for run in box.drain()][-1] == SECRET
        assert app.sync.info(job.id).state is State.DONE


async def test_a_result_and_an_error_are_encrypted_whatever_they_look_like(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db", encryption_keys=[ENCRYPT])
    marked = f'{{"tickwheel:sealed":{{}},"card":"{SECRET}"}}'

    @app.task(retries=0)
    async def echo(value: Any) -> Any:
        if value is None:
            raise GiveUp(marked)
        return value

    async with app, app.worker():
        for value in (msgspec.json.decode(marked), None):
            job = await echo.enqueue(value)
            with pytest.raises((ResultError, JobFailed)):
                await job.result(timeout=PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
        assert SECRET not in str(db.execute("select * from job").fetchall())


async def test_a_job_that_is_refused_is_counted_and_told(tmp_path: Path) -> None:
    store, told = MemoryStore(), asyncio.Event()
    app = App(store, signing_keys=[SIGN])
    counts = app.enable_metrics()

    @app.on_alert
    async def tell(alert: Alert) -> None:
        assert alert.kind == "dead" and "refused" in alert.words
        told.set()

    @app.task
    async def t() -> None: ...

    async with app.worker(), asyncio.timeout(PATIENCE_S):
        await (await t.enqueue()).result()
        await store.add([Job(id="forged", task="t", payload="{}", due_ms=0, created_ms=0)])
        await told.wait()
    assert counts.tasks["t"].queues["default"].dead == 1
