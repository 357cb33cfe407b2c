"""Plant faults on purpose and see that a test fails for each: `python tests/mutants.py [words]`.

A suite that passes says little until it has been seen to fail. To add a fault, add a `Fault` to the
list: where, what to replace by what, and which tests should notice. Words on the command line pick
the faults whose name or file contains one of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 2
TOO_LONG_S = 300

CONTRACT = "tests/contract"
MODEL = "tests/model/test_store_model.py"
MEMORY = "stores/memory.py"
JOB = "job.py"
STEPS = "stores/sqlite/steps.py"
SQLITE = "stores/sqlite/store.py"
ENGINE = "tests/engine"
EDGES = "tests/engine/test_edges.py"
SCHEDULES = "tests/engine/test_schedules.py"
NATS_JOBS, NATS_STEPS, NATS_READY, NATS_STREAM = (
    f"stores/nats/{each}.py" for each in ("jobs", "steps", "ready", "stream")
)
NATS_RACES = "tests/faults/test_nats_races.py"
LEASES = "tests/contract/test_leases.py"
CLAIMING = "tests/contract/test_claiming.py"
RACING = "tests/contract/test_racing.py"
LOOKING = "tests/contract/test_looking.py"
LARGE = "tests/contract/test_large.py"
TRANSFER = "tests/faults/test_transfer.py"
TRANSACTIONS = "tests/faults/test_transactions.py"
POOL, POOLS = "pool.py", "tests/unit/test_pools.py -k process"
OUTBOX = "tests/faults/test_outbox.py"
BATCHES = "tests/unit/test_sqlite_batches.py"
FILE = "tests/unit/test_sqlite_file.py"
LIBRARIES = "tests/unit/test_sqlite_libraries.py"
LIBRARIES_OF_SQLITE = "stores/sqlite/libraries.py"


@dataclass(frozen=True)
class Fault:
    name: str
    # Which promise it breaks: I1 to I7 of the design, or the contract's own word.
    breaks: str
    file: str
    old: str
    new: str
    tests: str = CONTRACT

    @property
    def store(self) -> str:
        """The store whose tests should notice; what all stores share is tried on the plainest."""
        for name in ("sqlite", "nats", "postgres", "redis"):
            if name in self.file:
                return name
        return "memory"


FAULTS = [
    # --- I1: whole or not at all, and repeatable
    Fault(
        "add is not idempotent", "I1", MEMORY,
        "        if job.id in self._jobs:\n            return False\n", "",
    ),
    Fault(
        "a repeated settle is refused", "I1", MEMORY,
        "        if current.settled == job.fence:\n            return True\n", "",
    ),
    Fault(
        "a repeated settle is refused (model)", "I1", MEMORY,
        "        if current.settled == job.fence:\n            return True\n", "", MODEL,
    ),
    Fault(
        "a settle that was taken is not noted", "I1", JOB,
        "        settled=settlement.job.fence,\n", "",
    ),
    Fault(
        "a repeated rerun starts the job anew", "I1", MEMORY,
        "        if job is None or not job.state.ended:\n            return False\n"
        "        self._put(life.rerun(",
        "        if job is None:\n            return False\n        self._put(life.rerun(",
    ),
    Fault(
        "a repeated cancel ends the job again", "I1", MEMORY,
        "        if job.state.ended:\n            return Cancelled.TOO_LATE\n", "",
    ),
    # --- I2: fenced
    Fault(
        "no fence in settle", "I2", MEMORY,
        "        if current.fence != job.fence or not life.held(current, now_ms=now_ms):\n"
        "            return False\n",
        "        if not life.held(current, now_ms=now_ms):\n            return False\n",
    ),
    Fault(
        "no fence in settle (model)", "I2", MEMORY,
        "        if current.fence != job.fence or not life.held(current, now_ms=now_ms):\n"
        "            return False\n",
        "        if not life.held(current, now_ms=now_ms):\n            return False\n",
        MODEL,
    ),
    Fault(
        "no lease in settle", "I2", MEMORY,
        "        if current.fence != job.fence or not life.held(current, now_ms=now_ms):\n"
        "            return False\n",
        "        if current.fence != job.fence or current.state is not State.RUNNING:\n"
        "            return False\n",
    ),
    Fault(
        "no fence in extend", "I2", MEMORY,
        "if current is None or current.fence != job.fence or not",
        "if current is None or not",
    ),
    Fault(
        "no fence in extend (model)", "I2", MEMORY,
        "if current is None or current.fence != job.fence or not",
        "if current is None or not",
        MODEL,
    ),
    Fault(
        "no lease in extend", "I2", MEMORY,
        "current.fence != job.fence or not life.held(current, now_ms=now_ms):\n"
        "            return None",
        "current.fence != job.fence or current.state is not State.RUNNING:\n"
        "            return None",
    ),
    Fault(
        "all claims share a fence", "I2", JOB,
        "    return secrets.randbits(53)", "    return 1",
    ),
    Fault(
        "a fence counts from one for each job", "I2", JOB,
        "        fence=fence,\n", "        fence=job.attempt + 1,\n",
    ),
    Fault(
        "a fence counts from one for each job (model)", "I2", JOB,
        "        fence=fence,\n", "        fence=job.attempt + 1,\n", MODEL,
    ),
    Fault(
        "a lease lasts a moment too long", "I2", JOB,
        "job.lease_until_ms > now_ms", "job.lease_until_ms >= now_ms",
    ),
    # --- I3: a lost worker costs a lease and no more
    Fault(
        "a lost job is not handed out again", "I3", MEMORY,
        "            self._leases.add(job.id, job.lease_until_ms)", "            pass",
    ),
    Fault(
        "extend is answered but not kept", "I3", MEMORY,
        "        self._put(longer)\n", "",
    ),
    # --- I4: never early
    Fault(
        "claim hands out earlier than ahead", "I4", MEMORY,
        "            self._collect(now_ms)\n            jobs = [",
        "            now_ms += self.ahead_ms // 2\n"
        "            self._collect(now_ms)\n            jobs = [",
        "tests/contract/test_claiming.py -k earlier",
    ),
    Fault(
        "a fast clock makes jobs early for all", "I4", MEMORY,
        ") > now_ms:\n                too_soon", ") > 2**62:\n                too_soon",
    ),
    # --- I5: at least once, and counted
    Fault("a takeover is not counted", "I5", JOB, "        takeovers += 1\n", ""),
    Fault("a takeover is not counted (model)", "I5", JOB, "        takeovers += 1\n", "", MODEL),
    Fault(
        "a lost run is not remembered", "I5", JOB,
        "        takeovers += 1\n        history = remember(history, lost_run(job))\n",
        "        takeovers += 1\n",
    ),
    Fault(
        "attempts do not count on", "I5", JOB,
        "attempt=job.attempt + 1", "attempt=max(job.attempt, 1)",
    ),
    Fault(
        "every run counts as a failure", "I5", JOB,
        "failures=job.failures + settlement.failed", "failures=job.failures + 1",
    ),
    Fault(
        "history grows without end", "I5", JOB,
        "return longer[-HISTORY_LIMIT:]", "return longer",
    ),
    Fault(
        "a rerun job keeps its failures", "I5", JOB,
        "        failures=0,\n        takeovers=0,\n", "        takeovers=0,\n",
    ),
    Fault(
        "delete forgets jobs that wait or run", "I5", MEMORY,
        "        if job is None or not job.state.ended:\n            return False\n"
        "        del self._jobs[id]\n",
        "        if job is None:\n            return False\n        del self._jobs[id]\n",
    ),
    Fault(
        "prune forgets what ended later", "I5", MEMORY,
        "job.ended_ms is not None and job.ended_ms < before_ms", "job.ended_ms is not None",
    ),
    Fault(
        "prune forgets any state", "I5", MEMORY,
        "if job.state in states and job.ended_ms", "if job.ended_ms",
    ),
    Fault(
        "prune knows no limit", "I5", MEMORY,
        "itertools.islice(old, limit)", "itertools.islice(old, None)",
    ),
    # --- I6: one tick, one job
    Fault(
        "fire does not compare", "I6", MEMORY,
        "if current is None or current.fence != schedule.fence:", "if current is None:",
    ),
    Fault(
        "fire does not compare (model)", "I6", MEMORY,
        "if current is None or current.fence != schedule.fence:", "if current is None:",
        MODEL,
    ),
    Fault(
        "fire moves the tick but not the fence", "I6", MEMORY,
        "                fence=next(self._order) + 1,\n            )\n            self._wake()",
        "            )\n            self._wake()",
    ),
    Fault(
        "the fence of a schedule starts over", "I6", MEMORY,
        "            stored = msgspec.structs.replace(schedule, fence=next(self._order) + 1)\n",
        "            before = self._schedules.get(schedule.name)\n"
        "            fence = before.fence + 1 if before else 1\n"
        "            stored = msgspec.structs.replace(schedule, fence=fence)\n",
        "tests/contract/test_firing.py -k deleted_and_put",
    ),
    # --- Cancel
    Fault(
        "an asked job waits again", "cancel", JOB,
        "    if job.asked and state is State.WAITING:\n        state = State.CANCELLED\n", "",
    ),
    Fault(
        "an asked job is handed out after its lease", "cancel", MEMORY,
        "if job.asked:\n", "if False:\n",
    ),
    Fault(
        "an asked job is handed out after its lease (model)", "cancel", MEMORY,
        "if job.asked:\n", "if False:\n", MODEL,
    ),
    Fault(
        "cancel ends a job in a worker's hand", "cancel", MEMORY,
        "        if life.held(job, now_ms=now_ms):\n            self._put(msgspec",
        "        if False:\n            self._put(msgspec",
    ),
    Fault(
        "cancel asks a worker that is lost", "cancel", MEMORY,
        "        if life.held(job, now_ms=now_ms):\n            self._put(msgspec",
        "        if job.state is State.RUNNING:\n            self._put(msgspec",
    ),
    # --- Order, pause, counts, pages
    Fault(
        "priority does not matter", "order", MEMORY,
        "(-job.priority, order, job.id)", "(0, order, job.id)",
    ),
    Fault(
        "lost jobs push in before others", "order", MEMORY,
        "sorted(jobs, key=self._claimable_ms)", "jobs",
    ),
    Fault(
        "a paused queue hands out jobs", "pause", MEMORY,
        "if q in self._ready and q not in self._paused", "if q in self._ready",
    ),
    Fault(
        "counts are not kept", "counts", MEMORY,
        "            counts[before.state] -= 1\n", "",
    ),
    Fault(
        "counts are not kept (model)", "counts", MEMORY,
        "            counts[before.state] -= 1\n", "", MODEL,
    ),
    Fault(
        "delete leaves the counts", "counts", MEMORY,
        "        self._counts[job.queue][job.state] -= 1\n", "",
    ),
    Fault(
        "a page starts with the last job of the one before", "pages", MEMORY,
        'id > (cursor or "")', 'id >= (cursor or "")',
    ),
    Fault(
        "find takes any task", "pages", MEMORY,
        "query.task is None or job.task == query.task", "True",
    ),
    # --- Hints
    Fault(
        "an added job wakes nobody", "hints", MEMORY,
        "[self._add(job) for job in jobs]\n            self._wake()\n",
        "[self._add(job) for job in jobs]\n",
        "tests/contract/test_waiting.py",
    ),
    Fault(
        "a cancel wakes nobody", "hints", MEMORY,
        "[self._cancel(id, now_ms) for id in ids]\n            self._wake()\n",
        "[self._cancel(id, now_ms) for id in ids]\n",
        "tests/contract/test_waiting.py",
    ),
    Fault(
        "a wait overlooks leases", "hints", MEMORY,
        "        moments += [lease] if lease is not None else []\n", "",
        "tests/contract/test_waiting.py",
    ),
    Fault(
        "a cancel is told to every worker", "hints", MEMORY,
        "if job.asked and job.worker == worker and", "if job.asked and",
        "tests/contract/test_waiting.py",
    ),
    # --- Throttle, workers
    Fault(
        "asking for a token costs one", "throttle", "throttle.py",
        "return mark, -(-wait_ns // MS_NS)", "return mark + cost_ns, -(-wait_ns // MS_NS)",
    ),
    Fault(
        "all keys share a bucket", "throttle", MEMORY,
        "            self._buckets[key], wait_ms = admit(self._buckets.get(key), rate, now_ms)",
        '            self._buckets[""], wait_ms = admit(self._buckets.get(""), rate, now_ms)',
    ),
    Fault(
        "a worker that is gone is still shown", "workers", MEMORY,
        " if w.seen_ms + w.gone_after_ms > now_ms", "",
    ),
    # --- The embedded store: what it does in its own way
    Fault(
        "sqlite: no fence", "I2", STEPS, "        and standing.fence == job.fence\n", "",
    ),
    Fault(
        "sqlite: no fence (model)", "I2", STEPS,
        "        and standing.fence == job.fence\n", "", MODEL,
    ),
    Fault(
        "sqlite: no lease", "I2", STEPS,
        "        and standing.lease_until_ms > now_ms\n", "",
    ),
    Fault(
        "sqlite: a repeated settle is refused", "I1", STEPS,
        "answers.append(standing is not None and standing.settled == job.fence)",
        "answers.append(False)",
    ),
    Fault(
        "sqlite: add is not idempotent", "I1", STEPS,
        "insert or ignore into job ({_NEW})\n", "insert or replace into job ({_NEW})\n",
    ),
    Fault(
        "sqlite: jobs are handed out a second too early", "I4", STEPS,
        "and due_ms <= :now + :ahead", "and due_ms <= :now + :ahead + 1000",
    ),
    Fault(
        "sqlite: a lease that holds is taken over", "I5", STEPS,
        'and lease_until_ms <= :now"\n', 'and lease_until_ms <= :now + 1000"\n',
    ),
    Fault(
        "sqlite: an asked job is handed out after its lease", "cancel", STEPS,
        "        if job.asked:\n            lost.append((n, life.cancelled(job, now_ms=now_ms)))\n"
        "            continue\n", "",
    ),
    Fault(
        "sqlite: a cancel is forgotten by the settle", "cancel", STEPS,
        "            job = msgspec.structs.replace(job, asked=True)\n"
        "        changes", "            pass\n        changes",
    ),
    Fault(
        "sqlite: fire does not compare", "I6", STEPS,
        "where name = ? and fence = ?", "where name = ? and ? is not null",
    ),
    Fault(
        "sqlite: a schedule made anew has an old fence", "I6", STEPS,
        '_NEW_FENCE = "abs(random() / 2)"', '_NEW_FENCE = "1"',
    ),
    Fault(
        "sqlite: counts forget what moves", "looking", "stores/sqlite/schema.sql",
        "when old.state <> new.state begin", "when 0 begin",
    ),
    Fault(
        "sqlite: a paused queue is handed out", "pause", STEPS,
        " except select queue from paused", "",
    ),
    Fault(
        "sqlite: a claim is bounded by count alone", "contract", STEPS,
        '_FITS = "(total <= :bytes or total = size)"', '_FITS = ":bytes is not null"',
        BATCHES,
    ),
    Fault(
        "sqlite: an empty claim waits for the lock", "contract", SQLITE,
        "    if not steps.claimable(db, where) and", "    if False and",
        BATCHES,
    ),
    Fault(
        "sqlite: a large cancel lets nobody in", "contract", SQLITE,
        "            part = ids[len(answers) : len(answers) + BATCH]\n",
        "            part = ids[len(answers) :]\n",
        BATCHES,
    ),
    Fault(
        "sqlite: prune forgets what is not old", "prune", STEPS,
        "and ended_ms < ?\n", "and ? is not null\n",
    ),
    Fault(
        "sqlite: other processes are not heard", "waiting", "stores/sqlite/file.py",
        "            if version != self._version:\n", "            if False:\n",
    ),
    Fault(
        "sqlite: a failed step is kept in part", "I1", "stores/sqlite/file.py",
        '            db.execute("rollback")', '            db.execute("commit")',
        FILE,
    ),
    Fault(
        "sqlite: a removed file goes on acknowledging", "I1", "stores/sqlite/file.py",
        "            if self._path is not None:\n                check_in_place",
        "            if False:\n                check_in_place",
        FILE,
    ),
    Fault(
        "sqlite: a bug is told as an absence", "contract", "stores/sqlite/file.py",
        "    except _PASSING as error:", "    except apsw.Error as error:",
        FILE,
    ),
    # --- The engine, in virtual time
    Fault(
        "a job starts when it is claimed", "I4", "hand.py",
        "self._wheel.advance(now_ms)", "self._wheel.advance(now_ms + 1000)", ENGINE,
    ),
    Fault(
        "the clock runs ahead of the store", "I4", "clock.py",
        "self._base_ns = max(bases)", "self._base_ns = max(bases) + 5 * MS_NS",
        f"{ENGINE} tests/unit/test_clock.py",
    ),
    Fault(
        "the node's own clock decides", "I4", "clock.py",
        "            answer_ns = await store_time_ns()\n",
        "            await store_time_ns()\n            answer_ns = self._clock.now_ns()\n", ENGINE,
    ),
    Fault(
        "a clock that was set is not noticed", "I4", "clock.py",
        "        return jumped or ", "        return ", "tests/unit/test_clock.py",
    ),
    Fault(
        "leases are not extended", "I3", "keeper.py",
        "            await self.extend()\n", "            pass\n", ENGINE,
    ),
    Fault(
        "a lost lease does not stop the run", "I2", "keeper.py",
        "            self._stop(held, Stop.LOST)\n", "            pass\n", ENGINE,
    ),
    Fault(
        "a worker that is cut off does not know it", "I2", "keeper.py",
        "while_=lambda: any(self._holds(job) for job in jobs)", "while_=lambda: True", ENGINE,
    ),
    Fault(
        "a settle that the store missed is not repeated", "I3", "runs.py",
        "while_=lambda: self._any_lease_holds(settlements)", "while_=lambda: False", ENGINE,
    ),
    Fault(
        "poison is run again", "I5", "suspects.py",
        "return _losses(held) >= self._options.takeovers", "return False", ENGINE,
    ),
    # --- Innocent jobs beside a killer
    Fault(
        "what never started counts as killing its worker", "poison", JOB,
        "killed = count < SUSPECT_AFTER or run.started_ms is not None", "killed = True", EDGES,
    ),
    Fault(
        "what waits beside a suspect is lost with it", "poison", "suspects.py",
        "                if not held.suspect:\n"
        "                    self._runs.stop(held, Stop.RELEASE)\n",
        "                del held\n", EDGES,
    ),
    Fault(
        "a run that ends clears no suspicion", "poison", JOB,
        "        else:\n            count = 0\n    return count\n", "    return count\n", EDGES,
    ),
    Fault(
        "the store is not told that a suspect starts", "poison", "hand.py",
        "        told_ms = self.trial_ms if self.suspect else self.started_ms\n",
        "        told_ms = None\n", EDGES,
    ),
    Fault(
        "suspects are tried one after the other", "poison", "suspects.py",
        "TOGETHER = {2: 25, 3: 5}", "TOGETHER = {2: 1, 3: 1}", EDGES,
    ),
    Fault(
        "a job that ends its worker in an orderly way is innocent", "poison", JOB,
        "            count += run.error == ENDED_WITH_WORKER\n", "            pass\n", EDGES,
    ),
    Fault(
        "what happens to others pushes a loss out of the history", "poison", JOB,
        "        if losses(shorter) == losses(longer):\n", "        if False:\n",
        "tests/unit/test_losses.py",
    ),
    # --- Leases by the time of the answer, and never two runs of a job in one worker
    Fault(
        "a run that winds up is not waited for", "I2", "runs.py",
        "        elif job.id in self._alive:\n", "        elif False:\n", EDGES,
    ),
    # --- What we stopped is released
    Fault(
        "what a stopped run raised is its failure", "stop", "attempt.py",
        "        if held.stop is not None:\n", "        if held.stop is Stop.TIMEOUT:\n", EDGES,
    ),
    Fault(
        "a run that ends with its loop has failed", "stop", "attempt.py",
        "if cancelled and self._ending():", "if False:", EDGES,
    ),
    Fault(
        "an interrupt is the failure of the task that it hits", "stop", "attempt.py",
        "isinstance(error, KeyboardInterrupt) and definition.pool == \"async\"", "False", EDGES,
    ),
    # --- A clock that is set
    Fault(
        "a step of the clock is not seen", "I4", "clock.py",
        "        if not self._own:\n            return monotonic_ns + self._base_ns\n",
        "        if self._own is not None:\n            return monotonic_ns + self._base_ns\n",
        EDGES,
    ),
    Fault(
        "leases stay where they are when the clock is set", "I2", MEMORY,
        "                until_ms = job.lease_until_ms + step_ms\n",
        "                until_ms = job.lease_until_ms\n", EDGES,
    ),
    Fault(
        "a worker's own idea of its leases stays when the clock is set", "I2", "hand.py",
        "                until_ms = held.job.lease_until_ms + step_ms\n",
        "                until_ms = held.job.lease_until_ms\n", EDGES,
    ),
    Fault(
        "timeouts run on the clock that is set", "timeout", "runs.py",
        "            ends_ms = self._clock.monotonic_ms() + limit_ms\n",
        "            ends_ms = self._clock.now_ms() + limit_ms\n", EDGES,
    ),
    Fault(
        "sqlite: leases stay where they are when the clock is set", "I2", "stores/sqlite/file.py",
        "(step_ms,),\n", "(0,),\n", "tests/unit/test_own_clock.py",
    ),
    # --- Dead without having run, and other ends
    Fault(
        "a panic keeps its slot", "attempt", "attempt.py",
        "definition, args, kwargs, began))\n        except BaseException as error:",
        "definition, args, kwargs, began))\n        except Exception as error:", EDGES,
    ),
    Fault(
        "a cancelled thread job has no timeout", "timeout", "runs.py",
        "    return not held.interrupted and _STRENGTH[why] > _STRENGTH[held.stop]\n",
        "    return False\n", EDGES,
    ),
    Fault(
        "a start that is cancelled at once is waited for", "cancel", "runs.py",
        "            if held.begun:\n                self._loop.call_later(",
        "            if True:\n                self._loop.call_later(", EDGES,
    ),
    Fault(
        "what has not started is not handed back", "stop", "worker.py",
        "        for held in self._hand.unstarted():\n"
        "            self._runs.stop(held, Stop.RELEASE)\n        await", "        await", ENGINE,
    ),
    Fault(
        "a full worker hoards", "claim", "runs.py",
        "            if self.runner.has_room(held.pool):\n"
        "                self.stop(held, Stop.RELEASE)\n",
        "            if self.runner.has_room(held.pool):\n                continue\n",
        ENGINE,
    ),
    Fault(
        "nobody heeds a cancel until the next extend", "cancel", "worker.py",
        "            if held is not None:\n                self._runs.stop(held, Stop.ASKED)\n",
        "            del held\n", ENGINE,
    ),
    Fault(
        "a timeout ends nothing", "timeout", "runs.py",
        "            self.stop(held, Stop.TIMEOUT)\n", "            pass\n", ENGINE,
    ),
    Fault(
        "failures are not counted", "retry", JOB,
        "failures=job.failures + settlement.failed", "failures=job.failures",
    ),
    Fault(
        "a tick's job has an id of its own on each node", "I6", "schedule.py",
        'id = f"{schedule.name}@{_iso(tick_ms)}"',
        'id = f"{schedule.name}@{_iso(tick_ms)}{now_ms}"', SCHEDULES,
    ),
    Fault(
        "missed ticks all run", "misfire", "schedule.py",
        "fired = missed[-wanted:] if wanted else []", "fired = missed", SCHEDULES,
    ),
    Fault(
        "overlap is not looked at", "overlap", "scheduler.py",
        "        plans = await self._heed_overlaps(schedules, plans)\n", "", SCHEDULES,
    ),
    Fault(
        "overlap is judged ahead of the tick", "overlap", "schedule.py",
        "return ahead_ms if rule.overlap is Overlap.ALLOW else 0", "return ahead_ms",
        f"{SCHEDULES} -k overlap",
    ),
    Fault(
        "ticks that are due together overlap each other", "overlap", "schedule.py",
        "(fired[-1:] if alone else fired)", "fired",
        f"{SCHEDULES} -k overlap",
    ),
    Fault(
        "schedules that are due together are fired one by one", "punctuality", "scheduler.py",
        "AT_ONCE = 500", "AT_ONCE = 1",
        f"{SCHEDULES} -k thousand",
    ),
    Fault(
        "a tick that a wrong clock gave stays", "I6", "scheduler.py",
        "        return self._corrected(schedule, now_ms, ahead_ms)\n", "        return None\n",
        f"{SCHEDULES} -k clock_that_was",
    ),
    Fault(
        "the job of a tick to come counts as the one before", "overlap", "schedule.py",
        "last_ms >= tick_ms:", "False:",
        f"{SCHEDULES} -k too_early",
    ),
    Fault(
        "a schedule on its way is corrected", "I6", "schedule.py",
        "schedule.paused or next_ms == MOVING_MS or", "schedule.paused or",
        f"{TRANSFER} -k on_its_way",
    ),
    Fault(
        "a schedule that can't be read stops the others", "schedules", "scheduler.py",
        "            return self._unreadable(schedule, error)\n", "            raise\n",
        f"{SCHEDULES} -k can_not_be_read",
    ),
    Fault(
        "the note of a move is taken for a schedule", "schedules", "notes.py",
        "if each.name != NOTE]", "]",
        f"{SCHEDULES} -k note_of_a_move",
    ),
    Fault(
        "an older worker deletes a newer one's schedules", "schedules", "scheduler.py",
        "return {name for worker in workers for name in worker.schedules}", "return set()",
        f"{SCHEDULES} -k rolling",
    ),
    Fault(
        "a worker declares its schedules before it is known", "schedules", "scheduler.py",
        "        await self._contact.insist(self._until_known, while_=lambda: True)\n", "",
        f"{SCHEDULES} -k is_known_before",
    ),
    Fault(
        "a release counts as a failure", "I5", JOB,
        "        outcome=Outcome.RELEASE,\n",
        "        outcome=Outcome.RELEASE,\n        failed=True,\n",
        ENGINE,
    ),
    # --- NATS
    Fault(
        "nats: a claim does not look whether the job stands elsewhere", "I2", NATS_JOBS,
        "return [layout.step(jobs[id], layout.only_a_token(id), now_ms=now_ms)]",
        "return [layout.step(jobs[id], None, now_ms=now_ms)]",
        RACING,
    ),
    Fault(
        "nats: a step leaves the schedule behind that it came from", "I5", NATS_STEPS,
        'drop=standing.subject if scheduled else "",', 'drop="",',
        LEASES,
    ),
    Fault(
        "nats: any claim of the job may settle it", "I2", NATS_JOBS,
        "        and seen.job.fence == job.fence\n", "",
        LEASES,
    ),
    Fault(
        "nats: a repeated settle is not recognised", "I1", NATS_JOBS,
        "if seen is not None and seen.job.settled == job.fence:", "if False:",
        LEASES,
    ),
    Fault(
        "nats: a lease that is over can be extended", "I2", NATS_JOBS,
        "        and life.held(seen.job, now_ms=now_ms)\n", "",
        LEASES,
    ),
    Fault(
        "nats: tokens are not sorted by priority", "contract", NATS_READY,
        "            tokens.sort(key=_order)\n", "",
        CLAIMING,
    ),
    Fault(
        "nats: the token of a cancelled job is still counted", "contract", NATS_JOBS,
        "await self._stream.purge(standing.subject, before_seq=standing.seq + 1)\n        return",
        "pass\n        return",
        "tests/contract/test_cancelling.py",
    ),
    Fault(
        "nats: a schedule that moved is fired all the same", "I6", NATS_JOBS,
        "        move = Step(subject, check.headers, msgspec.json.encode(after))",
        '        move = Step(subject, "", msgspec.json.encode(after))',
        "tests/contract/test_firing.py",
    ),
    Fault(
        "nats: a step that was refused is taken for one that was stored", "I2", NATS_JOBS,
        "            if seq is None:\n                refused[id] = plan\n            else:\n"
        "                carried[id] = (plan, seq)\n",
        "            carried[id] = (plan, seq or 1)\n",
        RACING,
    ),
    Fault(
        "nats: answers are taken in the order in which they come", "I2", NATS_STREAM,
        'seqs[int(answer.subject.rpartition(".")[2])] = self._stored(answer)',
        "seqs[answers.index(answer)] = self._stored(answer)",
        "tests/unit/test_nats_stream.py",
    ),
    Fault(
        "nats: a cancel after the pull drops what came", "I5", NATS_READY,
        "            for source, pull in zip(sources, pulls, strict=True):\n",
        "            await asyncio.sleep(0)\n"
        "            for source, pull in zip(sources, pulls, strict=True):\n",
        NATS_RACES,
    ),
    Fault(
        "nats: a priority that nobody used is not paused", "contract", NATS_STREAM,
        "            await self.ensure_source(queue, priority)\n            name",
        "            name",
        "tests/contract/test_looking.py tests/contract/test_claiming.py",
    ),
    # --- Moving jobs, and transactions
    Fault(
        "a move forgets jobs before they are there", "I5", "transfer.py",
        "        added = await self._new.add(cancelled)\n"
        "        await self._old.delete([job.id for job in cancelled])\n",
        "        await self._old.delete([job.id for job in cancelled])\n"
        "        added = await self._new.add(cancelled)\n",
        TRANSFER,
    ),
    Fault(
        "a move does not note what is on its way", "I5", "transfer.py",
        "await self._old.put_schedule(Schedule(name=NOTE, rule=text, next_ms=None, paused=True))",
        "pass",
        TRANSFER,
    ),
    Fault(
        "a schedule goes on ticking where it was", "I6", "transfer.py",
        "        await self._old.delete_schedule(schedule.name)\n", "",
        TRANSFER,
    ),
    Fault(
        "the outbox forgets jobs before they are handed over", "I5", "outbox.py",
        "    if jobs:\n        reasons |= await _add(store, jobs)\n",
        "    if jobs:\n        await database.delete([n for n, _ in jobs])\n"
        "        reasons |= await _add(store, jobs)\n",
        TRANSACTIONS,
    ),
    Fault(
        "the outbox gives a number twice", "I5", "outbox.py",
        "n integer primary key autoincrement, job text", "n integer primary key, job text",
        OUTBOX,
    ),
    Fault(
        "an older relay deletes what it has not read", "I5", "outbox.py",
        "_BEYOND = 1_000_000", "_BEYOND = 0",
        OUTBOX,
    ),
    Fault(
        "the outbox drops what is no job", "I5", "outbox.py",
        "    added = [n for n, _ in jobs if n not in reasons]\n",
        "    added = [*reasons, *(n for n, _ in jobs)]\n",
        OUTBOX,
    ),
    Fault(
        "a job that is refused ends the relay", "I3", "outbox.py",
        "        if len(jobs) == 1:\n            return {jobs[0][0]: error}\n",
        "        if len(jobs) == 1:\n            raise\n",
        OUTBOX,
    ),
    Fault(
        "two SQLite libraries open one file", "contract", SQLITE,
        'if driver != "apsw" and is_open(self._path):', "if False:",
        TRANSACTIONS,
    ),
    Fault(
        "a store is opened on a file that sqlite3 has open", "I1", LIBRARIES_OF_SQLITE,
        "if file is not None and not _through_apsw(file) and _open_elsewhere(file):", "if False:",
        LIBRARIES,
    ),
    Fault(
        "sqlite3 opens the file of an open store", "I1", LIBRARIES_OF_SQLITE,
        "        _refuse(args[0])\n", "        pass\n",
        LIBRARIES,
    ),
    Fault(
        "sqlite3 opens the file of an open store by another name", "I1", LIBRARIES_OF_SQLITE,
        "    return [path, unquote_to_bytes(uri)]", "    return [path]",
        LIBRARIES,
    ),
    Fault(
        "an outbox is in the file of the store", "I1", "outbox.py",
        "if self._path and isinstance(store, InFile) and _same_file(self._path, store.path):",
        "if False:",
        LIBRARIES,
    ),
    Fault(
        "added jobs forget what was tried before", "contract", STEPS,
        "    if any(job.attempt for job in jobs):", "    if False:",
        "tests/contract/test_adding.py",
    ),

    # --- Child processes
    Fault(
        "a process that ends before its task began fails the task", "I5", POOL,
        "while tries < START_TRIES:", "while tries < 1:", POOLS,
    ),
    Fault(
        "a task's time runs while its process starts", "contract", POOL,
        "async with self._slots:\n", "async with self._slots:\n            began()\n", POOLS,
    ),
    Fault(
        "idle processes that were killed use up the tries", "I5", POOL,
        "tries += child.fresh", "tries += 1", POOLS,
    ),

    # --- The app in a program
    Fault(
        "a block that ends closes the store of others", "contract", "app.py",
        "if client.users or not client.unwanted:", "if not client.unwanted:",
        "tests/unit/test_api.py",
    ),
    # --- Batches: bounded by bytes, and one bad item fails alone
    Fault(
        "a batch is bounded by count alone", "contract", "batch.py",
        "if portion and total + weight > most_bytes:", "if False:",
        f"tests/unit/test_batch.py {LARGE}",
    ),
    Fault(
        "a bad item fails its whole batch", "contract", "batch.py",
        "if len(part) > 1 and failures < SPLITS and", "if False and",
        "tests/unit/test_batch.py",
    ),
    Fault(
        "a claim in PostgreSQL brings any number of bytes", "contract", "stores/postgres/steps.py",
        "where before = 0 or before + bytes <= {BATCH_BYTES}", "where true", LARGE,
    ),
    Fault(
        "a read in NATS ends with its first answer", "I1", NATS_STREAM,
        "while more and messages:", "while False:", LARGE,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What became of a fault: the test that caught it, or why it was not caught."""

    seconds: float
    caught_by: str = ""
    problem: str = ""


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the project, so that the working tree is never touched."""
    with tempfile.TemporaryDirectory(prefix="tickwheel-mutant-") as name:
        folder = Path(name)
        for part in ("src", "tests"):
            shutil.copytree(
                ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield folder


def plant(fault: Fault, folder: Path) -> None:
    path = folder / "src" / "tickwheel" / fault.file
    text = path.read_text()
    if (count := text.count(fault.old)) != 1:
        raise LookupError(f"{count} times in {fault.file}, where it should be once:\n{fault.old}")
    path.write_text(text.replace(fault.old, fault.new))


def tested(folder: Path, tests: str, store: str) -> subprocess.CompletedProcess[str]:
    """Run these tests on the copy. In their own order, so that each fault has its own test."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly",
        "--hypothesis-profile=find", f"--stores={store}", *tests.split(),
    ]  # fmt: skip
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "src"), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=TOO_LONG_S,
    )


