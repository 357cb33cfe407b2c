"""How much is measured: a quick look, the whole, or with a million waiting jobs as well."""

from __future__ import annotations

from dataclasses import dataclass


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
    # In how many of the rounds that is done, and the growth of cost.
    waiting_rounds: int = 1

    @property
    def words(self) -> str:
        levels = " and ".join(f"{each:,}" for each in self.waiting) or "none"
        return (
            f"{self.rounds} round(s); enqueue for {self.enqueue_s:g} s; drain {self.drain:,} jobs, "
            f"at most {self.drain_s:g} s; {self.processes} processes where there are several; "
            f"punctuality with {levels} waiting, {self.light / self.over_s:g} (light) and "
            f"{self.heavy / self.over_s:g} (heavy) jobs a second over {self.over_s:g} s"
        )


QUICK = Plan(
    rounds=1,
    enqueue_s=0.3,
    drain=5_000,
    fill_s=0.7,
    drain_s=1.0,
    processes=1,
    starts=15,
    calls=10,
    calls_s=1,
    waiting=(1_000,),
    peers_waiting=(),
    light=30,
    heavy=0,
    over_s=1.5,
    patience_s=2,
)
FULL = Plan(
    rounds=3,
    enqueue_s=0.7,
    drain=20_000,
    fill_s=3,
    drain_s=3,
    processes=2,
    starts=30,
    calls=30,
    calls_s=3,
    waiting=(10_000, 100_000),
    peers_waiting=(10_000,),
    light=100,
    heavy=2_000,
    over_s=5,
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
# For tests: everything once, as small as it can be.
TINY = Plan(
    rounds=1,
    enqueue_s=0.02,
    drain=200,
    fill_s=1,
    drain_s=5,
    processes=2,
    starts=3,
    calls=3,
    calls_s=1,
    waiting=(100,),
    peers_waiting=(100,),
    light=5,
    heavy=20,
    over_s=0.2,
    patience_s=5,
)
