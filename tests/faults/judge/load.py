"""What is enqueued: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PRODUCERS = 2
# Orders per second and producer; some are of several jobs.
PER_S = 25.0
QUEUES = ("orders", "mail", "reports")
PRIORITIES = ("low", "normal", "high", "urgent")
# After a failure, and when it snoozes, a job waits for exactly so long.
RETRY_S, SNOOZE_S = 0.5, 0.6
# One that is to die may fail so often before.
RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One job, and what should become of it."""

    number: int
    queue: str
    priority: str
    # Due so long after it is enqueued; 0 is at once.
    delay_s: float = 0.0
    seconds: float = 0.0
    in_thread: bool = False
    # It fails so often, then it succeeds; or it never does, and dies of it, or gives up at once.
    fails: int = 0
    dies: bool = False
    gives_up: bool = False
    snoozes: bool = False
    # Somebody tries to cancel it so long after it was enqueued.
    cancel_s: float | None = None
    # With an id of the caller's own, or one that is made for it.
    named: bool = True

    @property
    def id(self) -> str:
        return f"order-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Jobs that are enqueued together: one, many in a batch, one twice, in the outbox, or in a
    transaction of the user's, which may be rolled back."""

    at_s: float
    how: str
    wishes: tuple[Wish, ...]


def orders(seed: int, producer: int, seconds: float, ways: tuple[str, ...]) -> Iterator[Order]:
    """What this producer does, in order of time."""
    dice = random.Random(f"load {seed} {producer}")
    numbers = iter(range(producer * 1_000_000, (producer + 1) * 1_000_000))
    at_s = 0.0
    while (at_s := at_s + dice.expovariate(PER_S)) < seconds:
        [how] = dice.choices(("one", "many", "twice", *ways), (70, 6, 8, *([5] * len(ways))))
        count = dice.randint(2, 30) if how == "many" else 1
        wishes = tuple(_wish(dice, next(numbers), how) for _ in range(count))
        yield Order(at_s=at_s, how=how, wishes=wishes)


def wishes(seed: int, seconds: float, ways: tuple[str, ...]) -> dict[int, Wish]:
    """All jobs of all producers, by number."""
    return {
        wish.number: wish
        for producer in range(PRODUCERS)
        for order in orders(seed, producer, seconds, ways)
        for wish in order.wishes
    }


def _wish(dice: random.Random, number: int, how: str) -> Wish:
    delay_s = dice.choice((0.0, 0.0, dice.uniform(0.05, 1), dice.uniform(1, 6)))
    seconds = dice.choices((0.0, dice.uniform(0.01, 0.1), dice.uniform(0.5, 4)), (60, 35, 5))[0]
    [end] = dice.choices(("done", "fails", "dies", "gives up", "snoozes"), (84, 6, 2, 2, 6))
    return Wish(
        number=number,
        queue=dice.choice(QUEUES),
        priority=dice.choice(PRIORITIES),
        delay_s=round(delay_s, 3),
        seconds=round(seconds, 3),
        in_thread=dice.random() < 0.1,
        fails=dice.randint(1, RETRIES) if end == "fails" else 0,
        dies=end == "dies",
        gives_up=end == "gives up",
        snoozes=end == "snoozes",
        cancel_s=dice.uniform(0, delay_s + 0.5) if dice.random() < 0.05 else None,
        named=how != "one" or dice.random() < 0.5,
    )
