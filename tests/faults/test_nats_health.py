"""What `doctor` learns from a NATS server: each thing that is wrong is found, with its fix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_nats_secure import Elsewhere, free_ports, open_soon, serving

from stores import NatsHarness
from tickwheel.clock import SystemClock
from tickwheel.errors import StoreIncompatible, StoreUnavailable
from tickwheel.store import Finding, Level
from tickwheel.stores.nats import store as nats_store
from tickwheel.stores.nats.health import behind, limits_of, of_consumers, of_stream
from tickwheel.stores.nats.store import NatsStore


@pytest.fixture
def nats(runner: asyncio.Runner) -> Iterator[NatsHarness]:
    harness = NatsHarness()
    runner.run(harness.open())
    yield harness
    runner.run(harness.close())


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[NatsStore]:
    store = NatsStore.from_url(url, clock=SystemClock())
    await open_soon(store)
    try:
        yield store
    finally:
        await store.close()


async def findings(store: object) -> list[Finding]:
    assert isinstance(store, NatsStore)
    return await store.findings()


def bad(found: list[Finding]) -> list[Finding]:
    wrong = [each for each in found if each.level is not Level.OK]
    assert all(each.fix for each in wrong), "each comes with what to do"
    return wrong


async def test_a_server_as_it_should_be(nats: NatsHarness) -> None:
    await nats.add(*nats.jobs(3), nats.job("far", delay_ms=60_000))
    found = await findings(nats.store)
    assert bad(found) == []
    words = {each.about: each.words for each in found}
    assert words["server"].startswith("nats-server 2.")
    assert "3 ready jobs not delivered" in words["consumers"]
    assert words["storage"].endswith("no limit for this account")


async def test_a_stream_that_somebody_changed_and_that_the_next_open_mends(
    nats: NatsHarness,
) -> None:
    stream = nats.store._first.stream  # type: ignore[attr-defined]
    config = (await stream.info())["config"]
    name = config["name"]
    assert "error" not in await stream.api(
        f"STREAM.UPDATE.{name}", config | {"max_msgs_per_subject": 5}
    )
    [finding] = bad(await findings(nats.store))
    assert (finding.level, finding.about) == (Level.BAD, f"stream {name}")
    assert (
        finding.words
        == "settings were changed on the server: max_msgs_per_subject=5; jobs may be lost"
    )
    await nats.reopen()
    assert bad(await findings(nats.store)) == []


LIMITS: dict[str, object] = {
    "max_bytes": 10_000,
    "max_msgs": 10,
    "max_age": 600 * 10**9,
    "max_msg_size": 400,
    "max_consumers": 1,
    "no_ack": True,
    "consumer_limits": {"inactive_threshold": 10**9},
    "subject_transform": {"src": "tw.>", "dest": "other.>"},
    "subject_delete_marker_ttl": 10**9,
}


async def changed(store: object, **settings: object) -> None:
    """Somebody changes the stream by hand."""
    assert isinstance(store, NatsStore)
    stream = store._first.stream
    config = (await stream.info())["config"]
    answer = await stream.api(f"STREAM.UPDATE.{config['name']}", config | settings)
    assert "error" not in answer, answer


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_limit_that_loses_jobs_is_found_and_removed_at_the_next_open(
    nats: NatsHarness, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    await changed(nats.store, **{limit: LIMITS[limit]})
    [finding] = bad(await findings(nats.store))
    assert finding.level is Level.BAD
    assert limit in finding.words and "may be lost" in finding.words
    await nats.reopen()
    assert f"had {limit}=" in caplog.text
    assert bad(await findings(nats.store)) == []


async def test_a_limit_that_is_set_while_jobs_are_added_drops_none(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nats_store, "WATCH_S", 0.0)
    await nats.add(*nats.jobs(5))
    await changed(nats.store, max_msgs=10)
    later = [nats.job(f"later-{n}") for n in range(50)]
    await nats.add(*later)
    assert "had max_msgs=10: removed" in caplog.text
    assert len(await nats.claim(100)) == 55


@pytest.mark.parametrize("setting", [{"max_msg_size": 100}, {"allow_atomic": False}])
async def test_a_setting_that_somebody_changed_is_an_outage_until_it_is_set_right(
    nats: NatsHarness, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_store, "WATCH_S", 60.0)
    await nats.add(*nats.jobs(5))
    [held] = await nats.claim(1)
    await changed(nats.store, **setting)
    later = [nats.job(f"later-{n}") for n in range(5)]
    with pytest.raises(StoreUnavailable):
        await nats.store.add(later)
    with pytest.raises(StoreUnavailable):
        await nats.store.settle([nats.done(held), nats.done(nats.never_claimed())], now_ms=nats.now)
    monkeypatch.setattr(nats_store, "WATCH_S", 0.0)
    assert await nats.store.add(later) == [True] * 5
    assert await nats.settle(nats.done(held))


async def test_a_limit_that_this_user_may_not_remove_keeps_it_from_adding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_store, "WATCH_S", 0.0)
    extra = """
        authorization { users: [
            { user: boss, password: b },
            { user: a, password: b,
              permissions: { publish: { deny: ["$JS.API.STREAM.UPDATE.>"] } } }
        ] }
    """
    with serving(tmp_path, extra) as port:
        url = f"127.0.0.1:{port}/ns"
        async with opened(f"nats://boss:b@{url}") as boss, opened(f"nats://a:b@{url}") as store:
            h = Elsewhere(f"nats://{url}")
            assert await store.add([h.job("one")]) == [True]
            await changed(boss, max_bytes=100_000)
            with pytest.raises(StoreUnavailable, match=r"max_bytes=100000 .*as operator"):
                await store.add([h.job("two")])
            # What is there can still be worked on.
            [held] = await h.claim(store=store)
            assert await h.settle(h.done(held), store=store)
            with pytest.raises(StoreIncompatible, match="max_bytes=100000 and may lose jobs"):
                await NatsStore.from_url(f"nats://a:b@{url}", clock=SystemClock()).open()
            await changed(boss, max_bytes=-1)
            assert await store.add([h.job("two")]) == [True]


async def test_a_stream_that_nobody_can_set_right_is_refused(nats: NatsHarness) -> None:
    await changed(nats.store, sealed=True)
    with pytest.raises(StoreIncompatible, match=r"sealed=True.*can't be changed"):
        await nats.store.new_handle().open()


async def test_an_account_that_demands_a_limit_is_refused(tmp_path: Path) -> None:
    extra = """
        accounts {
            A { jetstream: { max_bytes_required: true }, users: [{ user: a, password: b }] }
        }
    """
    with serving(tmp_path, extra) as port:
        store = NatsStore.from_url(f"nats://a:b@127.0.0.1:{port}/ns", clock=SystemClock())
        with pytest.raises(StoreIncompatible, match="max_bytes_required: false"):
            await open_soon(store)


async def test_ready_jobs_that_nobody_hands_out(nats: NatsHarness) -> None:
    await nats.add(nats.job("one", priority=2), nats.job("two"))
    stream = nats.store._first.stream  # type: ignore[attr-defined]
    name = (await stream.info())["config"]["name"]
    await stream.api(f"CONSUMER.DELETE.{name}.default-r2")
    [finding] = bad(await findings(nats.store))
    assert (finding.level, finding.about) == (Level.BAD, "queue default")
    assert finding.words.startswith("jobs of priority 2 are ready")
    # The fix as it is given: somebody claims.
    ids: list[str] = []
    async with asyncio.timeout(10):
        while len(ids) < 2:
            ids += await nats.claim_ids()
            await asyncio.sleep(0.05)
    assert bad(await findings(nats.store)) == []
    assert sorted(ids) == ["one", "two"]


async def test_a_stream_that_is_gone(nats: NatsHarness) -> None:
    stream = nats.store._first.stream  # type: ignore[attr-defined]
    await stream.api(f"STREAM.DELETE.{stream.name}")
    [finding] = bad(await findings(nats.store))
    assert (finding.level, finding.about) == (Level.BAD, f"stream {stream.name}")
    assert "was deleted" in finding.words


async def test_an_account_that_is_nearly_full(tmp_path: Path) -> None:
    limits = "max_file: 64KB, max_streams: 1"
    extra = f"""
        accounts {{
            A {{ jetstream: {{ {limits} }}, users: [{{ user: a, password: b }}] }}
        }}
    """
    with serving(tmp_path, extra) as port:
        async with opened(f"nats://a:b@127.0.0.1:{port}/ns") as store:
            [finding] = bad([each for each in await findings(store) if each.about != "max_payload"])
            assert (finding.about, finding.words) == ("streams", "1 of 1 for this account")


async def test_a_user_that_may_not_look(tmp_path: Path) -> None:
    extra = """
        authorization { users: [{
            user: a, password: b,
            permissions: { publish: { deny: ["$JS.API.CONSUMER.LIST.>"] } }
        }] }
    """
    with serving(tmp_path, extra) as port:
        async with opened(f"nats://a:b@127.0.0.1:{port}/ns") as store:
            found = bad(await findings(store))
            [finding] = [each for each in found if each.about == "permissions"]
            assert "does not allow this user to publish" in finding.words
            assert "tickwheel nats conf" in finding.fix


async def test_small_messages_and_a_server_that_is_asked(tmp_path: Path) -> None:
    [monitor] = free_ports(1)
    extra = f'http: "127.0.0.1:{monitor}"\nmax_payload: 64KB'
    address = f"http://127.0.0.1:{monitor}"
    with serving(tmp_path, extra) as port:
        async with opened(f"nats://127.0.0.1:{port}/ns?monitor={address}") as store:
            found = await findings(store)
            assert [each.about for each in bad(found)] == ["max_payload"]
            words = {each.about: each.words for each in found}
            assert words["memory"].startswith("the server's process uses ")
            assert "for the server" in words["disk"]
            durability = await store.durability()
            assert not durability.power_loss
            assert "sync_interval: always" in durability.fixes[0]
        async with opened(f"nats://127.0.0.1:{port}/ns?monitor=http://127.0.0.1:1") as store:
            assert "monitor" in [each.about for each in bad(await findings(store))]
            assert "not specified" in (await store.durability()).summary


def test_limits_by_tier() -> None:
    tiers = {
        "R1": {"storage": 95, "limits": {"max_storage": 100, "max_consumers": 10}, "consumers": 5},
        "R3": {"storage": 10, "limits": {"max_storage": -1}},
    }
    found = limits_of({"tiers": tiers, "limits": {}})
    assert [(each.level, each.about) for each in found] == [
        (Level.BAD, "storage"),
        (Level.OK, "consumers"),
        (Level.OK, "storage"),
    ]
    assert "this account at R1" in found[0].words


def test_replicas_that_are_away_or_behind() -> None:
    replicas = [
        {"name": "a", "current": True},
        {"name": "b", "current": False},
        {"name": "c", "current": False, "offline": True},
    ]
    info = {
        "config": {"name": "S", "metadata": {}},
        "state": {"messages": 1, "bytes": 1},
        "cluster": {"replicas": replicas},
    }
    found = bad(of_stream({"metadata": {}}, info))
    assert [each.words for each in found] == ["replica b is behind", "replica c is offline"]


def test_a_consumer_that_is_led_by_a_server_that_is_behind() -> None:
    replicas = [{"name": "b", "current": True}, {"name": "c", "current": False, "lag": 300}]
    stream = {"config": {"name": "S"}, "cluster": {"leader": "a", "replicas": replicas}}

    def consumer(name: str, leader: str) -> dict[str, object]:
        config = {"metadata": {"queue": "q", "kind": name}}
        return {"name": f"q-{name}", "config": config, "cluster": {"leader": leader}}

    well = [consumer("r0", "a"), consumer("r1", "b"), consumer("run", "c"), {**consumer("r3", "")}]
    assert bad(behind(well, stream)) == []
    [finding] = bad(behind([*well, consumer("r2", "c")], stream))
    assert finding.words.startswith("q-r2 is led by c, which is behind")
    assert "step-down S q-r2 --preferred a" in finding.fix


def test_hand_outs_that_stand_still() -> None:
    def consumer(kind: str, out: int) -> dict[str, object]:
        metadata = {"queue": "q", "kind": kind}
        config = {"metadata": metadata, "max_ack_pending": 10}
        return {"name": f"q-{kind}", "config": config, "num_pending": 2, "num_ack_pending": out}

    assert bad(of_consumers([consumer("r1", 9), consumer("s", 10)])) == []
    [finding] = bad(of_consumers([consumer("r1", 10), consumer("run", 0)]))
    assert finding.words.startswith("q-r1 is blocked")
