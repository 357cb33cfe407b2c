"""What a handle knows of the consumers that it pulls from, and what it decides. No server."""

from __future__ import annotations

import asyncio

import pytest

from tickwheel.stores.nats import notify, sources
from tickwheel.stores.nats.sources import (
    EMPTY_S,
    Presence,
    Source,
    Sources,
    Supply,
    by_supply,
    cut_above,
    shares_of,
    unsettled,
)

MIB = 1 << 20


@pytest.fixture
def source() -> Source:
    return Source("default", "20")


def answer(source: Source, count: int, *, more: bool = False, now: float = 0.0) -> None:
    source.answered(count, wanted=10, more=more, now=now)


# --- One source


def test_a_consumer_that_answered_once_is_lost_when_it_is_gone(source: Source) -> None:
    answer(source, 1)
    assert (source.presence, source.is_gone) == (Presence.PRESENT, False)
    source.gone()
    assert (source.presence, source.is_gone) == (Presence.LOST, True)


def test_a_consumer_that_never_answered_is_only_absent(source: Source) -> None:
    """Most queues don't use every priority: nobody needs to hurry."""
    source.gone()
    assert source.presence is Presence.ABSENT and source.is_gone


def test_a_lost_consumer_is_restored_once(source: Source) -> None:
    answer(source, 1)
    source.gone()
    source.restoring()
    source.gone()
    assert source.presence == Presence.ABSENT
    answer(source, 0)
    source.gone()
    assert (source.presence, source.is_gone) == (Presence.LOST, True)


@pytest.mark.parametrize("end", ["answered", "gone", "reconnected"])
def test_a_silent_source_is_waited_for_once_it_has_answered(source: Source, end: str) -> None:
    source.kept_waiting()
    source.failed()
    assert source.silent
    if end == "answered":
        answer(source, 0)
    else:
        getattr(source, end)()
    assert (end, source.silent) == (end, False)


def test_a_source_that_gives_nothing_for_a_while_may_be_stuck(source: Source) -> None:
    assert not source.is_stuck(1e9), "it was never asked"
    answer(source, 0, now=100.0)
    answer(source, 0, now=100.0 + EMPTY_S)
    assert source.is_stuck(100.0 + EMPTY_S)
    source.failed()
    assert source.is_stuck(100.0 + EMPTY_S)
    answer(source, 1, now=200.0)
    assert not source.is_stuck(300.0)


@pytest.mark.parametrize(
    ("count", "more", "supply"),
    [(10, True, Supply.PLENTY), (9, True, Supply.CUT), (9, False, Supply.LITTLE)],
)
def test_what_a_pull_leaves_behind(source: Source, count: int, more: bool, supply: Supply) -> None:
    answer(source, count, more=more)
    assert source.supply is supply
    # What was cut counts in its own claim only; that there is more does not change by that.
    source.begin_claim()
    assert source.supply is (Supply.LITTLE if supply is Supply.LITTLE else Supply.PLENTY)
    source.failed()
    assert source.supply is Supply.LITTLE


# --- Decisions


def test_sources_come_by_priority() -> None:
    found = Sources().of(["a", "b"])
    assert [(each.rank, each.queue) for each in found] == sorted(
        ((each.rank, each.queue) for each in found), key=lambda pair: (-pair[0], pair[1])
    )
    assert len({each.rank for each in found}) == len(found) / 2 == 4


def test_those_with_little_are_asked_at_once_and_those_with_plenty_by_priority() -> None:
    found = Sources().of(["a", "b"])
    high, low = found[:2], found[-2:]
    for each in (*high, *low):
        answer(each, 10, more=True)
    little, plenty = by_supply(found)
    assert little == found[2:-2]
    assert plenty == [high, low]


def test_sources_that_are_asked_at_once_share_the_bytes() -> None:
    [one, two, three, four] = Sources().of(["a"])
    assert shares_of([one, two, three], [four], MIB) == {
        one: MIB // 4,
        two: MIB // 4,
        three: MIB // 4,
        # Those with little seldom need theirs.
        four: MIB,
    }
    assert shares_of([], [one, two], MIB) == {one: MIB // 2, two: MIB // 2}
    assert shares_of([], [], MIB) == {}


def test_nothing_overtakes_what_was_left_for_its_bytes() -> None:
    found = Sources().of(["a"])
    answer(found[1], 3, more=True)
    assert [cut_above(found, each.rank) for each in found] == [False, False, True, True]


async def test_which_consumers_may_not_know_yet_what_their_stream_has() -> None:
    everything = Sources()
    found = everything.of(["new", "served", "unsure", "sure"])

    def queues(**given: object) -> list[str]:
        words = {"new": ["new", "served"], "unsure": ["unsure"], "served": {"served"}} | given
        late = unsettled(found, **words)  # type: ignore[arg-type]
        return sorted({each.queue for each in late})

    assert queues() == ["new", "unsure"]
    assert queues(unsure=[]) == ["new"]
    for each in everything.of(["unsure", "new"]):
        each.gone()
    # That of a new queue may just be about to be created.
    assert queues() == ["new"]
    pull = asyncio.get_running_loop().create_future()
    for each in everything.of(["new"]):
        each.pull = pull  # type: ignore[assignment]
    assert queues() == []


def test_a_message_that_stays_where_it_is_is_for_anybody() -> None:
    one, other = {("default-r20", 7)}, {("default-r20", 8)}
    assert notify.is_ours(one, set(), first=True)
    assert not notify.is_ours(one, set(), first=False)
    assert notify.is_ours(one, one, first=False)
    assert not notify.is_ours(other, one, first=False)
    assert not notify.is_ours(set(), set(), first=True)


def test_who_serves_many_queues_polls_less_often() -> None:
    found = {("default-r20", 7)}
    assert notify.next_pause(0, set(), 4) == notify.FIRST_POLL_S
    assert notify.next_pause(5, found, 4) == notify.FIRST_POLL_S
    assert notify.next_pause(5, set(), 4) == notify.POLL_S
    assert notify.next_pause(5, set(), 400) == 400 * notify.POLL_EACH_S


def test_a_source_names_its_consumer(source: Source) -> None:
    assert source.consumer == "default-r20"
    assert sources.PATIENCE_S < notify.POLL_S
