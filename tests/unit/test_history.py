"""Points of history: what is counted since the last one, tiers, and what fits into a record."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from tickwheel.checks import RECORD_BYTES, checked_records
from tickwheel.engine.counts import BOUNDS_MS, TASKS_TOLD
from tickwheel.operate.history import (
    COARSE,
    EMPTY,
    FINE,
    GAP_MS,
    KIND,
    RANGES,
    SOURCES_MOST,
    TASKS_MOST,
    TIERS,
    Point,
    Stretch,
    decoded,
    encoded,
    expired,
    gained,
    grown,
    history,
    merged,
    remember,
    rolled_up,
    sampled,
    sources,
)
from tickwheel.store import QueueInfo, WorkerCounts, WorkerInfo

NOW_S = 1_800_000_000
NOW_MS = NOW_S * 1000


def counts(source: str = "a", *, since_ms: int = 0, **more: Any) -> WorkerCounts:
    return WorkerCounts(source=source, since_ms=since_ms, **more)


def worker(name: str, told: WorkerCounts | None, *, seen_ms: int = NOW_MS) -> WorkerInfo:
    return WorkerInfo(
        name=name, host="host", pid=1, version="1", queues=("default",), concurrency=1,
        started_ms=0, seen_ms=seen_ms, gone_after_ms=15_000, counts=told,
    )  # fmt: skip


# --- Since the last point


def test_what_was_counted_since_is_the_difference() -> None:
    before = WorkerCounts(
        source="a", since_ms=0, started=5, done=4, late=(1, 2), tasks={"x": (4, 1, 0)}
    )
    now = WorkerCounts(
        source="a",
        since_ms=0,
        started=9,
        done=7,
        late=(1, 4, 1),
        tasks={"x": (7, 1, 0), "y": (0, 0, 1)},
    )
    found = gained(now, before, 0)
    assert (found.started, found.done, found.late) == (4, 3, (0, 2, 1))
    assert found.tasks == {"x": (3, 0, 0), "y": (0, 0, 1)}


def test_a_process_that_has_begun_since_began_with_nothing() -> None:
    now = counts(since_ms=NOW_MS, done=7)
    assert gained(now, None, NOW_MS - 10_000).done == 7


def test_of_a_process_that_was_overlooked_nothing_is_gained() -> None:
    now = counts(since_ms=NOW_MS - 3_600_000, done=7)
    assert gained(now, None, NOW_MS - 10_000).done == 0


def test_a_process_whose_counts_are_less_has_begun_again() -> None:
    assert gained(counts(started=3, done=3), counts(started=8, done=8), 0).done == 3


def test_workers_of_one_process_count_once_and_the_last_word_counts() -> None:
    found = sources(
        [
            worker("ann", counts(done=5), seen_ms=NOW_MS),
            worker("bob", counts(done=4), seen_ms=NOW_MS - 1_000),
            worker("eve", counts("b", done=1)),
            worker("old", None),
        ]
    )
    assert {name: each.done for name, each in found.items()} == {"a": 5, "b": 1}


def sample(last: Stretch, *workers: WorkerInfo, now_ms: int = NOW_MS) -> Point:
    queues = [QueueInfo(name="a", waiting=3, running=1), QueueInfo(name="b", waiting=4, done=9)]
    return sampled(last, {}, workers, queues, now_ms)[0]


def test_a_point_counts_jobs_and_what_workers_have_told_since_the_last_one() -> None:
    last = Stretch(seen=[counts(done=5)], seen_ms=NOW_MS - 10_000)
    point = sample(last, worker("ann", counts(done=25)))
    assert (point.waiting, point.running, point.done, point.over_s) == (7, 1, 20, 10)


@pytest.mark.parametrize(
    ("last", "workers"),
    [
        (EMPTY, [worker("ann", counts(done=5))]),
        (Stretch(seen_ms=NOW_MS - GAP_MS - 1), [worker("ann", counts(done=5))]),
        (Stretch(seen_ms=NOW_MS - 10_000), [worker("ann", None)]),
        # The clock was set back.
        (Stretch(seen_ms=NOW_MS + 10_000), [worker("ann", counts(since_ms=NOW_MS, done=5))]),
    ],
)
def test_nothing_is_known_without_a_last_point_or_a_worker_that_tells(
    last: Stretch, workers: list[WorkerInfo]
) -> None:
    point = sample(last, *workers)
    assert (point.over_s, point.done, point.waiting) == (0, 0, 7)


def test_without_workers_nothing_runs() -> None:
    assert sample(Stretch(seen_ms=NOW_MS - 10_000)).over_s == 10


def test_processes_that_are_silent_are_remembered_for_a_while() -> None:
    seen = {f"s{n}": counts(f"s{n}", done=n) for n in range(SOURCES_MOST)}
    found = remember(seen, {"new": counts("new")})
    assert len(found) == SOURCES_MOST and "s0" not in found and "s1" in found


# --- Merging

points = st.builds(
    Point,
    st.integers(0, 10**9),
    samples=st.integers(0, 50),
    waiting=st.integers(0, 10**6),
    running=st.integers(0, 10**6),
    over_s=st.integers(0, 600),
    started=st.integers(0, 10**6),
    done=st.integers(0, 10**6),
    failed=st.integers(0, 10**6),
    dead=st.integers(0, 10**6),
    expired=st.integers(0, 10**6),
    late=st.lists(st.integers(0, 1000), max_size=len(BOUNDS_MS) + 1).map(tuple),
)


@given(st.lists(points, max_size=8), st.lists(points, max_size=8))
def test_it_does_not_matter_in_how_many_steps_points_are_merged(
    some: list[Point], more: list[Point]
) -> None:
    at_once = merged([*some, *more], 0)
    in_steps = merged([merged(some, 0), merged(more, 0)], 0)
    for name in ("samples", "over_s", "started", "done", "failed", "dead", "expired", "late"):
        assert getattr(at_once, name) == getattr(in_steps, name)
    assert at_once.waiting == pytest.approx(in_steps.waiting)
    assert at_once.running == pytest.approx(in_steps.running)


@given(st.lists(st.integers(0, 89_999), min_size=1, max_size=60, unique=True))
def test_each_tier_has_the_sums_of_the_one_before_it(slots: list[int]) -> None:
    """However often a stretch is rolled up."""
    start_s = COARSE[-1].start_s(NOW_S)
    fine: dict[str, Stretch] = {}
    stored: dict[str, Stretch] = {}
    for slot in sorted(slots):
        point = Point(start_s + slot * FINE.step_s, samples=1, waiting=2, over_s=10, done=slot)
        name = FINE.record(point.at_s)
        fine[name] = grown(fine.get(name, EMPTY), point, {}, {}, point.at_s * 1000)
    for stretch in [*fine.values(), *fine.values()]:
        names = [tier.record(stretch.last_s) for tier in COARSE]
        coarse = rolled_up(stretch, [stored.get(name, EMPTY) for name in names])
        stored.update(zip(names, coarse, strict=True))
    for tier in COARSE:
        found = [
            p
            for name, each in stored.items()
            if name.startswith(f"{tier.name}.")
            for p in each.points
        ]
        assert sum(each.done for each in found) == sum(slots)
        assert sum(each.over_s for each in found) == 10 * len(slots)
        assert {each.waiting for each in found} == {2}
        assert all(each.at_s % tier.step_s == 0 for each in found)
        assert len({each.at_s for each in found}) == len(found)


# --- Records


def test_the_largest_record_fits() -> None:
    huge = 10**12
    name = "x" * 120
    told = {
        f"source-{n}": WorkerCounts(
            source=f"source-{n}", since_ms=NOW_MS, started=huge, done=huge,
            late=(huge,) * (len(BOUNDS_MS) + 1),
            tasks={f"{name}-{m}": (huge, huge, huge) for m in range(TASKS_TOLD)},
        )
        for n in range(SOURCES_MOST)
    }  # fmt: skip
    tasks = {f"{name}-{m}": (huge, m, huge) for m in range(1_000)}
    stretch = EMPTY
    for n in range(FINE.points):
        point = Point(
            NOW_S + n * FINE.step_s, 1, huge + 0.123, huge + 0.123, 123.456,
            *(huge,) * 5, late=(huge,) * (len(BOUNDS_MS) + 1),
        )  # fmt: skip
        stretch = grown(stretch, point, tasks, told, NOW_MS)
    checked_records(KIND, {FINE.record(NOW_S): encoded(stretch)})
    assert decoded(encoded(stretch)) == stretch and len(stretch.points) == FINE.points
    assert stretch.seen and len(stretch.tasks) == TASKS_MOST
    # Those with the most failures.
    assert f"{name}-999" in stretch.tasks and f"{name}-0" not in stretch.tasks


def test_the_largest_coarse_record_fits() -> None:
    points = tuple(
        Point(
            NOW_S + n, 360, 1e6 + 1 / 3, 1e6 + 1 / 3, 21_600.123, *(10**9,) * 5, late=(10**8,) * 19
        )
        for n in range(max(each.points for each in COARSE))
    )
    assert len(encoded(Stretch(points=points)).encode()) <= RECORD_BYTES


def test_what_another_release_wrote_is_not_shown() -> None:
    assert decoded("{") == decoded('{"points": 5}') == decoded(None) == EMPTY
    newer = msgspec.json.encode(
        {"points": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, [1], "more"]], "new": 1}
    )
    assert decoded(newer.decode()).points[0].expired == 10


@given(st.integers(0, 10**9))
def test_what_is_wanted_has_not_expired_and_older_records_have(back_s: int) -> None:
    for each in TIERS:
        name = each.record(NOW_S - back_s)
        if name in each.records(NOW_S):
            assert not expired(name, NOW_S)
        elif back_s > each.keep_s + 2 * each.span_s:
            assert expired(name, NOW_S)
    assert expired("else", NOW_S)


# --- What is shown


@pytest.mark.parametrize("name", list(RANGES))
def test_all_lists_are_as_long_as_the_times_and_the_newest_is_last(name: str) -> None:
    tier = RANGES[name]
    at_s = tier.slot_s(NOW_S) - tier.step_s
    point = Point(at_s, 1, 5, 2, 10, started=30, done=20, failed=10, dead=1, late=(30,))
    found = history(tier, [point], NOW_S)
    lengths = {len(getattr(found, each)) for each in found.__struct_fields__}
    assert lengths == {len(found.times)} and len(found.times) <= 400
    assert found.times[-1] == at_s and found.times[0] == at_s - tier.keep_s + tier.step_s
    assert {b - a for a, b in zip(found.times, found.times[1:], strict=False)} == {tier.step_s}
    assert (found.done[-1], found.failed[-1], found.dead[-1]) == (2, 1, 0.1)
    assert (found.waiting[-1], found.running[-1]) == (5, 2)
    assert (found.p50_ms[-1], found.p99_ms[-1]) == (0.5, 0.99)
    assert found.done[0] is found.waiting[0] is found.p99_ms[0] is None


def test_counts_that_nobody_told_are_not_zero() -> None:
    found = history(FINE, [Point(FINE.slot_s(NOW_S), 1, 5)], NOW_S)
    assert found.times[-1] == FINE.slot_s(NOW_S)
    assert found.waiting[-1] == 5 and found.done[-1] is found.p50_ms[-1] is None
