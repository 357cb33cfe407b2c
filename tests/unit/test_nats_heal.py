"""Consumers that stand still: when one is moved, and when it is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from tickwheel.stores.nats import heal
from tickwheel.stores.nats.answers import nanoseconds
from tickwheel.stores.nats.consumers import SETTINGS
from tickwheel.stores.nats.heal import Healer, better_leader
from tickwheel.stores.nats.steps import PRIORITIES
from tickwheel.stores.nats.wire import Denied

DRY = set(PRIORITIES)


class Cluster:
    """A stream on three servers as the server describes it: `c` leads the consumer, and is behind.
    One job is ready, and the consumer doesn't see it."""

    def __init__(self) -> None:
        self.token_at: str | None = "2026-01-01T00:00:00Z"
        self.pending = 0
        self.paused = False
        self.leader = "c"
        self.replicas = [replica("b"), replica("c", current=False)]
        self.denied = False
        self.moved: list[tuple[str, str]] = []

    async def consumer(self, name: str) -> dict[str, Any] | None:
        peers = [{"name": "a"}, {"name": "b"}] if self.replicas else []
        cluster = {"leader": self.leader, "replicas": peers}
        about = {"name": name, "num_pending": self.pending, "paused": self.paused}
        return {**about, "cluster": cluster, "config": dict(SETTINGS)}

    async def info(self) -> dict[str, Any]:
        cluster = {"leader": "a", "replicas": self.replicas}
        return {"ts": "2026-01-01T00:00:10.5Z", "cluster": cluster}

    async def first_ready(self, queue: str, priority: str) -> int | None:
        found = priority == "1" and self.token_at
        return nanoseconds(found) if found else None

    async def move_consumer(self, name: str, server: str) -> bool:
        if self.denied:
            raise Denied("NATS does not allow this user to publish")
        self.moved.append((name, server))
        return True


def replica(name: str, **more: object) -> dict[str, Any]:
    return {"name": name, "current": True, **more}


async def healed(cluster: Cluster, *, dry: set[str] = DRY, times: int = 1) -> list[tuple[str, str]]:
    healer = Healer(cluster)  # type: ignore[arg-type]
    for _ in range(times):
        await healer.heal("q", dry)
    return cluster.moved


async def test_a_consumer_whose_server_is_behind_goes_to_the_leader_of_its_stream() -> None:
    assert await healed(Cluster()) == [("q-r1", "a")]


async def test_a_consumer_is_moved_now_and_then_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    assert len(await healed(cluster, times=5)) == 1
    monkeypatch.setattr(heal, "MOVE_S", 0.0)
    assert len(await healed(cluster, times=2)) == 3


@pytest.mark.parametrize(
    "well",
    [
        {"leader": "a"},
        {"leader": "b"},
        {"leader": ""},
        {"replicas": []},
        {"pending": 1},
        {"paused": True},
        {"token_at": None},
        {"token_at": "2026-01-01T00:00:10Z"},
    ],
    ids=str,
)
async def test_a_consumer_that_does_not_stand_still_is_left_alone(well: dict[str, Any]) -> None:
    cluster = Cluster()
    for name, value in well.items():
        setattr(cluster, name, value)
    assert await healed(cluster) == []


async def test_a_consumer_that_gave_something_lately_is_left_alone() -> None:
    assert await healed(Cluster(), dry={"0", "2"}) == []


async def test_who_may_not_move_a_consumer_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.denied = True
    assert await healed(cluster, times=3) == []
    assert caplog.text.count("can't be moved") == 1


@pytest.mark.parametrize(
    ("found", "better"),
    [
        (replica("c"), ""),
        (replica("c", current=False), "a"),
        (replica("c", offline=True), "a"),
        (replica("d", current=False), ""),
    ],
    ids=str,
)
def test_who_should_lead(found: dict[str, Any], better: str) -> None:
    stream = {"cluster": {"leader": "a", "replicas": [replica("b"), found]}}
    assert better_leader({"cluster": {"leader": "c"}}, stream) == better
    assert better_leader({}, {}) == ""
