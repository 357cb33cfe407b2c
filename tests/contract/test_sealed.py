"""Keys: what nobody with a key has put into a store is not run, and tells nothing to others.

What is forged goes into the store itself, past the wrapper, as somebody without a key would put it.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from stores import Harness
from tickwheel import BadSchedule
from tickwheel.envelope import is_sealed
from tickwheel.job import Job, Outcome, State
from tickwheel.schedule import Rule, Schedule, read_rule
from tickwheel.store import Query, Store
from tickwheel.trust import Trust, new_key, sealed, trust_of, unsealed

SIGN, OTHER = new_key("sign"), new_key("other")
ENCRYPT = new_key("encrypt")
SECRET = "4111-1111"

# So many brackets that a parser gives up.
DEEP = '{"tickwheel:sealed":{"x":' + "[" * 50_000 + ',"body":{}}'

replace = msgspec.structs.replace


def trust(signing: list[str], encryption: list[str], mode: str = "require") -> Trust:
    found = trust_of(signing, encryption, mode)
    assert found is not None
    return found


BOTH = trust([SIGN], [ENCRYPT])


@pytest.fixture
def raw(h: Harness) -> Store:
    """The store, for somebody without a key. The harness has the keys."""
    raw = unsealed(h.store)
    h.store = sealed(raw, BOTH)
    return raw


def forged(job: Job, keys: Trust, others: Trust) -> list[Job]:
    """The job as sealed with the right keys, and changed since in one way each."""
    good = keys.seal(job)
    other = keys.seal(replace(job, payload='{"amount":1000000}'))
    changes: dict[str, Any] = {
        "task": "drop_tables",
        "payload": other.payload,
        "queue": "other",
        "priority": 3,
        "retries": 99,
        "timeout_ms": 1,
        "expires_ms": job.due_ms + 10**9,
        "meta": {"customer": "13"},
    }
    jobs = [
        # Sealed under its own id, so that only this one field is wrong.
        replace(keys.seal(replace(job, id=f"changed {name}")), **{name: value})
        for name, value in changes.items()
    ]
    return [
        *jobs,
        replace(good, id="copy of another"),
        replace(good, id="plain", payload='{"amount":1}'),
        replace(good, id="cut", payload=good.payload[:-9]),
        replace(good, id="garbage", payload='{"tickwheel:sealed":{"signed":7},"body":{}}'),
        replace(good, id="deep", payload=DEEP),
        others.seal(replace(job, id="unknown key")),
    ]


@pytest.mark.parametrize("encryption", [[], [ENCRYPT]], ids=["signed", "and encrypted"])
async def test_a_job_that_was_changed_is_dead_and_the_others_run(
    h: Harness, raw: Store, encryption: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    keys = trust([SIGN], encryption)
    h.store = sealed(raw, keys)
    good = h.job("good", meta={"customer": "12"}, payload='{"amount":1}')
    bad = forged(good, keys, trust([OTHER], encryption))
    await h.add(good)
    assert all(await raw.add(bad))
    with caplog.at_level(logging.ERROR):
        claimed = await h.claim(100, queues=["default", "other"])
        while more := await h.claim(100, queues=["default", "other"]):
            claimed += more
    assert [(job.id, job.payload, job.meta) for job in claimed] == [
        ("good", '{"amount":1}', {"customer": "12"})
    ]
    for job in bad:
        found = await h.get(job.id)
        assert found.state is State.DEAD and found.error is not None, job.id
        assert found.error.startswith("refused: "), found.error
        assert (found.failures, found.history[-1].started_ms) == (0, None)
    assert caplog.text.count("refused: ") >= 10 or "refused as well" in caplog.text


async def test_a_refused_job_is_refused_again_after_a_rerun(h: Harness, raw: Store) -> None:
    await raw.add([h.job(payload="{}")])
    assert await h.claim() == []
    assert await h.store.rerun(["job"], now_ms=h.now) == [True]
    assert await h.claim() == []
    job = await h.get()
    assert job.state is State.DEAD and job.error is not None and "not signed" in job.error


async def test_a_job_does_not_run_before_the_time_that_was_signed(h: Harness, raw: Store) -> None:
    later = h.job(delay_ms=3_600_000)
    await raw.add([replace(BOTH.seal(later), due_ms=h.now)])
    assert await h.claim() == []
    job = await h.get()
    assert (job.state, job.due_ms) == (State.WAITING, later.due_ms)


async def test_a_job_may_be_late_and_its_expiry_lifted(h: Harness, raw: Store) -> None:
    job = h.job(expires_ms=h.now + 60_000)
    await raw.add([replace(BOTH.seal(job), due_ms=h.now + 1, expires_ms=None)])
    assert [each.id for each in await h.claim()] == ["job"]


async def test_unsigned_jobs_run_where_signatures_are_only_preferred(
    h: Harness, raw: Store
) -> None:
    h.store = sealed(raw, trust([SIGN], [], "prefer"))
    await raw.add([h.job("old"), replace(BOTH.seal(h.job("x")), id="moved")])
    await h.add(h.job("new"))
    assert {job.id for job in await h.claim()} == {"old", "new"}
    assert (await h.get("moved")).state is State.DEAD
    [old, new] = await raw.get(["old", "new"])
    assert old is not None and not is_sealed(old.payload)
    assert new is not None and is_sealed(new.payload)


async def test_the_texts_of_a_job_are_secret_for_all_its_life(h: Harness, raw: Store) -> None:
    payload = f'{{"card":"{SECRET}"}}'
    await h.add(h.job(payload=payload))
    job = await h.claim_one()
    envelope = (await seen(raw)).payload
    job = await extended(h, job)
    steps = (Outcome.RETRY, Outcome.PARK, Outcome.SNOOZE, Outcome.RELEASE, Outcome.DEAD)
    for outcome in steps:
        assert job.payload == payload
        text = SECRET if outcome in (Outcome.RETRY, Outcome.DEAD) else "stopped"
        ended = h.settlement(outcome, job, text=text, traceback=f"line 1: {SECRET}")
        assert await h.settle(ended)
        found = await h.get()
        if outcome in (Outcome.RETRY, Outcome.PARK, Outcome.DEAD):
            assert (found.error, found.traceback) == (SECRET, f"line 1: {SECRET}")
            assert SECRET in [run.error for run in found.history]
        if outcome is Outcome.DEAD:
            assert await h.store.rerun(["job"], now_ms=h.now) == [True]
        [job] = await h.claim(tasks=["task"])
        assert (await seen(raw)).payload == envelope
    await h.lose_leases()
    [job] = await h.claim()
    assert (job.payload, job.takeovers) == (payload, 1)
    assert await h.settle(h.settlement(Outcome.DONE, job, text=SECRET))
    assert (await h.get()).result == f'"{SECRET}"'
    [page] = (await h.store.find(Query())).jobs
    assert (page.payload, page.result) == (payload, f'"{SECRET}"')
    await seen(raw)


async def extended(h: Harness, job: Job) -> Job:
    longer = await h.extend(job)
    assert longer is not None and longer.payload == job.payload
    return longer


async def seen(raw: Store) -> Job:
    """The job as the store has it, which tells nothing."""
    [job] = await raw.get(["job"])
    assert job is not None and SECRET not in msgspec.json.encode(job).decode()
    return job


async def test_the_texts_of_one_job_mean_nothing_in_another(h: Harness, raw: Store) -> None:
    """Even if nothing is signed."""
    only = trust([], [ENCRYPT])
    h.store = sealed(raw, only)
    one, two = (only.seal(h.job(id, payload=f'{{"a":"{id}"}}')) for id in ("one", "two"))
    await raw.add([replace(one, payload=two.payload), two])
    [job] = await h.claim()
    assert (job.id, job.payload) == ("two", '{"a":"two"}')
    refused = await h.get("one")
    assert refused.error is not None and "can't be decrypted" in refused.error
    assert is_sealed(refused.payload)
    # The result of a job is not its payload, either.
    assert await h.settle(h.settlement(Outcome.DONE, job))
    [stored] = await raw.get(["two"])
    assert stored is not None
    swapped = replace(stored, result=stored.payload)
    result = only.browse(swapped).result
    assert result is not None and is_sealed(result)


# --- Schedules

RULE = Rule(every_ms=60_000, task="task", payload=f'{{"card":"{SECRET}"}}')


async def test_a_schedule_and_its_jobs_are_sealed(h: Harness, raw: Store) -> None:
    put = await h.store.put_schedule(Schedule(name="s", rule=RULE.encode(), next_ms=h.now))
    assert put.rule == RULE.encode()
    [schedule] = await h.store.schedules()
    assert read_rule(schedule.rule) == RULE
    [stored] = await raw.schedules()
    assert SECRET not in stored.rule
    job = h.job("s@1", payload=RULE.payload)
    next_ms = h.now + 60_000
    assert await h.store.fire(schedule, [job], next_ms=next_ms)
    [claimed] = await h.claim()
    assert claimed.payload == RULE.payload
    [after] = await raw.schedules()
    assert (after.rule, after.next_ms) == (stored.rule, next_ms)
    with pytest.raises(BadSchedule, match="it is sealed"):
        read_rule(after.rule)


async def test_a_schedule_that_was_changed_does_not_tick_and_stays_as_it_is(
    h: Harness, raw: Store
) -> None:
    await h.store.put_schedule(Schedule(name="s", rule=RULE.encode(), next_ms=h.now))
    [stored] = await raw.schedules()
    for rule in (
        stored.rule.replace("60000", "1"),
        RULE.encode(),
        stored.rule[:-5],
        BOTH.seal_schedule(Schedule(name="t", rule=RULE.encode(), next_ms=None)).rule,
    ):
        await raw.put_schedule(replace(stored, rule=rule))
        [found] = await h.store.schedules()
        with pytest.raises(BadSchedule, match="refused: "):
            read_rule(found.rule)
        # An operator may pause it, but does not sign it by that.
        assert await h.store.replace_schedule(replace(found, paused=True))
        [paused] = await raw.schedules()
        assert (paused.rule, paused.paused) == (rule, True)
