"""Which stores are measured, how an empty one comes about, and what each is to reach."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tickwheel.stores.nats_server import start


@dataclass(frozen=True, slots=True)
class Goals:
    """Jobs a second at least, milliseconds at most."""

    enqueue_many: int
    drain: int
    p50_ms: float
    p99_ms: float


# Gives the URL of an empty store, a new one each time.
Fresh = Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A store under test; its server, where it has one, runs for as long as the block lasts."""

    serve: Callable[[], AbstractContextManager[Fresh]]
    goals: Goals


@contextmanager
def _sqlite() -> Iterator[Fresh]:
    @contextmanager
    def fresh() -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
            yield f"sqlite:///{folder}/jobs.db"

    yield fresh


def _nats(durability: str) -> Callable[[], AbstractContextManager[Fresh]]:
    @contextmanager
    def serve() -> Iterator[Fresh]:
        with tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
            server = asyncio.run(start(folder, durability=durability))

            @contextmanager
            def fresh() -> Iterator[str]:
                yield f"{server.url}/{secrets.token_hex(4)}?durability={durability}"

            try:
                yield fresh
            finally:
                asyncio.run(server.stop())

    return serve


KINDS = {
    "sqlite": Kind(_sqlite, Goals(50_000, 15_000, 2, 5)),
    "nats-strict": Kind(_nats("strict"), Goals(30_000, 7_000, 2, 5)),
    "nats-fast": Kind(_nats("fast"), Goals(30_000, 10_000, 2, 5)),
}
