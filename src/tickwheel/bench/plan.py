"""How much is measured: a quick look, the whole, or with a million waiting jobs as well."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.bench.catalogue import STORE_NAMES


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes, in jobs, and limits, in seconds. Whatever is slow is cut off at its limit."""

    rounds: int
    # Adding: this long for each figure.
    enqueue_s: float
    # Draining: so many, or as many as were added, or ran, in so many seconds.
    drain: int
    fill_s: float
    drain_s: float
    processes: int
    # Latencies: so many calls.
    starts: int
    calls: int
    calls_s: float
    # Punctuality: how many jobs wait for later, and how many are due over how many seconds.
    waiting: tuple[int, ...]
    peers_waiting: tuple[int, ...]
    light: int
    heavy: int
    over_s: float
    # How long after the last one was due runs still count.
    patience_s: float
    # Whether adding and draining are measured again while so many wait.
    growth: bool = True
    # In how many of the rounds all this is done with many waiting.
    waiting_rounds: int = 1
    stores: tuple[str, ...] = STORE_NAMES

    @property
    def words(self) -> str:
        """For people who read the figures."""
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return (
            f"{rounds}, of which {min(self.waiting_rounds, self.rounds)} with many jobs waiting; "
            f"jobs are added for {self.enqueue_s:g} s for each figure; up to {self.drain:,} jobs, "
            f"as many as can be added in {self.fill_s:g} s, are drained for up to "
            f"{self.drain_s:g} s"
        )


QUICK = Plan(
    rounds=1,
    enqueue_s=0.2,
    drain=5_000,
    fill_s=0.5,
    drain_s=0.8,
    processes=1,
    starts=10,
    calls=10,
    calls_s=0.5,
    waiting=(1_000,),
    peers_waiting=(),
    light=30,
    heavy=0,
    over_s=1.5,
    patience_s=2,
    growth=False,
    stores=("sqlite", "postgresql", "redis", "nats-fast"),
)
FULL = Plan(
    rounds=3,
    enqueue_s=0.5,
    drain=20_000,
    fill_s=2,
    drain_s=2,
    processes=2,
    starts=20,
    calls=20,
    calls_s=1.5,
    waiting=(10_000, 100_000),
    peers_waiting=(10_000,),
    light=60,
    heavy=1_200,
    over_s=3,
    patience_s=5,
)
LONG = Plan(
    rounds=5,
    enqueue_s=1,
    drain=50_000,
    fill_s=5,
    drain_s=5,
    processes=2,
    starts=50,
    calls=50,
    calls_s=5,
    waiting=(10_000, 100_000, 1_000_000),
    peers_waiting=(10_000, 100_000),
    light=100,
    heavy=2_000,
    over_s=5,
    patience_s=10,
)
