"""What `doctor` learns from a NATS server: each thing that is wrong is found, with its fix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from test_nats_secure import free_ports, open_soon, serving

from stores import NatsHarness
from tickwheel.clock import SystemClock
from tickwheel.store import Finding, Level
from tickwheel.stores.nats.health import limits_of, of_consumers, of_stream
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
    assert "3 ready jobs not handed out" in words["consumers"]
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
    assert finding.words == "changed by somebody: max_msgs_per_subject"
    await nats.reopen()
    assert bad(await findings(nats.store)) == []


async def test_ready_jobs_that_nobody_hands_out(nats: NatsHarness) -> None:
    await nats.add(nats.job("one", priority=2), nats.job("two"))
    stream = nats.store._first.stream  # type: ignore[attr-defined]
    name = (await stream.info())["config"]["name"]
    await stream.api(f"CONSUMER.DELETE.{name}.default-r2")
    [finding] = bad(await findings(nats.store))
    assert (finding.level, finding.about) == (Level.BAD, "queue default")
    assert finding.words.startswith("jobs of priority 2 are ready")
    # The fix as it is given.
    await nats.reopen()
    await nats.add(nats.job("three", priority=2))
    assert bad(await findings(nats.store)) == []
    assert sorted(await nats.claim_ids()) == ["one", "three", "two"]


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
            assert (finding.about, finding.words) == ("streams", "1 of 1 that this account may use")


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
            assert "forbids this user to publish" in finding.words
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
            assert words["memory"].startswith("the server's process has ")
            assert "that the server may use" in words["disk"]
            durability = await store.durability()
            assert not durability.power_loss
            assert "sync_interval: always" in durability.fixes[0]
        async with opened(f"nats://127.0.0.1:{port}/ns?monitor=http://127.0.0.1:1") as store:
            assert "monitor" in [each.about for each in bad(await findings(store))]
            assert "nobody says" in (await store.durability()).summary


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


def test_hand_outs_that_stand_still() -> None:
    def consumer(kind: str, out: int) -> dict[str, object]:
        metadata = {"queue": "q", "kind": kind}
        config = {"metadata": metadata, "max_ack_pending": 10}
        return {"name": f"q-{kind}", "config": config, "num_pending": 2, "num_ack_pending": out}

    assert bad(of_consumers([consumer("r1", 9), consumer("s", 10)])) == []
    [finding] = bad(of_consumers([consumer("r1", 10), consumer("run", 0)]))
    assert finding.words.startswith("q-r1 hands out no more")