def tried(fault: Fault) -> Result:
    start = time.monotonic()

    def result(*, caught_by: str = "", problem: str = "") -> Result:
        return Result(time.monotonic() - start, caught_by, problem)

    try:
        with copied() as folder:
            plant(fault, folder)
            run = tested(folder, fault.tests, fault.store)
    except (LookupError, OSError, subprocess.TimeoutExpired) as error:
        return result(problem=f"{error}")
    failed = re.search(r"^FAILED \S+?::(\w+)", run.stdout, re.MULTILINE)
    # Only a test that failed counts: a copy that can't even be imported proves nothing.
    if run.returncode == 1 and failed:
        return result(caught_by=failed[1])
    if run.returncode == 0:
        return result(problem="SURVIVED: no test failed")
    said = run.stdout[-600:] + run.stderr[-600:]
    return result(problem=f"pytest ended with {run.returncode}:\n{said}")


def sound(faults: list[Fault], console: Console) -> bool:
    """Whether the tests pass without a fault; if not, that they fail with one says nothing."""
    good = True
    with copied() as folder:
        for tests, store in sorted({(fault.tests, fault.store) for fault in faults}):
            run = tested(folder, tests, store)
            if run.returncode:
                console.print(f"{tests} on {store} fails without any fault:", style="bold red")
                console.print(run.stdout[-2000:] + run.stderr[-2000:], markup=False)
                good = False
    return good


def main(words: list[str]) -> int:
    console = Console()
    faults = [
        fault
        for fault in FAULTS
        if not words or any(word in f"{fault.name} {fault.file}" for word in words)
    ]
    if not sound(faults, console):
        return 1
    table = Table("fault", "breaks", "in", Column("caught by", overflow="fold"), "s")
    survivors = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for fault, result in zip(faults, pool.map(tried, faults), strict=True):
            survivors += not result.caught_by
            caught = result.caught_by or f"[bold red]{escape(result.problem)}[/]"
            table.add_row(fault.name, fault.breaks, fault.file, caught, f"{result.seconds:.1f}")
    console.print(table)
    console.print(f"{len(faults) - survivors} of {len(faults)} planted faults were caught.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
