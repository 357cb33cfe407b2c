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

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 2
TOO_LONG_S = 300

CONTRACT = "tests/contract"
MODEL = "tests/model/test_store_model.py"
MEMORY = "stores/memory.py"
JOB, SHAPE, CHANGES = "job.py", "shape.py", "changes.py"
STATEMENTS = "stores/sqlite/statements.py"
SQLITE_BROWSE, SQLITE_ROWS = "stores/sqlite/browse.py", "stores/sqlite/rows.py"
SQLITE = "stores/sqlite/store.py"
ENGINE = "tests/engine"
LIFESPAN, MIDDLEWARE = "tests/unit/test_lifespan.py", "tests/unit/test_middleware.py"
AROUND_CLI, BOX_AROUND = "tests/faces/test_around_cli.py", "tests/faces/test_testing_around.py"
KILLERS, ENDS = "tests/engine/test_killers.py", "tests/engine/test_ends.py"
COUNTS, ALERTS = "tests/engine/test_counts.py", "tests/engine/test_alerts.py"
CLOCKS = "tests/engine/test_clocks.py"
RECORDER, HISTORY = "tests/engine/test_recorder.py", "tests/unit/test_history.py"
HTTP_OVERVIEW = "tests/faces/test_http_overview.py -k limited"
HTTP_SESSION, HTTP_WATCH = "tests/faces/test_http_session.py", "tests/faces/test_http_watch.py"
HTTP_ACCESS = "tests/faces/test_http_access.py"
HTTP_WAITING = "tests/faces/test_http_waiting.py"
HTTP_CALLBACKS = "tests/faces/test_http_callbacks.py"
CALLBACK_ANSWERS = "tests/unit/test_callback_answers.py"
CALLBACK_FAULTS = "tests/faults/test_callbacks.py"
EXPIRY, PROGRESS = "tests/engine/test_expiry.py", "tests/engine/test_progress.py"
CONTEXT = "tests/unit/test_context.py"
JOURNAL, LENDING = "tests/engine/test_journal.py", "tests/engine/test_lending.py"
SCHEDULES = "tests/engine/test_schedules.py"
GATHER, TOGETHER = "engine/gathering.py", "tests/engine/test_batches.py"
SHARING, PARKING = "tests/engine/test_sharing.py", "tests/contract/test_parking.py"
NATS_JOBS, NATS_STEPS, NATS_DELIVERY, NATS_NOTIFY, NATS_STREAM = (
    f"stores/nats/{each}.py" for each in ("jobs", "steps", "delivery", "notify", "stream")
)
NATS_HEAL, NATS_CLAIMING = "stores/nats/heal.py", "stores/nats/claiming.py"
NATS_RACES = "tests/faults/test_nats_races.py"
NATS_HEALTH = "tests/faults/test_nats_health.py"
NATS_FULL, NATS_ROOM = "tests/faults/test_nats_full.py", "stores/nats/room.py"
NATS_LARGE, NATS_FITTING = "tests/faults/test_nats_large.py", "stores/nats/fitting.py"
NATS_HEALING = "tests/faults/test_nats_healing.py"
NATS_RECORDS, RECORDS = "stores/nats/records.py", "tests/contract/test_records.py"
KEYS = "tests/unit/test_keys.py"
FLAWS, SCORE = "tests/unit/test_flaws.py", "tests/unit/test_score.py"
NATS_GHOSTS = "tests/faults/test_nats_ghosts.py"
NATS_PARKING, NATS_PARKED = "tests/faults/test_nats_parking.py", "stores/nats/parked.py"
LEASES = "tests/contract/test_leases.py"
CLAIMING = "tests/contract/test_claiming.py"
PARKING = "tests/contract/test_parking.py"
RACING = "tests/contract/test_racing.py"
BROWSE = "tests/contract/test_browse.py"
LARGE = "tests/contract/test_large.py"
ENDED_JOBS = "tests/contract/test_ended_jobs.py"
RESULTS, WATCHING = "tests/unit/test_results.py", "tests/contract/test_watching_ends.py"
WAITING_CALLERS = "tests/faults/test_waiting_callers.py"
TRANSFER = "tests/faults/test_transfer.py"
TRANSACTIONS = "tests/faults/test_transactions.py"
POOL, POOLS = "engine/processes.py", "tests/unit/test_pools.py -k process"
POOL_CAPACITY = "tests/unit/test_pool_capacity.py"
VERSIONS, RELEASES = "tests/contract/test_versions.py", "tests/releases"
DJANGO = "tests/faces/test_django.py"
OUTBOX = "tests/faults/test_outbox.py"
BATCHES = "tests/unit/test_sqlite_batches.py"
FILE = "tests/unit/test_sqlite_file.py"
LIBRARIES = "tests/unit/test_sqlite_libraries.py"
REDIS_STATEMENTS, CLUSTER = "stores/redis/statements.lua", "tests/faults/test_redis_cluster.py"
REDIS_PARKING, PARKING = "tests/faults/test_redis_parking.py", "tests/contract/test_parking.py"
SEALS, SEALED, TRUST = "trust/seals.py", "tests/contract/test_sealed.py", "tests/unit/test_trust.py"
JUDGE = "tests/faults/judge/test_judge.py"
LIBRARIES_OF_SQLITE = "stores/sqlite/libraries.py"
PG_STATEMENTS, PG_CLAIMING, PG_ROWS, PG_SCHEMA = (
    f"stores/postgres/{each}.py" for each in ("statements", "claiming", "rows", "schema")
)
PG_SCHEMA_SQL = "stores/postgres/schema.sql"
PG_HOLDING = "stores/postgres/holding.py"
IDENTITY, MOVING = "tests/contract/test_identity.py", "tests/contract/test_moving.py"
REPLACING, API_IDENTITY = "tests/engine/test_replacing.py", "tests/unit/test_api_identity.py"
PG_FAULTS, PG_PLANS = "tests/faults/test_postgres.py", "tests/faults/test_postgres_plans.py"

FIELDS, REDIS_FIELDS = "tests/contract/test_fields.py", "tests/faults/test_redis_fields.py"

PG_PARKING, PARKING = "tests/faults/test_postgres_parking.py", "tests/contract/test_parking.py"

BENCH, BENCH_CLI = "tests/unit/test_bench.py", "tests/faces/test_bench_cli.py"


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
        """The store whose tests should notice. What all stores share is tried on the plainest,
        unless the fault's name begins with that of another."""
        for name in ("sqlite", "nats", "postgres", "redis"):
            if name in self.file or self.name.startswith(f"{name}:"):
                return name
        return "memory"


FAULTS = [
    # --- Identity and moves
    Fault(
        "an update of a running job is lost", "identity", JOB,
        "    if changes.next is not None:\n        return renewed(after",
        "    if False:\n        return renewed(after", IDENTITY,
    ),
    Fault(
        "a repeated request is taken for a new one", "I1", CHANGES,
        "if each.number == request:", "if False:", IDENTITY,
    ),
    Fault(
        "a running job is replaced at once", "identity", CHANGES,
        "    if _held(job, now_ms, held_now):\n        noted",
        "    if False:\n        noted", IDENTITY,
    ),
    Fault(
        "what follows a lost job is lost with it", "identity", JOB,
        "        if job.told:\n            job = taken_back(job)\n",
        "        if False:\n            job = taken_back(job)\n", IDENTITY,
    ),
    Fault(
        "a cancel leaves what follows", "cancel", JOB,
        "    if changes is None:\n        changes = settled_changes(job.changes)\n",
        "    if changes is None:\n        changes = job.changes\n", IDENTITY,
    ),
    Fault(
        "a renewed job keeps its failures", "identity", JOB,
        "        failures=0,\n        takeovers=0,\n        worker=job.worker,\n",
        "        failures=job.failures,\n        takeovers=0,\n        worker=job.worker,\n",
        IDENTITY,
    ),
    Fault(
        "a job moves although it has started", "move", JOB,
        "moves = changes.move is not None and settlement.started_ms is None",
        "moves = changes.move is not None", MOVING,
    ),
    Fault(
        "a job that is known to have started is moved", "move", CHANGES,
        "(job.cancel_requested or job.started_ms is not None)", "job.cancel_requested", MOVING,
    ),
    Fault(
        "an expiry stays where a job has left", "move", JOB,
        "    if expires_ms is not None and expires_ms <= due_ms:\n", "    if False:\n", MOVING,
    ),
    Fault(
        "a holder is told again and again", "hints", "stores/waiting.py",
        "if found.items() - known.items() else None", "if found else None", IDENTITY,
    ),
    Fault(
        "sqlite: a finished job forgets what follows", "identity", SQLITE_ROWS,
        "new.value ->> 0\n      and state = 'running' and lease_until_ms > :now and told = 0",
        "new.value ->> 0\n      and state = 'running' and lease_until_ms > :now", IDENTITY,
    ),
    Fault(
        "sqlite: a job that moves is counted in its old queue", "counts",
        "stores/sqlite/schema.sql",
        "when old.queue <> new.queue and old.state = new.state begin", "when false begin", MOVING,
    ),
    Fault(
        "postgres: a finished job forgets what follows", "identity", PG_HOLDING,
        "lease_until_ms > %(now)s and not told\"\"\"\n\n\nasync def settle(",
        "lease_until_ms > %(now)s\"\"\"\n\n\nasync def settle(", IDENTITY,
    ),
    Fault(
        "postgres: a settled job forgets what follows", "identity", PG_HOLDING,
        "lease_until_ms > %(now)s and not told\n", "lease_until_ms > %(now)s\n", IDENTITY,
    ),
    Fault(
        "redis: a settled job forgets what follows", "identity", REDIS_STATEMENTS,
        "and tonumber(upto) > now and (asked == '2' or asked == '3') then\n      answers[i] = 'n'",
        "and tonumber(upto) > now and false then\n      answers[i] = 'n'", IDENTITY,
    ),
    Fault(
        "redis: a change is written whatever has happened since", "identity",
        "stores/redis/changing.lua", "if mark_of(record, old) ~= marks[i] then", "if false then",
        IDENTITY,
    ),
    Fault(
        "redis: a replaced job is found by its old meta", "fields", "stores/redis/changing.lua",
        "if metas[i] and metas[i] ~= meta then", "if false then", REDIS_FIELDS,
    ),
    Fault(
        "nats: the holder of a replaced job is not told", "identity", NATS_STEPS,
        "kinds = ASKED if job.cancel_requested or job.told else RUNNING",
        "kinds = ASKED if job.cancel_requested else RUNNING", IDENTITY,
    ),
    Fault(
        "nats: a job moves to a queue that nobody reads", "move", "stores/nats/changing.py",
        "        places.add((there.queue, there.priority))\n", "        pass\n", MOVING,
    ),
    Fault(
        "a worker starts what has moved", "I4", "engine/chores.py",
        "        self._runs.stop(held, Stop.RELEASE)\n        return True\n",
        "        return True\n", REPLACING,
    ),
    Fault(
        "a run goes on as what has replaced it", "identity", "engine/hand.py",
        "return before.told or len(counts) > 1", "return False", REPLACING,
    ),
    Fault(
        "a call that got no answer is a new one each time", "I1", "client.py",
        "            except StoreUnavailable:\n                await asyncio.sleep(pause_s)\n",
        "            except ZeroDivisionError:\n                pass\n", API_IDENTITY,
    ),
    Fault(
        "a job replaces another in a transaction", "API", "task.py",
        "if self._if_exists is not IfExists.KEEP:\n            raise BadConfig(",
        "if False:\n            raise BadConfig(", API_IDENTITY,
    ),
    # --- What `tickwheel verify` finds
    Fault(
        "verify doesn't see early runs", "verify", "operate/flaws.py",
        "max(run.due_ms - run.started_ms, 0)", "0", FLAWS,
    ),
    Fault(
        "verify doesn't see late runs", "verify", "operate/flaws.py",
        "late_ms > span.late_after_ms", "late_ms > 10 * span.late_after_ms", FLAWS,
    ),
    Fault(
        "verify takes a takeover for a retry", "verify", "operate/flaws.py",
        "CHOSEN = (Outcome.RETRY, ", "CHOSEN = (Outcome.LOST, Outcome.RETRY, ", FLAWS,
    ),
    Fault(
        "verify takes a rerun for a double", "verify", "operate/flaws.py",
        "if before.outcome in _ENDS and put_back:", "if False:", FLAWS,
    ),
    Fault(
        "verify doesn't see what was never taken over", "verify", "operate/flaws.py",
        "span.past(job.lease_until_ms or 0)", "False", FLAWS,
    ),
    Fault(
        "verify doesn't see ticks without a job", "verify", "operate/ticks.py",
        "        if tick_ms in seen:", "        if tick_ms in seen or True:", FLAWS,
    ),
    Fault(
        "verify reads one page", "verify", "operate/verify.py",
        "            if cursor is None:\n", "            if True:\n",
        "tests/contract/test_verify.py",
    ),
    Fault(
        "claims don't come together", "ahead", "stores/waiting.py",
        "min(due_ms + slack_ms, until_ms)", "min(due_ms, until_ms)", "tests/unit/test_waiters.py",
    ),
    Fault(
        "idle workers claim every few seconds", "ahead", "engine/chores.py",
        "max(IDLE_MS, IDLE_SLACKS * slack_of(store.ahead_ms))", "IDLE_MS",
        "tests/engine/test_worker.py -k asked_less",
    ),
    Fault(
        "a wait with slack doesn't look again", "ahead", "stores/waiting.py",
        "                    if not slack_ms:\n                        return\n",
        "                    return\n", "tests/unit/test_waiters.py",
    ),
    Fault(
        "a wait with slack is not told of what is due at once", "ahead", "stores/redis/store.py",
        "ripe_ms = now_ms - slack_ms", "ripe_ms = now_ms", "tests/faults/test_ahead.py -k redis",
    ),
    Fault(
        "a contest doesn't see doubles", "score", "score/contest.py",
        "for pair in second_runs(mine)]", "for pair in second_runs(mine[:1])]", SCORE,
    ),
    Fault(
        "a contest takes any double for a kill's", "score", "score/contest.py",
        "before.instance in killed_ms for", "True for", SCORE,
    ),
    Fault(
        "verify exits with 0 whatever it finds", "verify", "cli/verify.py",
        "OK if found.well else FAILURE", "OK", "tests/faces/test_verify_cli.py",
    ),
    # --- What is measured
    Fault(
        "the worst peer is compared with", "honest figures", "bench/figures.py",
        "(max if reading.measure.more else min)(peers)",
        "(min if reading.measure.more else max)(peers)", BENCH,
    ),
    Fault(
        "an early start counts as punctual", "honest figures", "bench/measure.py",
        "[abs(each) for each in late]", "[max(each, 0.0) for each in late]", BENCH,
    ),
    Fault(
        "the page leaves out where a peer is better", "honest figures", "bench/page.py",
        "if each.factor < NOISE and", "if each.factor < 0 and", BENCH,
    ),
    Fault(
        "a peer that fails ends the run", "one failure costs one figure", "bench/run.py",
        "except SubjectFailed as failure:", "except ZeroDivisionError as failure:",
        f"{BENCH_CLI} -k fails_is_noted",
    ),
    Fault(
        "a worker that runs nothing is waited for forever", "limit", "bench/processes.py",
        "if clock.monotonic_ns() > deadline:", "if False:",
        f"{BENCH_CLI} -k does_nothing",
    ),
    # --- Around a task: expiry, progress, meta
    Fault(
        "a job is started after it expired", "expiry", "engine/runs.py",
        "        elif job.expires_ms is not None and job.expires_ms <= now_ms:\n",
        "        elif False:\n", EXPIRY,
    ),
    Fault(
        "a job that is held expires only when it gets a slot", "expiry", "engine/runs.py",
        "            self._expire_unstarted(now_ms)\n", "            pass\n", EXPIRY,
    ),
    Fault(
        "a worker remembers jobs that can no longer expire", "limit", "engine/runs.py",
        "        if held.job.expires_ms is not None:\n            self._expiries.remove(held)\n",
        "", EXPIRY,
    ),
    Fault(
        "a job waits for a retry that can't be", "expiry", "retry.py",
        "min(due_ms, job.expires_ms)", "due_ms", EXPIRY,
    ),
    Fault(
        "a job that is rerun expires at once", "expiry", JOB,
        "        expires_ms=None,\n", "", ENDED_JOBS,
    ),
    Fault(
        "the jobs of schedules don't expire", "expiry", "engine/scheduler.py",
        "expires_ms=job.due_ms + task.expires_ms", "expires_ms=None", EXPIRY,
    ),
    Fault(
        "progress waits for the lease", "progress", "engine/leases.py",
        "            self._news.set()\n            return\n", "            return\n", PROGRESS,
    ),
    Fault(
        "the progress of a thread waits for the lease", "progress", "engine/leases.py",
        "            self._loop.call_soon_threadsafe(self._news.set)\n", "            pass\n",
        f"{CONTEXT} -k says",
    ),
    Fault(
        "progress costs a call each time", "progress", "engine/leases.py",
        "                await asyncio.sleep(max(early_s, 0))\n", "", PROGRESS,
    ),
    Fault(
        "news of progress keeps other leases waiting", "I3", "engine/leases.py",
        "            async with asyncio.timeout_at(end_s):\n",
        "            async with asyncio.timeout_at(end_s + PROGRESS_S):\n", PROGRESS,
    ),
    Fault(
        "a child speaks for a job that has ended", "progress", POOL,
        "            if not self._over and progress != self._told:\n",
        "            if progress != self._told:\n", f"{CONTEXT} -k child",
    ),
    Fault(
        "the deadline of a child counts from the start of its process", "context", POOL,
        "self.deadline_ms = deadline_ms + waited_ms", "self.deadline_ms = deadline_ms",
        f"{CONTEXT} -k child",
    ),
    Fault(
        "hooks win over the caller", "meta", "task.py",
        "{**inherited, **added, **own}", "{**own, **inherited, **added}",
        f"{CONTEXT} -k hook",
    ),
    Fault(
        "hooks are called elsewhere than their caller", "meta", "task.py",
        "        if self._meta_is_added():\n            # Here",
        "        if False:\n            # Here",
        f"{CONTEXT} -k hook",
    ),
    # --- Several apps on one store
    Fault(
        "a job of an unknown task is only released", "sharing", "engine/runs.py",
        "self.settle(held, park(held.job, ended_ms=now_ms))",
        "self.settle(held, release(held.job, ended_ms=now_ms))", SHARING,
    ),
    Fault(
        "nats: a claim parks a job of a known task", "sharing", NATS_CLAIMING,
        "if not tasks or job.task in tasks or mine.state is not State.RUNNING:",
        "if not tasks or mine.state is not State.RUNNING:", PARKING,
    ),
    Fault(
        "nats: nobody is told what a claim parked", "sharing", "stores/nats/shard.py",
        "            self.notify_parked([job for job in some if job.parked], seqs)\n", "",
        f"{NATS_PARKING} -k is_told",
    ),
    Fault(
        "a parked job is handed to anybody", "sharing", MEMORY,
        " and (task is None or task in tasks)", "", PARKING,
    ),
    Fault(
        "a parked job wakes nobody", "sharing", MEMORY,
        "        for heap in self._open(queues, tasks):\n",
        "        for heap in self._open(queues, ()):\n", PARKING,
    ),
    Fault(
        "parking clears what counts against a killer", "sharing", JOB,
        "        elif run.outcome not in (Outcome.PARK, Outcome.OTHER):\n",
        "        elif run.outcome is not Outcome.OTHER:\n", MODEL,
    ),
    Fault(
        "a worker that parks a job counts as one that it ended", "sharing", JOB,
        "        elif run.outcome is Outcome.RELEASE:\n",
        "        elif run.outcome in (Outcome.RELEASE, Outcome.PARK):\n", SHARING,
    ),
    Fault(
        "an app deletes the schedules of another", "sharing", "engine/scheduler.py",
        "if rule.app is None else rule.app == self.app", "if rule.app is None else True", SHARING,
    ),
    Fault(
        "a schedule of a deleted function ticks for ever", "sharing", "engine/scheduler.py",
        "rule.task in self._tasks.names if rule.app is None else rule.app == self.app",
        "rule.task in self._tasks.names", SHARING,
    ),
    Fault(
        "two apps overwrite each other's schedule", "sharing", "engine/scheduler.py",
        "if owner not in (None, rule.app) and (held is None or (owner, name) in held):",
        "if False:", SHARING,
    ),
    Fault(
        "an app takes the schedule of one that is being restarted", "sharing",
        "engine/scheduler.py", "and (held is None or (owner, name) in held):",
        "and held is not None and (owner, name) in held:", SHARING,
    ),
    Fault(
        "a renamed app never gets its schedules", "sharing", "engine/scheduler.py",
        "and (held is None or (owner, name) in held):", "and True:", SHARING,
    ),
    # --- I1: whole or not at all, and repeatable
    Fault(
        "add is not idempotent", "I1", MEMORY,
        "        if job.id in self._jobs:\n            return False\n", "",
    ),
    Fault(
        "a repeated settle is refused", "I1", JOB,
        "        if claim is not None and claim.settled == job.fence:\n", "        if False:\n",
    ),
    Fault(
        "a repeated settle is refused (model)", "I1", JOB,
        "        if claim is not None and claim.settled == job.fence:\n", "        if False:\n",
        MODEL,
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
        "a repeated cancel ends the job again", "I1", JOB,
        "    if job.state.ended:\n        return CancelOutcome.TOO_LATE, job\n", "",
    ),
    # --- I2: fenced
    Fault("no fence", "I2", JOB, "and claim.fence == job.fence and", "and"),
    Fault("no fence (model)", "I2", JOB, "and claim.fence == job.fence and", "and", MODEL),
    Fault(
        "no lease in settle", "I2", JOB,
        "        elif claim is not None and holds(job, claim, now_ms=now_ms):\n",
        "        elif claim is not None and claim.fence == job.fence:\n",
    ),
    Fault(
        "no lease in extend", "I2", MEMORY,
        "        if current is None or not life.holds(job, current, now_ms=now_ms):\n",
        "        if current is None or current.fence != job.fence or current.state.ended:\n",
    ),
    Fault(
        "all claims share a fence", "I2", "ids.py",
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
        "claim.lease_until_ms > now_ms", "claim.lease_until_ms >= now_ms",
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
        "            self._collect(now_ms)\n            claimed =",
        "            now_ms += self.ahead_ms // 2\n"
        "            self._collect(now_ms)\n            claimed =",
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
        "        failures=0,\n        takeovers=0,\n        ended_ms=None,\n",
        "        takeovers=0,\n        ended_ms=None,\n",
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
        "                fence=next(self._order) + 1,\n            )\n            self._waiters",
        "            )\n            self._waiters",
    ),
    Fault(
        "the fence of a schedule starts over", "I6", MEMORY,
        "            stored = msgspec.structs.replace(schedule, fence=next(self._order) + 1)\n",
        "            before = self._schedules.get(schedule.name)\n"
        "            fence = before.fence + 1 if before else 1\n"
        "            stored = msgspec.structs.replace(schedule, fence=fence)\n",
        "tests/contract/test_firing.py -k deleted_and_put",
    ),
    Fault(
        "replace does not compare", "I6", MEMORY,
        "if current is None or schedule.fence != current.fence:", "if current is None:",
    ),
    Fault(
        "the zone of an interval is not checked", "schedules", "schedule.py",
        "        zone_of(rule.tz)  #", "        pass  #", SCHEDULES,
    ),
    Fault(
        "a schedule is put that can't be read", "schedules", "schedules.py",
        "    if not 0 <= ms <= MOVING_MS:\n", "    if False:\n", SCHEDULES,
    ),
    Fault(
        "all keywords of a task are given the tick", "schedules", "schedules.py",
        "TICK in definition.arguments.single", "TICK in definition.arguments.names", SCHEDULES,
    ),
    Fault(
        "a worker that starts undoes a pause", "schedules", "engine/scheduler.py",
        "            if await self._store.replace_schedule(fresh):\n",
        "            if await self._store.put_schedule(fresh):\n", SCHEDULES,
    ),
    Fault(
        "a pause undoes what others do to the schedule", "schedules", "schedules.py",
        "            if await client.store.replace_schedule(change(await self._known(name))):\n"
        "                return\n",
        "            await client.store.put_schedule(change(await self._known(name)))\n"
        "            return\n", SCHEDULES,
    ),
    # --- Cancel
    Fault(
        "an asked job waits again", "cancel", JOB,
        "    if job.cancel_requested and state is State.WAITING:\n"
        "        state = State.CANCELLED\n", "",
    ),
    Fault(
        "an asked job is handed out after its lease", "cancel", JOB,
        "        if job.cancel_requested:\n", "        if False:\n",
    ),
    Fault(
        "an asked job is handed out after its lease (model)", "cancel", JOB,
        "        if job.cancel_requested:\n", "        if False:\n",
        MODEL,
    ),
    Fault(
        "cancel ends a job in a worker's hand", "cancel", JOB,
        "    if held(job, now_ms=now_ms) if held_now is None else held_now:\n", "    if False:\n",
    ),
    Fault(
        "cancel asks a worker that is lost", "cancel", JOB,
        "    if held(job, now_ms=now_ms) if held_now is None else held_now:\n",
        "    if job.state is State.RUNNING:\n",
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
        "queue in queues and queue not in self._paused and", "queue in queues and",
    ),
    Fault(
        "counts are not kept", "counts", MEMORY,
        "            self._counts[before.queue][before.state] -= 1\n", "            pass\n",
    ),
    Fault(
        "counts are not kept (model)", "counts", MEMORY,
        "            self._counts[before.queue][before.state] -= 1\n", "            pass\n", MODEL,
    ),
    Fault(
        "delete leaves the counts", "counts", MEMORY,
        "        self._counts[job.queue][job.state] -= 1\n", "",
    ),
    Fault(
        "a page starts with the last job of the one before", "pages", MEMORY,
        "or place(job) > after", "or place(job) >= after",
    ),
    Fault(
        "find takes any task", "pages", MEMORY,
        "query.task is None or job.task == query.task", "True",
    ),
    # --- Hints
    Fault(
        "an added job wakes nobody", "hints", MEMORY,
        "[self._add(job) for job in jobs]\n            self._waiters.notify()\n",
        "[self._add(job) for job in jobs]\n",
        "tests/contract/test_waiting.py",
    ),
    Fault(
        "a cancel wakes nobody", "hints", MEMORY,
        "[self._cancel(id, now_ms) for id in ids]\n            self._waiters.notify()\n",
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
        "            and job.worker == worker\n", "",
        "tests/contract/test_waiting.py",
    ),
    Fault(
        "what happens during a look is missed", "hints", "stores/waiting.py",
        "                if end <= loop.time():\n",
        "                waiter.notified.clear()\n                if end <= loop.time():\n",
        "tests/unit/test_waiters.py",
    ),
    Fault(
        "a notification does not reach other threads", "hints", "stores/waiting.py",
        "            self._loop.call_soon_threadsafe(self.notified.set)\n",
        "            pass\n",
        "tests/unit/test_waiters.py",
    ),
    # --- Throttle, workers
    Fault(
        "asking for a token costs one", "throttle", "limit.py",
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
    Fault("sqlite: no fence", "I2", JOB, "and claim.fence == job.fence and", "and"),
    Fault("sqlite: no fence (model)", "I2", JOB, "and claim.fence == job.fence and", "and", MODEL),
    Fault(
        "sqlite: no lease", "I2", JOB,
        "claim.fence == job.fence and held(claim, now_ms=now_ms)\n", "claim.fence == job.fence\n",
    ),
    Fault(
        "sqlite: a repeated settle is refused", "I1", JOB,
        "        if claim is not None and claim.settled == job.fence:\n", "        if False:\n",
    ),
    Fault(
        "sqlite: the last of two settlements in a batch counts", "I1", JOB,
        "claim = changes.get(job.id) or claims.get(job.id)", "claim = claims.get(job.id)",
        LEASES,
    ),
    Fault(
        "leases that are new are extended with the others", "cost", "engine/leases.py",
        "- self._lease_ms // (2 * PARTS)", "", "tests/engine/test_keeper.py",
    ),
    Fault(
        "sqlite: a lost lease may be finished", "I2", SQLITE_ROWS,
        "fence = new.value ->> 0\n      and state = 'running' and lease_until_ms > :now",
        "fence = new.value ->> 0\n      and state = 'running'", LEASES,
    ),
    Fault(
        "sqlite: lost leases may be finished together", "I2", SQLITE_ROWS,
        "fence = kind.fence\n      and state = 'running' and lease_until_ms > :now",
        "fence = kind.fence\n      and state = 'running'", LEASES,
    ),
    Fault(
        "sqlite: whoever held a job last may finish it", "I2", SQLITE_ROWS,
        "where job.id = new.key and job.fence = new.value ->> 0\n", "where job.id = new.key\n",
        LEASES,
    ),
    Fault(
        "sqlite: whoever held jobs last may finish many", "I2", SQLITE_ROWS,
        "where job.id = new.key and job.fence = kind.fence\n", "where job.id = new.key\n", LEASES,
    ),
    Fault(
        "sqlite: many runs that end alike have one due time", "contract", SQLITE_ROWS,
        "history = kind.before || due_ms || kind.after",
        "history = kind.before || ended_ms || kind.after", LEASES,
    ),
    Fault(
        "sqlite: a run that ended well is written over another outcome", "I1", STATEMENTS,
        "        first.setdefault(each.job.id, each)\n", "        first[each.job.id] = each\n",
        LEASES,
    ),
    Fault(
        "sqlite: add is not idempotent", "I1", STATEMENTS,
        "insert or ignore into job ({columns})", "insert or replace into job ({columns})",
    ),
    Fault(
        "sqlite: jobs are handed out a second too early", "I4", SQLITE_BROWSE,
        "              and due_ms <= :now + :ahead",
        "              and due_ms <= :now + :ahead + 1000",
    ),
    Fault(
        "sqlite: a lease that holds is taken over", "I5", SQLITE_BROWSE,
        'and lease_until_ms <= :now"\n', 'and lease_until_ms <= :now + 1000"\n',
    ),
    Fault(
        "sqlite: an asked job is handed out after its lease", "cancel", JOB,
        "        if job.cancel_requested:\n", "        if False:\n",
    ),
    Fault(
        "sqlite: a cancel is forgotten by the settle", "cancel", STATEMENTS,
        "fence, lease_until_ms, asked, settled, json(changes))",
        "fence, lease_until_ms, 0, settled, json(changes))",
    ),
    Fault(
        "sqlite: fire does not compare", "I6", STATEMENTS,
        "ifnull(?, last_id), fence = {_NEW_FENCE}\n           where name = ? and fence = ?",
        "ifnull(?, last_id), fence = {_NEW_FENCE}\n           where name = ? and ? is not null",
    ),
    Fault(
        "sqlite: replace does not compare", "I6", STATEMENTS,
        "last_id = ?, fence = {_NEW_FENCE}\n           where name = ? and fence = ?",
        "last_id = ?, fence = {_NEW_FENCE}\n           where name = ? and ? is not null",
        "tests/contract/test_firing.py",
    ),
    Fault(
        "sqlite: a schedule made anew has an old fence", "I6", STATEMENTS,
        '_NEW_FENCE = "abs(random() / 2)"', '_NEW_FENCE = "1"',
    ),
    Fault(
        "sqlite: counts forget what moves", "looking", "stores/sqlite/schema.sql",
        "when old.state <> new.state begin", "when 0 begin",
    ),
    Fault(
        "sqlite: a paused queue is handed out", "pause", SQLITE_BROWSE,
        " except select queue from paused", "",
    ),
    Fault(
        "sqlite: a claim is bounded by count alone", "contract", SQLITE_ROWS,
        'FITS = "(total <= :bytes or total = size)"', 'FITS = ":bytes is not null"',
        BATCHES,
    ),
    Fault(
        "sqlite: an empty claim waits for the lock", "contract", SQLITE,
        "    if not some and", "    if False and",
        BATCHES,
    ),
    Fault(
        "sqlite: a parked job is handed to a worker that does not know its task", "parked",
        SQLITE_BROWSE,
        "where task in (select value from json_each(:tasks))", "where task is not null",
        PARKING,
    ),
    Fault(
        "sqlite: a parked job is handed out before its time", "I4", SQLITE_BROWSE,
        "and priority = level.rank and due_ms <= :now + :ahead",
        "and priority = level.rank and :now + :ahead",
        BATCHES,
    ),
    Fault(
        "sqlite: a claim reads all parked jobs of a task to find the next task", "contract",
        "stores/sqlite/lanes.py",
        "and task > line.task)", "and +task > line.task)",
        BATCHES,
    ),
    Fault(
        "sqlite: parked jobs of queues that are paused or not served are handed out", "pause",
        SQLITE_BROWSE, 'parked_lines("queue in mine")', 'parked_lines("queue is not null")',
        PARKING,
    ),
    Fault(
        "sqlite: a worker that waits does not hear of parked jobs", "parked", SQLITE_BROWSE,
        "select iif({ANY_PARKED}, (", "select iif(0, (",
        PARKING,
    ),
    Fault(
        "sqlite: parked jobs are on no page", "pages", SQLITE_BROWSE,
        "    parked=True,\n", "",
        PARKING,
    ),
    Fault(
        "sqlite: parked jobs are not counted", "looking", SQLITE_BROWSE,
        "select queue, {STATE}, sum(jobs) from tally where jobs > 0",
        "select queue, state, sum(jobs) from tally where jobs > 0 and state <> 'parked'",
        PARKING,
    ),
    Fault(
        "sqlite: the size of a batch forgets tracebacks", "contract", SQLITE_ROWS,
        "octet_length(error) + ifnull(octet_length(traceback), 0)", "octet_length(error)",
        BATCHES,
    ),
    Fault(
        "sqlite: a large cancel lets nobody in", "contract", SQLITE,
        "            part = ids[len(answers) : len(answers) + BATCH]\n",
        "            part = ids[len(answers) :]\n",
        BATCHES,
    ),
    Fault(
        "sqlite: a page starts with the last job of the one before", "pages", "stores/pager.py",
        'else (">", "asc")', 'else (">=", "asc")',
        BROWSE,
    ),
    Fault(
        "sqlite: a page by time ends with the first lane that is full", "pages",
        "stores/sqlite/times.py",
        "order by {ms} {order}, job.n {order} limit :limit)", "limit :limit)",
        "tests/contract/test_times.py",
    ),
    Fault(
        "sqlite: a job at the end of a slot counts for two", "pages",
        "stores/sqlite/times.py",
        "and {ms} < :start + (slot + 1) * :width))", "and {ms} <= :start + (slot + 1) * :width))",
        "tests/contract/test_times.py",
    ),
    Fault(
        "redis: a page by time goes on behind all jobs of the moment", "pages",
        "stores/redis/statements.lua",
        "if after then at = index_after(key, backwards, size, after[1], after[2])",
        "if after then at = call('ZCOUNT', key, '-inf', after[1])",
        "tests/contract/test_times.py",
    ),
    Fault(
        "a text is found in what is hidden from the key", "redaction", "http/redaction.py",
        "        document = self.document(job, caller)\n        return",
        "        document = job_document(job)\n        return",
        "tests/faces/test_http_search.py -k hidden",
    ),
    Fault(
        "another site writes with the cookie of a session", "sessions", "http/api.py",
        "if operation.writes and session_token(request) is not None:", "if False:",
        f"{HTTP_SESSION} -k elsewhere",
    ),
    Fault(
        "dashboards on one host share a cookie", "sessions", "http/access.py",
        "hexdigest()[:8]", "hexdigest()[:0]",
        f"{HTTP_SESSION} -k disturb",
    ),
    Fault(
        "a brief list has everything", "lists", "http/jobs.py",
        "    if brief:\n", "    if False:\n",
        "tests/faces/test_http_search.py -k brief",
    ),
    Fault(
        "a session does not end", "sessions", "operate/sessions.py",
        "if found is None or int(found[1]) <= self._client.clock.now_ms():", "if found is None:",
        f"{HTTP_SESSION} -k lifetime",
    ),
    Fault(
        "a session outlives its key", "sessions", "operate/keys.py",
        "if stored.expires_ms is not None and stored.expires_ms <= self._client.clock.now_ms():",
        "if False:",
        f"{HTTP_SESSION} -k with_its_key",
    ),
    Fault(
        "a stream reads what its key may not see", "watching", "http/api.py",
        "                _check_scope(caller, operation)\n", "",
        f"{HTTP_WATCH} -k may_see",
    ),
    Fault(
        "a stream outlives its key", "watching", "http/watch.py",
        "                    raise _Ended from None\n", "                    pass\n",
        f"{HTTP_WATCH} -k revoked",
    ),
    Fault(
        "a server that stops waits for its streams", "watching", "http/server.py",
        "            stopping.set()\n", "",
        f"{HTTP_WATCH} -k stops",
    ),
    Fault(
        "a closed stream is counted for good", "watching", "http/watch.py",
        "            self._leave()\n", "            pass\n",
        f"{HTTP_WATCH} -k goes_away",
    ),
    Fault(
        "a number that became another kind of number is not told", "watching", "http/patches.py",
        "type(old) is type(new) and repr(old) == repr(new)", "old == new",
        "tests/unit/test_patches.py",
    ),
    Fault(
        "sqlite: a cursor of another queue is taken", "pages", "stores/pager.py",
        '            or (columns[0] == "queue" and self._query.queue not in (None, key[0]))\n', "",
        BROWSE,
    ),
    Fault(
        "sqlite: prune forgets what is not old", "prune", STATEMENTS,
        "and ended_ms < ?\n", "and ? is not null\n",
    ),
    Fault(
        "sqlite: other processes are not heard", "waiting", "stores/sqlite/notify.py",
        "            if version != self._version:\n", "            if False:\n",
    ),
    Fault(
        "sqlite: the file of another program is changed", "opening", "stores/sqlite/file.py",
        "        _refuse_foreign(db, path)\n", "",
        FILE,
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
        "a job that is not due after all starts", "I4", "engine/runs.py",
        "elif job.due_ms > now_ms:", "elif False:", CLOCKS,
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
        "leases are not extended", "I3", "engine/leases.py",
        "                await self.extend(self._begun())\n", "                pass\n", ENGINE,
    ),
    Fault(
        "a lost lease does not stop the run", "I2", "engine/leases.py",
        "            self._stop(held, Stop.LOST)\n", "            pass\n", ENGINE,
    ),
    Fault(
        "a worker that is cut off does not know it", "I2", "engine/leases.py",
        "lambda: not any(self._holds(job) for job in jobs)", "lambda: False", ENGINE,
    ),
    Fault(
        "a settle that the store missed is not repeated", "I3", "engine/runs.py",
        "lambda: not self._any_lease_holds(settlements)", "lambda: True", ENGINE,
    ),
    Fault(
        "poison is run again", "I5", "engine/suspects.py",
        "return _losses(held) >= self._options.takeovers", "return False", ENGINE,
    ),
    # --- Innocent jobs beside a killer
    Fault(
        "what never started counts as killing its worker", "poison", JOB,
        "killed = count < SUSPECT_AFTER or run.started_ms is not None", "killed = True", KILLERS,
    ),
    Fault(
        "what waits beside a suspect is lost with it", "poison", "engine/suspects.py",
        "                if not held.suspect:\n"
        "                    self._runs.stop(held, Stop.RELEASE)\n",
        "                del held\n", KILLERS,
    ),
    Fault(
        "a run that ends clears no suspicion", "poison", JOB,
        "            count = 0\n    return count\n",
        "            pass\n    return count\n", KILLERS,
    ),
    Fault(
        "the store is not told that a suspect starts", "poison", "engine/hand.py",
        "        told_ms = self.trial_ms if self.suspect else self.started_ms\n",
        "        told_ms = None\n", KILLERS,
    ),
    Fault(
        "suspects are tried one after the other", "poison", "engine/suspects.py",
        "TOGETHER = {2: 25, 3: 5}", "TOGETHER = {2: 1, 3: 1}", KILLERS,
    ),
    Fault(
        "a job that ends its worker in an orderly way is innocent", "poison", JOB,
        "            count += run.error == ENDED_WITH_WORKER\n", "            pass\n", KILLERS,
    ),
    Fault(
        "what happens to others pushes a loss out of the history", "poison", JOB,
        "        if losses(shorter) == losses(longer):\n", "        if False:\n",
        "tests/unit/test_losses.py",
    ),
    # --- Leases by the time of the answer, and never two runs of a job in one worker
    Fault(
        "a run that winds up is not waited for", "I2", "engine/runs.py",
        "        elif job.id in self._alive:\n", "        elif False:\n", CLOCKS,
    ),
    # --- What we stopped is released
    Fault(
        "what a stopped run raised is its failure", "stop", "engine/attempt.py",
        "        if held.stop is not None:\n", "        if held.stop is Stop.TIMEOUT:\n", ENDS,
    ),
    Fault(
        "a run that ends with its loop has failed", "stop", "engine/attempt.py",
        "if cancelled and self._ending():", "if False:", ENDS,
    ),
    Fault(
        "an interrupt is the failure of the task that it hits", "stop", "engine/attempt.py",
        "isinstance(error, KeyboardInterrupt) and definition.pool == \"async\"", "False", ENDS,
    ),
    # --- Lifespans and middleware
    Fault(
        "a worker starts without its lifespan", "lifespan", "app.py",
        "None if lifespan is None else await lifespan.value()", "None", LIFESPAN,
    ),
    Fault(
        "a lifespan is closed while jobs are running", "lifespan", "app.py",
        "                            yield worker\n",
        "                            yield worker\n"
        "                            if lifespan is not None:\n"
        "                                await lifespan.close(1)\n", LIFESPAN,
    ),
    Fault(
        "a lifespan is not closed if the block fails", "lifespan", "app.py",
        "            finally:\n                if lifespan is not None and (error",
        "            except ZeroDivisionError:\n                if lifespan is not None and (error",
        LIFESPAN,
    ),
    Fault(
        "a lifespan that hangs at its close is waited for", "lifespan", "engine/surroundings.py",
        "        await asyncio.wait([self._task], timeout=within_s)\n",
        "        await asyncio.wait([self._task], timeout=within_s + 100)\n", LIFESPAN,
    ),
    Fault(
        "nobody hears that a lifespan has failed", "lifespan", "engine/surroundings.py",
        "        if not self._closing.is_set():\n", "        if False:\n", LIFESPAN,
    ),
    Fault(
        "a sync lifespan that opens too late stays open", "lifespan", "engine/surroundings.py",
        "        thread.submit(leave)\n", "", LIFESPAN,
    ),
    Fault(
        "a child's lifespan that fails is the job's failure", "lifespan", "engine/processes.py",
        "            raise NotStarted(f\"{problem}: {describe(error)}\") from error\n",
        "            raise error\n", LIFESPAN,
    ),
    Fault(
        "a child opens its lifespan for every task", "lifespan", "engine/processes.py",
        "        self._open = True\n", "", LIFESPAN,
    ),
    Fault(
        "children are killed with their lifespan open", "lifespan", "engine/worker.py",
        "        await self._runs.runner.end_children(self.closing_s)\n", "", LIFESPAN,
    ),
    Fault(
        "the value of the lifespan takes the place of an argument", "lifespan", "arguments.py",
        "        self._positional = ordered[:first]\n",
        "        self._positional = [each for each in ordered if each not in self.injected]\n",
        LIFESPAN,
    ),
    Fault(
        "a late lifespan is accepted", "lifespan", "app.py",
        "        self.tasks.check_order(self.lifespans)\n", "", LIFESPAN,
    ),
    Fault(
        "the last middleware is outermost", "middleware", "engine/surroundings.py",
        "    for each in reversed(middlewares):\n", "    for each in middlewares:\n", MIDDLEWARE,
    ),
    Fault(
        "middleware takes no time", "middleware", "engine/attempt.py",
        "        held.outside = True\n        began()\n", "        held.outside = True\n",
        MIDDLEWARE,
    ),
    Fault(
        "each call of the task starts its timeout again", "middleware", "engine/runs.py",
        "            limit_ms = self._paused.pop(held, limit_ms)\n",
        "            self._paused.pop(held, limit_ms)\n", MIDDLEWARE,
    ),
    Fault(
        "the start of a child counts inside middleware", "middleware", "engine/attempt.py",
        "                self._waits(held)\n", "", MIDDLEWARE,
    ),
    Fault(
        "a cancel leaves the middleware of a thread alone", "middleware", "engine/runs.py",
        'held.definition.pool == "thread" and not held.outside:',
        'held.definition.pool == "thread":', MIDDLEWARE,
    ),
    Fault(
        "a thread that goes on is started elsewhere", "middleware", "engine/attempt.py",
        "                held.outside = not in_thread\n", "                held.outside = True\n",
        MIDDLEWARE,
    ),
    Fault(
        "a job whose thread is over is kept from others", "middleware", "engine/attempt.py",
        "            in_thread = cancelled and not held.outside\n",
        "            in_thread = cancelled\n", MIDDLEWARE,
    ),
    Fault(
        "a sandbox leaves lifespans open", "lifespan", "testing/sandbox.py",
        "            await self._driver.close_lifespans()\n", "            pass\n", BOX_AROUND,
    ),
    Fault(
        "a box tells of an error that was swallowed", "middleware", "testing/running.py",
        "            raised.clear()\n", "", BOX_AROUND,
    ),
    Fault(
        "a signal does not end a start that hangs", "lifespan", "cli/shutdown.py",
        "            await self._stop_requested.wait()\n            task.cancel()\n",
        "            await self._stop_requested.wait()\n", AROUND_CLI,
    ),
    # --- Pools
    Fault(
        "threads have no limit of their own", "pools", "engine/runs.py",
        'if pool == "thread" and self.hand.in_threads >= self._most_threads:', "if False:",
        POOL_CAPACITY,
    ),
    Fault(
        "a thread that hangs keeps its place", "pools", "engine/hand.py",
        '        if held.pool == "thread":\n            self.in_threads -= 1\n', "",
        POOL_CAPACITY,
    ),
    Fault(
        "a worker claims more jobs than it has threads", "pools", "engine/worker.py",
        "slots = self._hand, self._options.most(self._tasks.pools)",
        "slots = self._hand, self._options.concurrency",
        POOL_CAPACITY,
    ),
    # --- Releases side by side
    Fault(
        "an outcome of a newer release makes a job unreadable", "versions", SHAPE,
        "return cls.OTHER if isinstance(value, str) else None", "return None", VERSIONS,
    ),
    Fault(
        "sqlite: a field that an old release lacks is needed", "versions", "store.py",
        "    tasks: tuple[str, ...] | None = None\n", "    tasks: tuple[str, ...]\n", RELEASES,
    ),
    # --- Settings
    Fault(
        "an app reads settings that it does not use", "settings", "app.py",
        "        if store is None:\n            store = load()",
        "        load()\n        if store is None:\n            store = load()",
        "tests/unit/test_config.py",
    ),
    # --- Django
    Fault(
        "django: a job does not join the transaction", "django", "django/databases.py",
        "return connection if connection.in_atomic_block else None", "return None",
        f"{DJANGO} -k part_of_the_transaction",
    ),
    Fault(
        "django: a job beside the database is enqueued before the commit", "django",
        "django/databases.py", "        if not open_:\n", "        if True:\n",
        f"{DJANGO} -k on_commit",
    ),
    Fault(
        "django: connections stay open after a run", "django", "django/connections.py",
        "    def __exit__(self, *_: object) -> None:\n        close_old_connections()\n",
        "    def __exit__(self, *_: object) -> None:\n        pass\n",
        f"{DJANGO} -k closed_after_each_run",
    ),
    # --- A clock that is set
    Fault(
        "a step of the clock is not seen", "I4", "clock.py",
        "        if not self._own:\n            return monotonic_ns + self._base_ns\n",
        "        if self._own is not None:\n            return monotonic_ns + self._base_ns\n",
        CLOCKS,
    ),
    Fault(
        "leases stay where they are when the clock is set", "I2", MEMORY,
        "                until_ms = job.lease_until_ms + step_ms\n",
        "                until_ms = job.lease_until_ms\n", CLOCKS,
    ),
    Fault(
        "a worker's own idea of its leases stays when the clock is set", "I2", "engine/hand.py",
        "                until_ms = held.job.lease_until_ms + step_ms\n",
        "                until_ms = held.job.lease_until_ms\n", CLOCKS,
    ),
    Fault(
        "timeouts run on the clock that is set", "timeout", "engine/runs.py",
        "self._deadlines.add(held, self._clock.monotonic_ms() + limit_ms)",
        "self._deadlines.add(held, self._clock.now_ms() + limit_ms)", CLOCKS,
    ),
    Fault(
        "sqlite: leases stay where they are when the clock is set", "I2", "stores/sqlite/file.py",
        "(step_ms,),\n", "(0,),\n", "tests/unit/test_own_clock.py",
    ),
    Fault(
        "a claim whose reply was lost is not repeated as the same one", "I1", "engine/worker.py",
        "again=next(tries) > 0,", "again=False,", "tests/engine/test_worker.py",
    ),
    # --- Dead without having run, and other ends
    Fault(
        "a panic keeps its slot", "attempt", "engine/attempt.py",
        "self.returned(held, definition, value)\n        except BaseException as error:",
        "self.returned(held, definition, value)\n        except Exception as error:", ENDS,
    ),
    Fault(
        "a cancelled thread job has no timeout", "timeout", "engine/hand.py",
        "    return not held.interrupted and _STRENGTH[why] > _STRENGTH[held.stop]\n",
        "    return False\n", ENDS,
    ),
    Fault(
        "a start that is cancelled at once is waited for", "cancel", "engine/runs.py",
        "            if held.begun:\n                self._loop.call_later(",
        "            if True:\n                self._loop.call_later(", ENDS,
    ),
    Fault(
        "what has not started is not handed back", "stop", "engine/worker.py",
        "        for held in self._hand.unstarted():\n"
        "            self._runs.stop(held, Stop.RELEASE)\n        await", "        await", ENGINE,
    ),
    Fault(
        "a full worker hoards", "claim", "engine/chores.py",
        "            if runs.has_room(held.pool):\n"
        "                runs.stop(held, Stop.RELEASE)\n",
        "            if runs.has_room(held.pool):\n                continue\n",
        ENGINE,
    ),
    Fault(
        "nobody heeds a cancel until the next extend", "cancel", "engine/chores.py",
        "            self._runs.stop(held, Stop.CANCEL)\n",
        "            del held\n", ENGINE,
    ),
    Fault(
        "a timeout ends nothing", "timeout", "engine/runs.py",
        "            self.stop(held, Stop.TIMEOUT)\n", "            pass\n", ENGINE,
    ),
    # --- Batches
    Fault(
        "a linger lasts for ever", "batch", "engine/runs.py",
        "        if self.hand.gathered:\n            ripe_ms",
        "        if False:\n            ripe_ms", TOGETHER,
    ),
    Fault(
        "a job lingers longer than it may, because others come", "batch", GATHER,
        "        if until_ms < self.ripe_ms:\n", "        if True:\n", TOGETHER,
    ),
    Fault(
        "jobs that linger take slots", "batch", "engine/worker.py",
        "ready += each.calls if each.ripe(now_ms) else 0", "ready += each.calls", TOGETHER,
    ),
    Fault(
        "jobs that linger fill their worker", "batch", "engine/worker.py",
        "            self._runs.end_lingers()\n", "", TOGETHER,
    ),
    Fault(
        "a job lingers until it has expired", "batch", GATHER,
        "min(until_ms, job.expires_ms - IN_TIME_MS)", "until_ms", TOGETHER,
    ),
    Fault(
        "what is left of a full batch is forgotten", "batch", "engine/runs.py",
        "        if self.hand.gathered:\n            # Those",
        "        if False:\n            # Those", TOGETHER,
    ),
    Fault(
        "a full batch waits", "batch", GATHER,
        "self.count >= self.limit or self.ripe_ms <= now_ms", "self.ripe_ms <= now_ms", TOGETHER,
    ),
    Fault(
        "a bad job meets the same batch again", "batch", GATHER,
        "    return max(1, batch.size >> SHRINK_BITS * job.failures)\n",
        "    return batch.size\n", TOGETHER,
    ),
    Fault(
        "a batch takes the last chance of its jobs", "batch", GATHER,
        "    if job.failures >= retries:\n", "    if False:\n", TOGETHER,
    ),
    Fault(
        "jobs with different timeouts share a call", "batch", "engine/hand.py",
        "held.limit, held.job.timeout_ms", "held.limit, None", TOGETHER,
    ),
    Fault(
        "a job lingers in every worker", "batch", "engine/hand.py",
        "held.ready_ms if held.job.attempt == 1 else held.job.due_ms", "held.ready_ms", TOGETHER,
    ),
    Fault(
        "a job of a batch takes a slot with it", "batch", "engine/hand.py",
        "            if held.batch is None:\n                self._free_slot(held)\n",
        "            self._free_slot(held)\n", TOGETHER,
    ),
    Fault(
        "a batch has no limit of bytes", "limit", "engine/hand.py",
        "            if size > BATCH_BYTES:\n", "            if False:\n", TOGETHER,
    ),
    Fault(
        "a worker does not claim enough for a batch", "batch", "engine/worker.py",
        "            free += lacking\n", "            pass\n", TOGETHER,
    ),
    Fault(
        "what lingers is released like what is late", "batch", "engine/chores.py",
        "if held.suspect or self._hand.lingers(held, since_ms + PATIENCE_MS):", "if held.suspect:",
        TOGETHER,
    ),
    Fault(
        "the cancel of one job stops its batch", "batch", "engine/runs.py",
        "        if reasons <= {Stop.CANCEL, Stop.LOST} and stronger(why, batch):\n",
        "        if stronger(why, batch):\n", TOGETHER,
    ),
    Fault(
        "a batch whose jobs are all cancelled goes on", "batch", "engine/runs.py",
        "        if reasons <= {Stop.CANCEL, Stop.LOST} and stronger(why, batch):\n",
        "        if False:\n", TOGETHER,
    ),
    Fault(
        "a partial failure fails the whole batch", "batch", "engine/batches.py",
        "        if index in errors:\n", "        if errors:\n", TOGETHER,
    ),
    Fault(
        "a result too few is not noticed", "batch", "engine/batches.py",
        "    if len(value) != count:\n", "    if len(value) > count:\n", TOGETHER,
    ),
    Fault(
        "a job that can't be read fails its batch", "batch", "engine/batches.py",
        "            failed.append((member, runner.raised(member, definition, error)))\n",
        "            raise\n", TOGETHER,
    ),
    Fault(
        "an error that can't be pickled fails its batch", "batch", POOL,
        "    if isinstance(error, Partial):\n        return _parts_for_the_worker(error)\n", "",
        "tests/unit/test_batch_tasks.py -k pickled",
    ),
    Fault(
        "a box does not let a batch linger", "batch", "testing/driver.py",
        "self._lingering.take(self._clock.now_ms() if linger else None)",
        "self._lingering.take(None)", "tests/faces/test_testing_batches.py",
    ),
    # --- What became of a run
    Fault(
        "the traceback of a failure is lost", "story", "retry.py",
        "None if cause is None else traceback_text(cause)", "None", JOURNAL,
    ),
    Fault(
        "our own frames are in the traceback", "story", "traceback.py",
        "if not _ours(module) and (", "if (", "tests/unit/test_traceback.py",
    ),
    Fault(
        "a traceback takes all the room that it wants", "limit", "traceback.py",
        "        room -= len(part.encode())\n", "        pass\n", "tests/unit/test_traceback.py",
    ),
    Fault(
        "a traceback stays in the process of its task", "story", POOL,
        "        error.__cause__ = RemoteTraceback(traceback)\n",
        "        pass\n", "tests/unit/test_pools.py -k traceback",
    ),
    Fault(
        "a timeout does not tell where the task was", "story", "engine/attempt.py",
        "return error.with_traceback(raised.__traceback__)", "return error", JOURNAL,
    ),
    Fault(
        "a failure is logged without its exception", "story", "engine/journal.py",
        "exc_info=_exc_info(error),", "exc_info=None,", JOURNAL,
    ),
    Fault(
        "a busy worker has a log line for each run", "limit", "engine/journal.py",
        "        self._lines_left -= 1\n", "        pass\n", JOURNAL,
    ),
    Fault(
        "runs that have no line of their own are not summarised", "story", "engine/journal.py",
        "        if self._left_out:\n", "        if False:\n", JOURNAL,
    ),
    Fault(
        "a task that waits for its child keeps its slot", "deadlock", "engine/lending.py",
        "                self._hand.lend(held)\n", "                pass\n", LENDING,
    ),
    Fault(
        "tasks that wait take the slots of what they wait for", "deadlock", "engine/lending.py",
        "return held.job.task in self._waiters and self._full()", "return False", LENDING,
    ),
    Fault(
        "a lent slot is lost with its run", "deadlock", "engine/hand.py",
        "            if held.lent:\n                self.take_back(held)\n            if held.",
        "            if held.", LENDING,
    ),
    Fault(
        "a task that blocks the event loop is not named", "story", "engine/leases.py",
        "                self._name_culprit()\n", "                pass\n",
        "tests/unit/test_guard.py",
    ),
    Fault(
        "failures are not counted", "retry", JOB,
        "failures=job.failures + settlement.failed", "failures=job.failures",
    ),
    Fault(
        "a tick's job has an id of its own on each node", "I6", "schedule.py",
        "id = tick_id(schedule.name, tick_ms)",
        'id = tick_id(schedule.name, tick_ms) + f"{now_ms}"', SCHEDULES,
    ),
    Fault(
        "missed ticks all run", "misfire", "schedule.py",
        "fired = missed[-wanted:] if wanted else []", "fired = missed", SCHEDULES,
    ),
    Fault(
        "overlap is not looked at", "overlap", "engine/scheduler.py",
        "        plans = await self._apply_overlaps(schedules, plans)\n", "", SCHEDULES,
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
        "schedules that are due together are fired one by one", "punctuality",
        "engine/scheduler.py",
        "AT_ONCE = 500", "AT_ONCE = 1",
        f"{SCHEDULES} -k thousand",
    ),
    Fault(
        "a tick that a wrong clock gave stays", "I6", "engine/scheduler.py",
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
        "a schedule that can't be read stops the others", "schedules", "engine/scheduler.py",
        "            return self._unreadable(schedule, error)\n", "            raise\n",
        f"{SCHEDULES} -k can_not_be_read",
    ),
    Fault(
        "the note of a move is taken for a schedule", "schedules", "notes.py",
        "if each.name != NOTE]", "]",
        f"{SCHEDULES} -k note_of_a_move",
    ),
    Fault(
        "an older worker deletes a newer one's schedules", "schedules", "engine/scheduler.py",
        "return {name for worker in workers for name in worker.schedules}", "return set()",
        f"{SCHEDULES} -k rolling",
    ),
    Fault(
        "a worker declares its schedules before it is known", "schedules", "engine/scheduler.py",
        "        await self._reconnecting.forever(self._until_known)\n", "",
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
        "nats: a claim does not look whether the job stands elsewhere", "I2", NATS_CLAIMING,
        "return layout.step(job, check, now_ms=self._now_ms)",
        "return layout.step(job, None, now_ms=self._now_ms)",
        RACING,
    ),
    Fault(
        "nats: a ghost of a schedule keeps its job from being claimed", "I5", NATS_STEPS,
        "earlier = _stage(truth.job) <= _stage(ready.job)", "earlier = False",
        NATS_GHOSTS,
    ),
    Fault(
        "nats: a token that came over a lost connection is not doubted", "I5", NATS_STREAM,
        " or message.connection != self.connection", "",
        NATS_GHOSTS,
    ),
    Fault(
        "nats: a ghost outlives its job", "I5", NATS_JOBS,
        "        await self._clear(old)\n", "",
        NATS_GHOSTS,
    ),
    Fault(
        "nats: a step leaves the schedule behind that it came from", "I5", NATS_STEPS,
        'drop=standing.subject if scheduled else "",', 'drop="",',
        LEASES,
    ),
    Fault(
        "nats: any claim of the job may settle it", "I2", JOB,
        "and claim.fence == job.fence and", "and",
        LEASES,
    ),
    Fault(
        "nats: prune stops at a job that ended by a clock that is ahead", "prune", NATS_JOBS,
        "                if standing.seq >= end:\n", "                if True:\n",
        ENDED_JOBS,
    ),
    Fault(
        "nats: prune forgets what stands between old jobs", "I5", NATS_JOBS,
        "all_before=end is None)", "all_before=True)",
        ENDED_JOBS,
    ),
    Fault(
        "nats: a limit on the stream is taken for harmless", "I5", "stores/nats/settings.py",
        '    "max_bytes": -1,\n    "max_msgs": -1,\n    "max_age": 0,\n', "",
        NATS_HEALTH,
    ),
    Fault(
        "nats: a limit that somebody sets meanwhile is not seen", "I5", "stores/nats/store.py",
        "                await shard.stream.keep_right()\n", "                pass\n",
        NATS_HEALTH,
    ),
    Fault(
        "nats: an add leaves no room for what later steps note", "size", NATS_FITTING,
        "found = self.fit(job, write, headroom(largest))", "found = self.fit(job, write)",
        NATS_LARGE,
    ),
    Fault(
        "nats: what is too large for the server is not shortened", "size", NATS_FITTING,
        "shorter = fitted(job, len(step.body) - over)", "shorter = job",
        NATS_LARGE,
    ),
    Fault(
        "nats: a job that has become too large is claimed all the same", "size", NATS_CLAIMING,
        "        if found is None:\n            # Nobody has held it",
        "        if found is None:\n            found = job, self._step(job)\n"
        "        elif False:\n            # Nobody has held it",
        NATS_LARGE,
    ),
    Fault(
        "nats: a full store has no room for the steps of its jobs", "full", NATS_ROOM,
        "        count = max(-(-wanted // size), 1)\n", "        count = 0\n",
        NATS_FULL,
    ),
    Fault(
        "nats: what the server had no room to fire is left", "I5", "stores/nats/late.py",
        "            if late and (pushed", "            if False and (pushed",
        f"{NATS_FULL} -k 0-3000",
    ),
    Fault(
        "nats: a full account is taken for a bad request", "full", "stores/nats/answers.py",
        "FULL = (10002, 10023,", "FULL = (10023,",
        "tests/unit/test_nats_stream.py",
    ),
    Fault(
        "nats: a repeated settle is not recognised", "I1", NATS_JOBS,
        "if seen is not None and seen.job.settled == job.fence:", "if False:",
        LEASES,
    ),
    Fault(
        "nats: a lease that is over can be extended", "I2", NATS_JOBS,
        " and life.holds(job, seen.job, now_ms=now_ms)\n", " and seen.job.fence == job.fence\n",
        LEASES,
    ),
    Fault(
        "nats: ready messages are not sorted by priority", "contract", NATS_DELIVERY,
        "sorted(claim.messages, key=_order)", "claim.messages",
        CLAIMING,
    ),
    Fault(
        "nats: the ready message of a cancelled job is still counted", "contract", NATS_JOBS,
        "await self._stream.purge(standing.subject, before_seq=standing.seq + 1)\n        return",
        "pass\n        return",
        "tests/contract/test_cancelling.py",
    ),
    Fault(
        "nats: a deleted record is only removed, and may come back", "I1", NATS_RECORDS,
        '        steps = [Step(self._subject(kind, name), GONE, b"") for name in there]\n'
        "        for some in portions(steps, most=self._stream.batch):\n"
        "            await self._room.store(*some)\n",
        "        for name in there:\n"
        "            await self._stream.purge(self._subject(kind, name))\n",
        NATS_GHOSTS,
    ),
    Fault(
        "nats: a note goes although a record came", "I1", NATS_RECORDS,
        "await self._stream.purge(note[0], before_seq=note[1] + 1)",
        "await self._stream.purge(note[0])",
        NATS_GHOSTS,
    ),
    Fault(
        "nats: records are put without the note of their group", "I1", NATS_RECORDS,
        "await self._room.store(note, *some)", "await self._room.store(*some)",
        RECORDS,
    ),
    Fault(
        "redis: a deleted record leaves its name behind", "I1", REDIS_STATEMENTS,
        "    call('ZREM', ROOT .. 'records:' .. kind, name)\n", "",
        RECORDS,
    ),
    Fault(
        "a key is good whatever its secret", "keys", "operate/keys.py",
        "if stored is None or not _same(stored.sha256, _hash(secret)):",
        "if stored is None:",
        KEYS,
    ),
    Fault(
        "a key that was read once is good for ever", "keys", "operate/remembered.py",
        "if seen is not None and now_ns - seen[0] < CACHE_S * S_NS:", "if seen is not None:",
        KEYS,
    ),
    Fault(
        "a key that was read is good after it expired", "keys", "operate/keys.py",
        "if stored.expires_ms is not None and stored.expires_ms <= self._client.clock.now_ms():",
        "if False:",
        KEYS,
    ),
    Fault(
        "of two audit entries in a millisecond one is kept", "audit", "operate/audit.py",
        "-{rank:05}-{secrets.token_hex(6)}", "-{rank:05}-000000000000",
        "tests/unit/test_audit.py",
    ),
    # --- What workers tell, and the history that servers record of it
    Fault(
        "another server counts what was counted", "history", "operate/recorder.py",
        "if current.last_s < point.at_s:", "if True:",
        RECORDER,
    ),
    Fault(
        "a server that comes back begins anew", "history", "operate/history.py",
        "        seen=kept,\n", "        seen=[],\n",
        RECORDER,
    ),
    Fault(
        "a process that was overlooked counts as a new one", "history", "operate/history.py",
        "if before is None and now.since_ms < before_ms - SLACK_MS:", "if False:",
        HISTORY,
    ),
    Fault(
        "a process that has begun again takes away", "history", "operate/history.py",
        "if before is None or now.started < before.started or now.done < before.done:",
        "if before is None:",
        HISTORY,
    ),
    Fault(
        "a new process is known before it was recorded", "history", "operate/history.py",
        "            if each.since_ms < last.seen_ms - SLACK_MS\n", "",
        RECORDER,
    ),
    Fault(
        "workers of one process are counted each", "history", "operate/history.py",
        "{each.counts.source: each.counts for", "{each.name: each.counts for",
        HISTORY,
    ),
    Fault(
        "rolling up twice adds twice", "history", "operate/history.py",
        "if each.at_s != point.at_s]", "]",
        HISTORY,
    ),
    Fault(
        "the last stretch before a gap is not rolled up", "history", "operate/recorder.py",
        "            if not current.points and last.points:\n", "            if False:\n",
        RECORDER,
    ),
    Fault(
        "a long gap is shown as one moment", "history", "operate/history.py",
        "0 < over_ms <= GAP_MS and", "0 < over_ms and",
        HISTORY,
    ),
    Fault(
        "history is kept for ever", "history", "operate/history.py",
        "return int(start) + tiers[tier].span_s < now_s - tiers[tier].keep_s", "return False",
        RECORDER,
    ),
    Fault(
        "a record of history does not fit", "history", "operate/history.py",
        "        if size > SEEN_BYTES:\n            break\n", "",
        HISTORY,
    ),
    Fault(
        "a store that is away ends the recording", "history", "operate/recorder.py",
        "except (StoreError, TimeoutError, OSError) as error:",
        "except ZeroDivisionError as error:",
        RECORDER,
    ),
    Fault(
        "what a worker tells of tasks jumps", "history", "engine/counts.py",
        "name = name if n < TASKS_TOLD else OTHER", "name = name if len(names) < 2 else OTHER",
        COUNTS,
    ),
    Fault(
        "a limited key sees the rates of all", "access", "http/overview.py",
        "rates=rates(points, now_s) if sees_all else Rates(),", "rates=rates(points, now_s),",
        HTTP_OVERVIEW,
    ),
    Fault(
        "a limited key sees what workers have counted", "access", "http/operating.py",
        "worker.counts if caller.sees_all(Scope.READ) else None", "worker.counts",
        HTTP_OVERVIEW,
    ),
    Fault(
        "a limited key sees the history", "access", "http/overview.py",
        "    if not incoming.caller.sees_all(Scope.READ):", "    if False:",
        HTTP_OVERVIEW,
    ),
    Fault(
        "nats: a schedule that moved is fired all the same", "I6", "stores/nats/schedules.py",
        "return Step(subject, check.headers, msgspec.json.encode(_replace(schedule, fence=0)))",
        'return Step(subject, "", msgspec.json.encode(_replace(schedule, fence=0)))',
        "tests/contract/test_firing.py",
    ),
    Fault(
        "nats: a step that was refused is taken for one that was stored", "I2", NATS_JOBS,
        "            if seq is None:\n                refused[id] = plan\n            else:\n"
        "                applied[id] = (plan, seq)\n",
        "            applied[id] = (plan, seq or 1)\n",
        RACING,
    ),
    Fault(
        "nats: answers are taken in the order in which they come", "I2", NATS_STREAM,
        'number = int(answer.subject.rpartition(".")[2])', "number = answers.index(answer)",
        "tests/unit/test_nats_stream.py",
    ),
    Fault(
        "nats: a cancel after the pull drops what came", "I5", NATS_DELIVERY,
        "                self.keep(claim.messages)\n", "",
        NATS_RACES,
    ),
    Fault(
        "nats: a consumer on a server that is behind is left there", "docs/nats.md", NATS_HEAL,
        'replica.get("offline") or not replica.get("current", True)', "False",
        "tests/unit/test_nats_heal.py",
    ),
    Fault(
        "nats: a consumer is moved again and again", "docs/nats.md", NATS_HEAL,
        "        self._moved[name] = now\n", "",
        "tests/unit/test_nats_heal.py",
    ),
    Fault(
        "nats: a consumer that was deleted stays so", "docs/nats.md", NATS_HEAL,
        "                healed |= await self._make(queue, priority, paused)\n",
        "                pass\n",
        f"{NATS_HEALING} -k consumer",
    ),
    Fault(
        "nats: a stream that was deleted looks like an empty one", "docs/nats.md", NATS_STREAM,
        "        if answers.code(found) == NO_STREAM:\n            raise",
        "        if False:\n            raise",
        f"{NATS_HEALING} -k stream",
    ),
    Fault(
        "nats: a claim waits for a silent consumer", "docs/nats.md", NATS_DELIVERY,
        "await asyncio.wait(awaited, timeout=PATIENCE_S)", "await asyncio.wait(awaited)",
        f"{NATS_HEALING} -k silent",
    ),
    Fault(
        "nats: what a silent consumer delivers late goes to any claim", "contract", NATS_DELIVERY,
        "self._claim if self._claim and source.queue in self._claim.queues else None",
        "self._claim",
        f"{NATS_HEALING} -k late",
    ),
    Fault(
        "nats: a shard without an answer stops the others", "docs/nats.md", "stores/nats/away.py",
        "                if failures == len(present):\n                    raise\n",
        "                raise\n",
        f"{NATS_HEALING} -k shard",
    ),
    Fault(
        "nats: everybody who waits is told of every job", "docs/nats.md", NATS_NOTIFY,
        "group=GROUP, once=True", "once=True",
        f"{NATS_HEALING} -k who_wait",
    ),
    Fault(
        "nats: who was told of a job and left it keeps it from the others", "contract", NATS_NOTIFY,
        "found & last or (found and first)", "found and first",
        f"{NATS_HEALING} -k told",
    ),
    Fault(
        "nats: a priority that nobody used is not paused", "contract", NATS_STREAM,
        "            await self.ensure_source(queue, priority)\n            name",
        "            name",
        "tests/contract/test_browse.py tests/contract/test_claiming.py",
    ),
    Fault(
        "nats: two workers get the same parked job", "I2", NATS_STEPS,
        "            self.as_left(standing),\n", "            None,\n",
        f"{NATS_PARKING} -k same_time",
    ),
    Fault(
        "nats: a parked job is stored without a note", "I5", NATS_JOBS,
        "parked = found[0].parked and not apart", "parked = False",
        NATS_PARKING,
    ),
    Fault(
        "nats: a parked job is claimed to the subject of the lease that it left", "I5", NATS_STEPS,
        "other_than=standing.left or standing.kind", "other_than=standing.kind",
        "tests/unit/test_nats_steps.py",
    ),
    Fault(
        "nats: nobody looks for parked jobs again", "I3", NATS_PARKED,
        "elif self._looking is None and", "elif False and",
        f"{NATS_PARKING} -k nobody_told",
    ),
    Fault(
        "nats: the note of a line that has jobs is removed", "I5", NATS_PARKED,
        "if old and await self._is_empty(line):", "if old:",
        f"{NATS_PARKING} -k note",
    ),
    Fault(
        "nats: a parked message that is over stays", "contract", NATS_PARKED,
        "                await self._stream.purge(each.subject, before_seq=each.seq + 1)\n", "",
        f"{NATS_PARKING} -k stands_again",
    ),
    Fault(
        "nats: parked jobs of a paused queue are handed out", "contract", NATS_PARKED,
        'return bool(found.get("paused"))', "return False",
        "tests/contract/test_parking.py",
    ),
    Fault(
        "nats: a parked job of a lower priority goes before ready ones", "contract",
        "stores/nats/shard.py",
        "            if rank < max(Priority):\n", "            if False:\n",
        "tests/contract/test_parking.py",
    ),
    Fault(
        "nats: a traceback is kept at the cost of the history", "size", NATS_FITTING,
        "    if job.traceback is not None:\n        yield", "    if False:\n        yield",
        f"{NATS_LARGE} -k traceback",
    ),
    # --- Moving jobs, and transactions
    Fault(
        "a move forgets jobs before they are there", "I5", "operate/transfer.py",
        "        added = await self._new.add(cancelled)\n"
        "        await self._old.delete([job.id for job in cancelled])\n",
        "        await self._old.delete([job.id for job in cancelled])\n"
        "        added = await self._new.add(cancelled)\n",
        TRANSFER,
    ),
    Fault(
        "a move does not note what is on its way", "I5", "operate/transfer.py",
        "await self._old.put_schedule(Schedule(name=NOTE, rule=text, next_ms=None, paused=True))",
        "pass",
        TRANSFER,
    ),
    Fault(
        "a schedule goes on ticking where it was", "I6", "operate/transfer.py",
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
        "added jobs forget what was tried before", "contract", STATEMENTS,
        "        if job.attempt or job.meta", "        if job.meta",
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
        "a block that ends closes the store of others", "contract", "access.py",
        "if client.users or not client.unwanted:", "if not client.unwanted:",
        "tests/unit/test_api_opening.py",
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
        "a claim in PostgreSQL brings any number of bytes", "contract", PG_CLAIMING,
        "where before = 0 or before + bytes <= {BATCH_BYTES}", "where true", LARGE,
    ),
    Fault(
        "users' sessions keep a plan of the trigger for few jobs", "contract", PG_SCHEMA_SQL,
        "set enable_seqscan = off as $$", "as $$", PG_PLANS,
    ),
    Fault(
        "a claim asks PostgreSQL for any job that was lost", "contract", PG_CLAIMING,
        "            order by watch_ms, n limit {most} {locked}) as late\n",
        "            limit {most} {locked}) as late\n", PG_PLANS,
    ),
    Fault(
        "PostgreSQL goes through all ended jobs to rerun some", "contract", PG_STATEMENTS,
        "_HAS_ENDED = \"state in ('done', 'dead', 'cancelled')\"",
        '_HAS_ENDED = "ended_ms is not null"', PG_PLANS,
    ),
    Fault(
        "nodes that start together trust what they knew before the lock", "contract", PG_SCHEMA,
        """exists (
               select from pg_class join pg_namespace on pg_namespace.oid = relnamespace
               where nspname = %s and relname = 'version'
                 and has_schema_privilege(pg_namespace.oid, 'usage'))""",
        """to_regclass(%s || '.version') is not null""", f"{PG_FAULTS} -k start_together",
    ),
    Fault(
        "a takeover keeps its locks from one round trip to the next", "I3", PG_CLAIMING,
        "        return await _claim_with_lost(db, schema, tasks, where, lease_ms), parked\n",
        "        async with db.transaction():\n"
        "            return await _claim_with_lost(db, schema, tasks, where, lease_ms), parked\n",
        f"{PG_FAULTS} -k cut_off_in_a_takeover",
    ),
    Fault(
        "a takeover writes over what changed since it was read", "I2", PG_ROWS,
        " and job.xmin = new.seen", "", f"{PG_FAULTS} -k changed_since",
    ),
    Fault(
        "a reply that can't be sent locks its jobs until TCP gives up", "I3",
        "stores/postgres/pool.py",
        '                "tcp_user_timeout": str(timeout_ms),\n', "",
        f"{PG_FAULTS} -k can_not_be_sent",
    ),
    Fault(
        "a node cut off while it makes the schema blocks the others", "I3", PG_SCHEMA,
        "set_config('idle_in_transaction_session_timeout', %s, true)", "%s::text",
        f"{PG_FAULTS} -k while_it_makes_the_schema",
    ),
    Fault(
        "the counts have no key", "contract", PG_SCHEMA_SQL,
        "alter table tickwheel.tally add column n bigint generated always as identity "
        "primary key;\n",
        "", f"{PG_FAULTS} -k published",
    ),
    Fault(
        "the version is noted before its table has a key", "contract", PG_SCHEMA,
        "        for part in [] if dry_run else missing:\n",
        "        for part in [] if dry_run else [missing[0], missing[-1], *missing[1:]]:\n",
        f"{PG_FAULTS} -k published",
    ),
    Fault(
        "nobody hears that counts can't be folded", "contract", "stores/postgres/store.py",
        "            self._unfolded = str(error)\n", "", f"{PG_FAULTS} -k folded_are_a_finding",
    ),
    Fault(
        "PostgreSQL hands parked jobs to workers that don't know them", "contract",
        "stores/postgres/parking.py",
        """
            where (task in (select json_array_elements_text(%(tasks)s::text::json))) is true)""",
        ")", PARKING,
    ),
    Fault(
        "PostgreSQL tells every worker of parked jobs", "contract", PG_SCHEMA_SQL,
        "and priority >= 0 and due_ms <= tickwheel.now_ms() + 5000\n        union\n"
        "        select distinct 't', task from after\n"
        "        where state = 'waiting' and priority < 0 and due_ms <= tickwheel.now_ms() + 5000\n"
        "        union\n        select distinct 'a', worker from after\n"
        "        where (asked or told)",
        "and due_ms <= tickwheel.now_ms() + 5000\n        union\n"
        "        select distinct 't', task from after\n"
        "        where state = 'waiting' and priority < 0 and due_ms <= tickwheel.now_ms() + 5000\n"
        "        union\n        select distinct 'a', worker from after\n"
        "        where (asked or told)",
        f"{PG_PARKING} -k told",
    ),
    Fault(
        "PostgreSQL locks parked jobs of every task", "contract", PG_CLAIMING,
        """[f"({parking.best(schema, level, _PICKED)})" for""",
        """[f"({parking.best(schema, level, _PICKED)} order by best.due_ms limit %(limit)s)" for""",
        f"{PG_PARKING} -k locks_only",
    ),
    Fault(
        "PostgreSQL goes through all parked jobs to find those of one task", "contract",
        "stores/postgres/parking.py",
        'job.task = kind.task collate "C"', "job.task = kind.task", PG_PLANS,
    ),
    Fault(
        "a claim asks PostgreSQL for any job that is parked", "contract",
        "stores/postgres/parking.py",
        "(select true from {schema}.job where {PARKED} {mine} {_FIRST}) is not null",
        "exists (select from {schema}.job where {PARKED} {mine} {_FIRST})", PG_PLANS,
    ),
    Fault(
        "PostgreSQL looks twice as long as jobs are parked", "contract",
        "stores/postgres/store.py",
        "jobs, self._parked = await", "jobs, _ = await", f"{PG_PARKING} -k one_statement",
    ),
    Fault(
        "workers of an older release are handed parked jobs", "contract", PG_HOLDING,
        "priority = priority - case when new.parked and not asked then 4 else 0 end,\n", "",
        f"{PG_PARKING} -k older_release",
    ),
    Fault(
        "SQL takes any id", "contract", PG_SCHEMA_SQL,
        "not length(id) between 1 and 200 or id ~ unprintable", "false", f"{PG_FAULTS} -k sql",
    ),
    Fault(
        "SQL takes any due time", "contract", PG_SCHEMA_SQL,
        "not due_ms between 0 and 253402300799999", "false", f"{PG_FAULTS} -k sql",
    ),
    Fault(
        "a time that no calendar has can't be shown", "contract", "duration.py",
        "except OverflowError:", "except ZeroDivisionError:",
        "tests/faces/test_jobs_cli.py -k calendar",
    ),
    Fault(
        "jobs that were changed by hand are not checked", "contract", "jobs.py",
        "                checked_job(job)\n", "", "tests/unit/test_api.py -k by_hand",
    ),
    # --- The API
    Fault(
        "an id is a list of its letters", "API", "jobs.py",
        "if isinstance(jobs, str | JobHandle):\n            return [",
        "if False:\n            return [",
        "tests/unit/test_api_jobs.py",
    ),
    Fault(
        "find passes any limit on to the store", "API", "jobs.py",
        "not 1 <= limit <= PAGE_MOST", "False", "tests/unit/test_api_jobs.py",
    ),
    Fault(
        "an unknown state is not refused with a guess", "API", "jobs.py",
        "state not in known)", "False)", "tests/unit/test_api_jobs.py",
    ),
    Fault(
        "find_all ends with the first page", "API", "jobs.py",
        "            if page.cursor is None:\n                return\n            page = await",
        "            return\n            page = await",
        "tests/unit/test_api_jobs.py",
    ),
    Fault(
        "the start of several ids is the first of them", "CLI", "cli/prefix.py",
        "    if len(ids) == 1:\n", "    if ids:\n", "tests/faces/test_jobs_bulk_cli.py",
    ),
    Fault(
        "a store with many jobs is searched for the start of an id", "CLI", "cli/prefix.py",
        "if total > SEARCH_MOST:", "if False:", "tests/faces/test_jobs_bulk_cli.py",
    ),
    Fault(
        "a page of jobs since a time skips some", "CLI", "operate/bulk.py",
        "        if len(kept) > left:\n", "        kept = kept[:left]\n        if False:\n",
        "tests/faces/test_jobs_bulk_cli.py",
    ),
    Fault(
        "jobs are cancelled by filter without a question", "CLI", "cli/bulk.py",
        "if found and not yes and not confirmed(", "if found and False and not confirmed(",
        "tests/faces/test_jobs_bulk_cli.py",
    ),
    Fault(
        "doctor calls the loss of a second bad", "CLI", "operate/doctor.py",
        "if not durability.process_crash and window_ms is not None:", "if False:",
        "tests/unit/test_doctor.py",
    ),
    Fault(
        "an option that does not exist is Python's affair", "API", "checks.py",
        "if not kwargs.keys() <= known:", "if False:", "tests/unit/test_api_jobs.py",
    ),
    Fault(
        "app.sync has no delete", "API", "sync_app.py",
        "    def delete(self, jobs: JobRef | Iterable[JobRef]) -> bool",
        "    def forget(self, jobs: JobRef | Iterable[JobRef]) -> bool",
        "tests/unit/test_api_sync.py",
    ),
    Fault(
        "the handle of another app names a job of this one", "API", "jobs.py",
        "if job._access is not self._access:", "if False:", "tests/unit/test_api_jobs.py",
    ),
    Fault(
        "a generator of jobs is consumed on the bridge's thread", "API", "sync_app.py",
        "return jobs if isinstance(jobs, str | JobHandle) else self._api._ids(step, jobs)",
        "return jobs  # type: ignore[return-value]", "tests/unit/test_api_sync.py",
    ),
    Fault(
        "a call without await may wait for itself", "API", "access.py",
        "if self._bridge.is_here():", "if False:", "tests/unit/test_api_sync.py",
    ),
    Fault(
        "the rules of a retry policy are not checked", "API", "retry.py",
        "        _check_rules(self.on)\n", "", "tests/unit/test_retry.py",
    ),
    Fault(
        "a refused value is shown in full", "API", "errors.py",
        "return text if len(text) <= SHOWN else", "return text if True else",
        "tests/unit/test_api_refusals.py",
    ),
    Fault(
        "a Pydantic model loses its secrets in silence", "API", "arguments.py",
        "and not _equal(given, kept):", "and False:", "tests/unit/test_pydantic.py",
    ),
    Fault(
        "one annotation that can't be read turns off all checks", "API", "arguments.py",
        "        with contextlib.suppress(Exception):\n            hints |=",
        "        if False:\n            hints |=", "tests/unit/test_arguments.py",
    ),
    Fault(
        "a Pydantic model is written without its aliases", "API", "arguments.py",
        ", by_alias=True", "", "tests/unit/test_pydantic.py",
    ),
    Fault(
        "a Pydantic model is written with its computed fields", "API", "arguments.py",
        ", round_trip=True", "", "tests/unit/test_pydantic.py",
    ),
    Fault(
        "a read in NATS ends with its first answer", "I1", NATS_STREAM,
        "while more and messages:", "while False:", LARGE,
    ),
    # --- Secrets
    Fault(
        "a token is shown where a user would be", "no secret shown", "masking.py",
        "    shown = bool(password) or scheme in _USER_IS_NO_SECRET\n", "    shown = True\n",
        "tests/unit/test_masking.py",
    ),
    Fault(
        "a password ends at the first @", "no secret shown", "masking.py",
        "login, at, rest = rest.rpartition", "login, at, rest = rest.partition",
        "tests/unit/test_masking.py",
    ),
    Fault(
        "a driver's words are shown as they are", "no secret shown", "masking.py",
        "            text = text.replace(spelling, MASK)\n", "            pass\n",
        "tests/unit/test_masking.py",
    ),
    # --- Redis: slots that move, memory that is full, many queues
    Fault(
        "a step begins on a slot that moves", "I1", "stores/redis/keys.py",
        '*("parked", "watched", "schema", "none"),', '*("parked", "watched", "schema"),',
        f"{CLUSTER} -k no_step_begins",
    ),
    Fault(
        "a step touches keys that it doesn't name", "I1", "stores/redis/keys.py",
        """, *(f"e:{state}:{place[2:]}" for state in "dxc")]""", "]",
        "tests/faults/test_redis.py -k names_all_keys",
    ),
    Fault(
        "a job that moved is cancelled where it was", "I1", REDIS_STATEMENTS,
        "    if place ~= places[i] then return found, i - 1 end\n", "",
        "tests/faults/test_redis.py -k moved_to_another_queue",
    ),
    Fault(
        "calls don't wait for keys on their way", "contract", "stores/redis/cluster.py",
        "PATIENCE_S = 1.0", "PATIENCE_S = 0.0", f"{CLUSTER} -k waits_a_little",
    ),
    Fault(
        "a half-moved slot is not an absence", "contract", "stores/redis/wire.py",
        """    r"|non local key)\\b"\n""", """    r")\\b"\n""",
        "tests/faults/test_redis.py -k each_error",
    ),
    Fault(
        "a full Redis settles nothing", "I5", REDIS_STATEMENTS,
        "extend = true, settle = true,", "extend = true,",
        "tests/faults/test_redis.py -k full_server",
    ),
    Fault(
        "a full Redis takes half an add", "I1", REDIS_STATEMENTS,
        "if EVEN_IF_FULL[ARGV[1]] then", "if true then",
        "tests/faults/test_redis.py -k full_server",
    ),
    Fault(
        "Redis hands parked jobs to everybody", "contract", "stores/redis/store.py",
        '"p" if after.parked else records', "records", PARKING,
    ),
    Fault(
        "a claim doesn't hear of tasks that were parked since", "contract", REDIS_STATEMENTS,
        "local changed = changes_first and changes(queues, entries, known)",
        "local changed = false",
        f"{REDIS_PARKING} -k meanwhile",
    ),
    Fault(
        "parking in Redis notifies nobody", "contract", REDIS_STATEMENTS,
        "    park.notify(parks)\n", "", f"{REDIS_PARKING} -k only_those",
    ),
    Fault(
        "parking in Redis wakes everybody", "contract", "stores/redis/notify.py",
        'return [f"q{queue}", f"t{task}"]', 'return [f"q{queue}"]',
        f"{REDIS_PARKING} -k only_those",
    ),
    Fault(
        "parking in Redis touches a key that it doesn't name", "I1", "stores/redis/store.py",
        " + keys.of_parked(parked)", "", f"{REDIS_PARKING} -k name_the_keys",
    ),
    Fault(
        "Redis hands out a parked job that an older release cancelled", "I1", REDIS_STATEMENTS,
        "      record = not old and park.as(id, record) == picked[i].member and record\n", "",
        f"{REDIS_PARKING} -k older_release",
    ),
    Fault(
        "Redis forgets tasks with parked jobs at once", "contract", "stores/redis/parking.lua",
        "FRESH, FORGET = 30000, 60000", "FRESH, FORGET = 0, 0",
        f"{REDIS_PARKING} -k come_and_go",
    ),
    Fault(
        "Redis keeps tasks without parked jobs for ever", "contract", REDIS_STATEMENTS,
        "  if park then park.write_entries(forgotten) end\n", "",
        f"{REDIS_PARKING} -k forgotten_a_while",
    ),
    Fault(
        "one script goes through all queues", "contract", "stores/redis/reading.py",
        "QUEUES = 100\n", "QUEUES = 100_000\n",
        "tests/faults/test_redis.py -k many_queues",
    ),
    Fault(
        "queues beyond the first portion are not found", "contract", "stores/redis/reading.py",
        "while not names or len(names) == QUEUES:", "while not names:",
        "tests/faults/test_redis.py -k many_queues",
    ),
    Fault(
        "a busy connection of the user's counts as another library's", "contract",
        LIBRARIES_OF_SQLITE,
        "    if connection in _names:\n        return identity(_names[connection])\n", "",
        LIBRARIES,
    ),
    # --- Meta, expiry and progress
    Fault(
        "a new run begins with the progress of the last", "fields", JOB,
        "        progress=None,\n        history=history,\n", "        history=history,\n", FIELDS,
    ),
    Fault(
        "a job that expires is dead", "fields", SHAPE,
        "Outcome.EXPIRE: State.CANCELLED", "Outcome.EXPIRE: State.DEAD", FIELDS,
    ),
    Fault(
        "a settlement forgets the progress", "fields", JOB,
        "progress=settlement.job.progress", "progress=None", FIELDS,
    ),
    Fault(
        "sqlite: jobs with meta are added without it", "fields", STATEMENTS,
        "if job.attempt or job.meta is not None or", "if job.attempt or", FIELDS,
    ),
    Fault(
        "sqlite: a claim leaves the progress of the last run", "fields", STATEMENTS,
        "lease_until_ms = ?, progress = null", "lease_until_ms = ?", FIELDS,
    ),
    Fault(
        "sqlite: a job that is deleted leaves its meta", "fields", "stores/sqlite/schema.sql",
        "create trigger job_meta_forgotten after delete on job when old.meta is not null begin",
        "create trigger job_meta_forgotten after delete on job when false begin", FIELDS,
    ),
    Fault(
        "sqlite: a page by meta goes on before its end", "pages", "stores/pager.py",
        "            self._below = n\n", "            self._below = n - 1\n", FIELDS,
    ),
    Fault(
        "sqlite: a page by meta forgets the other filters", "pages", "stores/pager.py",
        "                state in self._states\n                and ", "                ", FIELDS,
    ),
    Fault(
        "sqlite: the size of a batch forgets meta", "contract", SQLITE_ROWS,
        " + ifnull(octet_length(meta), 0)", "", BATCHES,
    ),
    Fault(
        "sqlite: plain jobs need the columns of this release", "contract", STATEMENTS,
        "        if job.attempt or job.meta", "        if True or job.meta", FILE,
    ),
    Fault(
        "PostgreSQL: whoever held a job last may finish it", "I2", PG_HOLDING,
        "job.fence = new.fence and lease_until_ms > %(now)s and not told"
        "\"\"\"\n\n\nasync def settle(",
        "lease_until_ms > %(now)s and not told\"\"\"\n\n\nasync def settle(", LEASES,
    ),
    Fault(
        "PostgreSQL: a lost lease may be finished", "I2", PG_HOLDING,
        "job.fence = new.fence and lease_until_ms > %(now)s and not told"
        "\"\"\"\n\n\nasync def settle(",
        "job.fence = new.fence\"\"\"\n\n\nasync def settle(", LEASES,
    ),
    Fault(
        "PostgreSQL leaves the progress of the last run", "fields", PG_CLAIMING,
        ", progress = null", "", FIELDS,
    ),
    Fault(
        "PostgreSQL keeps words from a task that it can't store", "fields", PG_HOLDING,
        'if progress is None or "\\0" not in progress.words:', "if True:", FIELDS,
    ),
    Fault(
        "PostgreSQL adds jobs without their meta", "fields", PG_STATEMENTS,
        "job.attempt or job.meta is not None or", "job.attempt or", FIELDS,
    ),
    Fault(
        "PostgreSQL lets nobody find jobs by meta after an upgrade", "contract", PG_SCHEMA_SQL,
        "privilege_type = 'SELECT' and", "false and", f"{PG_FAULTS} -k find_them_by_meta",
    ),
    Fault(
        "PostgreSQL reads all jobs with some meta for a page", "contract",
        "stores/postgres/browse.py",
        "order by name desc, value desc, n desc limit %(limit)s)",
        "order by n + 0 desc limit %(limit)s)", PG_PLANS,
    ),
    Fault(
        "Redis leaves the meta of a deleted job", "fields", REDIS_STATEMENTS,
        "  untag(gone, forget, leave)\n", "", REDIS_FIELDS,
    ),
    Fault(
        "Redis leaves the meta of a pruned job", "fields", REDIS_STATEMENTS,
        "        untag(old, forget, leave)\n", "", REDIS_FIELDS,
    ),
    Fault(
        "Redis adds meta under keys that it doesn't name", "I1", "stores/redis/store.py",
        " + (list(keys.META) if columns.metas else [])", "", REDIS_FIELDS,
    ),
    Fault(
        "Redis keeps the progress of a settled run", "fields", REDIS_STATEMENTS,
        "      if has_progress(started) then put(plain, SINCE, progress_field(id)) end\n", "",
        REDIS_FIELDS,
    ),
    Fault(
        "Redis writes progress where an older release stumbles over it", "contract",
        "stores/redis/records.py",
        'f"0{job.started_ms}"', 'f"p{job.started_ms}"', REDIS_FIELDS,
    ),
    Fault(
        "redis: jobs of another are found by a meta that was theirs", "fields",
        "stores/redis/browse.py", "if job and query.has_meta(job)]", "if job]", REDIS_FIELDS,
    ),
    Fault(
        "nats: meta is no filter", "fields", "stores/nats/browse.py",
        " and query.has_meta(job)", "", FIELDS,
    ),
    Fault(
        "nats: progress is kept at the cost of the history", "size", NATS_FITTING,
        "    if job.progress is not None:\n", "    if False:\n",
        "tests/unit/test_nats_fitting.py",
    ),
    Fault(
        "find takes the first of several pairs", "contract", "jobs.py",
        "    if meta is not None and len(pairs) != 1:\n", "    if False:\n",
        "tests/unit/test_api_jobs.py",
    ),
    # --- Callers that wait for results
    Fault(
        "watch: a caller that joins is not looked at", "contract", "ends.py",
        "            self._told([id])\n        try:", "            pass\n        try:",
        f"{RESULTS} -k between_two_looks",
    ),
    Fault(
        "watch: what is heard during a look is forgotten", "contract", "ends.py",
        "                self._looked_at[id] = True\n", "                pass\n",
        f"{RESULTS} -k heard_during_a_look",
    ),
    Fault(
        "watch: a caller that is gone is still waited for", "contract", "ends.py",
        "            others.remove(future)\n", "",
        f"{RESULTS} -k leaves_nothing",
    ),
    Fault(
        "watch: large jobs are read all at once", "contract", "ends.py",
        "total // len(jobs), self._weight // 2, 1", "1", f"{RESULTS} -k large_jobs",
    ),
    Fault(
        "watch: callers are not told that the store is away", "contract", "ends.py",
        "            self._told(list(self._waiting))\n", "", f"{RESULTS} -k store_is_away",
    ),
    Fault(
        "watch: memory tells nobody", "contract", MEMORY,
        "            self._watches.hear([job.id])\n", "            pass\n", WATCHING,
    ),
    Fault(
        "watch: another process's commits are not noticed", "contract", "stores/sqlite/notify.py",
        "                self.notify()\n", "                pass\n", WATCHING,
    ),
    Fault(
        "watch: NATS tells nobody of settled jobs", "contract", "stores/nats/store.py",
        "                self._ends.notify(taken)\n", "", WATCHING,
    ),
    Fault(
        "watch: Redis publishes though nobody waits", "contract", REDIS_STATEMENTS,
        "call('EXISTS', WATCHED) == 1 and {} or nil", "{}",
        f"{WAITING_CALLERS} -k nobody_waits_on_redis",
    ),
    Fault(
        "watch: Redis is not told that somebody waits", "contract", REDIS_STATEMENTS,
        "call('SET', WATCHED, '1', 'PX', ms)", "return 1", WATCHING,
    ),
    Fault(
        "watch: too many ids for a notification are lost", "contract", PG_SCHEMA_SQL,
        "then ids else 'l' end", "then ids else '[]' end",
        f"{WATCHING} -k long_and_odd",
    ),
    Fault(
        "watch: PostgreSQL notifies though nobody waits", "contract", PG_SCHEMA_SQL,
        "if tickwheel.is_watched() then", "if true then",
        f"{WAITING_CALLERS} -k nobody_waits_on_postgres",
    ),
    Fault(
        "watch: what Redis said while the connection was lost is missed", "I3",
        "stores/redis/notify.py",
        "        self._noted_until = 0\n        self._watches.hear(None)\n", "        pass\n",
        f"{WAITING_CALLERS} -k outlives_its_connection_to_redis",
    ),
    Fault(
        "watch: what PostgreSQL said while the connection was lost is missed", "I3",
        "stores/postgres/notify.py",
        "        self._noted_until = 0\n        self._watches.hear(None)\n", "        pass\n",
        f"{WAITING_CALLERS} -k outlives_its_connection_to_postgres",
    ),
    # --- What people on call are told
    Fault(
        "metrics: a run that begins again is late", "punctuality", "engine/counts.py",
        "            if job.history and started_before(job):\n", "            if False:\n", COUNTS,
    ),
    Fault(
        "metrics: due in the past is late", "punctuality", "engine/counts.py",
        "            if job.created_ms > due_ms:\n", "            if False:\n", COUNTS,
    ),
    Fault(
        "metrics: a job that expires is punctual", "punctuality", "engine/counts.py",
        "return Tally(sum(self.late) + expired, self.good)",
        "return Tally(sum(self.late), self.good)", COUNTS,
    ),
    Fault(
        "metrics: an outcome counts that the store refused", "metrics", "engine/counts.py",
        "            if settlement.outcome is DONE and kept:\n",
        "            if settlement.outcome is DONE:\n", COUNTS,
    ),
    Fault(
        "metrics: names are not bounded", "bounds", "engine/counts.py",
        "        name = name if len(self.tasks) < NAMES else OTHER\n", "", COUNTS,
    ),
    Fault(
        "alerts: the same is told again and again", "alerts", "engine/alerts.py",
        "now_ms - passed_ms < QUIET_MS", "False", ALERTS,
    ),
    Fault(
        "alerts: the last one is lost when the worker stops", "alerts", "engine/alerts.py",
        "            await asyncio.wait([telling], timeout=LAST_S)\n", "", ALERTS,
    ),
    Fault(
        "alerts: every worker tells of unserved jobs", "alerts", "engine/alerts.py",
        "if not workers or not speaks(self._worker, self._app, workers):", "if not workers:",
        ALERTS,
    ),
    # --- Callbacks
    Fault(
        "callbacks: an address is not judged where the connection is made", "safety",
        "callbacks/sending.py",
        "        if why is not None:\n            connecting",
        "        if False:\n            connecting",
        f"{HTTP_CALLBACKS} -k leads_inside",
    ),
    Fault(
        "callbacks: a redirect is followed", "safety", "callbacks/sending.py",
        "allow_redirects=False", "allow_redirects=True", f"{HTTP_CALLBACKS} -k redirect",
    ),
    Fault(
        "callbacks: a proxy of the environment is used", "safety", "callbacks/sending.py",
        "trust_env=False", "trust_env=True", f"{HTTP_CALLBACKS} -k proxy",
    ),
    Fault(
        "callbacks: an answer is decompressed", "safety", "callbacks/sending.py",
        "auto_decompress=False", "auto_decompress=True", f"{HTTP_CALLBACKS} -k decompressed",
    ),
    Fault(
        "callbacks: an answer is read to its end, however long it is", "safety",
        "callbacks/sending.py",
        "while count < READ_BYTES", "while True", f"{HTTP_CALLBACKS} -k start_of_an_answer",
    ),
    Fault(
        "callbacks: what another program enqueued is not checked", "safety", "callbacks/api.py",
        "        self.allowed.check(target)\n        return _Request(", "        return _Request(",
        f"{HTTP_CALLBACKS} -k another_program",
    ),
    Fault(
        "callbacks: an address inside an IPv6 address is not seen", "safety",
        "callbacks/addresses.py",
        "    if ip in _TRANSLATED:\n        found", "    if False:\n        found",
        "tests/unit/test_callback_addresses.py",
    ),
    Fault(
        "callbacks: a host that hangs takes all slots", "I4", "callbacks/hosts.py",
        "elif not self._has_share(place, host, now_ms, share):", "elif False:",
        f"{CALLBACK_FAULTS} -k hang",
    ),
    Fault(
        "callbacks: a host that was quick keeps its share when it hangs", "I4",
        "callbacks/hosts.py", "now_ms - host.quick_ms <= QUICK_MS", "True", CALLBACK_ANSWERS,
    ),
    Fault(
        "callbacks: hosts that hang take the last slots", "I4", "callbacks/hosts.py",
        "if not answers and free <=", "if False and free <=", CALLBACK_ANSWERS,
    ),
    Fault(
        "callbacks: workers of one process share out their slots together", "I4",
        "callbacks/hosts.py", "_fits(share.of[place], room - share.active,",
        "_fits(host.active, room - self.active,", CALLBACK_ANSWERS,
    ),
    Fault(
        "callbacks: thousands that hang come back again and again", "I4", "callbacks/hosts.py",
        "max(away_ms, self._in_turn(host, now_ms))", "away_ms", CALLBACK_ANSWERS,
    ),
    Fault(
        "callbacks: an end is told by a worker that has lost the job", "I4", "engine/following.py",
        "if _lost(job, now, now_ms)", "if False", "tests/unit/test_following.py",
    ),
    Fault(
        "audit: the secret of a key is noted", "I5", "operate/audit.py",
        "without_keys(getattr(self, name))", "getattr(self, name)", "tests/unit/test_keys.py",
    ),
    Fault(
        "callbacks: a failing host is never left alone", "I5", "callbacks/hosts.py",
        "if host.failures >= self._break_after:", "if False:", f"{HTTP_CALLBACKS} -k keeps_failing",
    ),
    Fault(
        "callbacks: on_dead is posted only for jobs that ran", "I5", "engine/following.py",
        "if follow is None or each", "if follow is None or each.started_ms is None or each",
        f"{HTTP_CALLBACKS} -k workers_died",
    ),
    Fault(
        "callbacks: an end is written although what follows could not be added", "I5",
        "engine/following.py", "settlements = [_again(each) if id(each) in following",
        "settlements = [_again(each) if False", f"{HTTP_CALLBACKS} -k what_follows",
    ),
    Fault(
        "callbacks: an end is written before what follows is added", "I5",
        "engine/following.py", "except StoreUnavailable:\n                raise",
        "except StoreUnavailable:\n                pass", f"{HTTP_CALLBACKS} -k what_follows",
    ),
    Fault(
        "http: a server that stops lets requests wait", "safety", "http/server.py",
        "            stopping.set()\n", "", f"{HTTP_WAITING} -k stops_ends",
    ),
    Fault(
        "http: a stuck request has no answer of ours", "safety", "http/server.py",
        "if started or not stopping.is_set():", "if True:", f"{HTTP_WAITING} -k stuck",
    ),
    Fault(
        "http: any number of requests may wait", "safety", "http/api.py",
        "if self._waiting >= WAITING_MOST:", "if False:", f"{HTTP_WAITING} -k only_so_many",
    ),
    Fault(
        "http: a key for some tasks sees counts of all", "safety", "http/operating.py",
        "return caller.may(Scope.READ, task=ANY_NAME)", "return True",
        f"{HTTP_ACCESS} -k no_counts",
    ),
    Fault(
        "http: a hidden value of meta can be guessed", "safety", "http/filters.py",
        "if meta is not None and incoming.service.redaction.hides",
        "if False and incoming.service.redaction.hides", f"{HTTP_ACCESS} -k guessed",
    ),
    Fault(
        "audit: a bulk operation has the values of meta", "safety", "http/jobs.py",
        'said["meta"] = " "', '_ = " "', f"{HTTP_ACCESS} -k bulk_operation",
    ),
    Fault(
        "audit: a command's write is not in the log", "safety", "cli/auditing.py",
        "            if notes.count:\n", "            if False:\n", "tests/faces/test_keys_cli.py",
    ),
    Fault(
        "webhooks: an old request is genuine", "safety", "webhooks.py",
        "if not abs(ahead_s) <= within_s:", "if ahead_s > within_s:", "tests/unit/test_webhooks.py",
    ),
    Fault(
        "webhooks: an id may contain a dot", "safety", "webhooks.py",
        '_ID = re.compile(r"[!-\\-/-~]+")', '_ID = re.compile(r"[!-~]+")',
        "tests/unit/test_webhooks.py",
    ),
    # --- The judge sees from outside what only faults bring to light
    Fault(
        "sqlite: whoever held a job last may settle it", "I2", JOB,
        "and claim.fence == job.fence and", "and", f"{JUDGE} -k sqlite",
    ),
    Fault(
        "an add is acknowledged before it is committed", "I1", SQLITE,
        "            added += await self._write(statements.add, part)\n",
        "            asyncio.ensure_future(self._write(statements.add, part))\n"
        "            added += [True] * len(part)\n",
        f"{JUDGE} -k sqlite",
    ),
    # --- Trust
    Fault(
        "a signature is not compared", "trust", "trust/keys.py",
        "        if not hmac.compare_digest(expected.encode(), mac.encode(errors=\"replace\")):\n",
        "        if False:\n", SEALED,
    ),
    Fault("the task is not signed", "trust", SEALS, "        job.task,\n        job.queue,\n",
          "        job.queue,\n", SEALED),
    Fault("the meta is not signed", "trust", SEALS,
          "        sorted(job.meta.items()) if job.meta else None,\n", "", SEALED),
    Fault(
        "an unsigned job runs", "trust", SEALS,
        "        if self._signer is not None and self._required:\n", "        if False:\n", SEALED,
    ),
    Fault(
        "a job runs before the time that was signed", "trust", SEALS,
        "job.due_ms < seal.due_ms", "False", SEALED,
    ),
    Fault(
        "an expiry can be moved", "trust", SEALS,
        "            if job.expires_ms not in (None, seal.expires_ms):\n",
        "            if False:\n", SEALED,
    ),
    Fault(
        "what is encrypted for one job can be read in another", "trust", SEALS,
        '["tickwheel", what, id, task]', '["tickwheel", what]', SEALED,
    ),
    Fault(
        "a result can be taken for arguments", "trust", SEALS,
        '["tickwheel", what, id, task]', '["tickwheel", id, task]', SEALED,
    ),
    Fault(
        "whoever pauses a schedule signs it", "trust", SEALS,
        "            if schedule.rule is schedule.opened:\n", "            if False:\n", SEALED,
    ),
    Fault(
        "an envelope that can't be parsed stops the claim", "trust", "envelope.py",
        " or len(seal) > _SEAL_LIMIT", "", SEALED,
    ),
    Fault(
        "the errors of runs are plain", "trust", SEALS,
        "        elif settlement.outcome in _OF_TASKS:\n", "        elif False:\n", SEALED,
    ),
    Fault(
        "a relay signs what it finds in the outbox", "trust", "app.py",
        "unsealed(client.store)", "client.store", TRUST,
    ),
    Fault(
        "jobs in the outbox are plain", "trust", "access.py",
        "seal_all(self.store, jobs)", "jobs", TRUST,
    ),
    Fault(
        "only the first key opens", "trust", "trust/keys.py",
        "        self._keys = keys\n",
        "        self._keys = dict([next(iter(keys.items()))])\n", TRUST,
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
        env=os.environ
        | {"PYTHONPATH": str(folder / "src"), "COLUMNS": "300", "JUDGE_SECONDS": "20"},
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
    survivors = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for fault, result in zip(faults, pool.map(tried, faults), strict=True):
            survivors += not result.caught_by
            caught = result.caught_by or f"[bold red]{escape(result.problem)}[/]"
            console.print(
                f"[bold]{escape(fault.name)}[/] ({fault.breaks}, {fault.file}, "
                f"{result.seconds:.0f} s): {caught}"
            )
    console.print(f"{len(faults) - survivors} of {len(faults)} planted faults were caught.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
