"""A store with very many jobs in all states, filled within seconds, for what must stay fast."""

from __future__ import annotations

import time
from pathlib import Path

import apsw

from tickwheel.store import Store, open_store

QUEUES = ("default", "mail", "reports", "billing")
# Of a hundred jobs, so many have ended so; five run, and the others wait.
DONE, DEAD, CANCELLED, RUNNING = 35, 4, 1, 5

# One statement for all: rows would have to pass through Python otherwise.
_FILL = """
with recursive number(i) as (select 0 union all select i + 1 from number where i < :jobs - 1)
insert into job (
    id, task, payload, queue, priority, due_ms, created_ms, state, attempt, failures, worker,
    lease_until_ms, started_ms, ended_ms, error, traceback, result, history, meta)
select
    printf('job-%08d', i), iif(i % 3 = 0, 'send', 'pack'),
    json_object('order', i, 'note', 'order number ' || i, 'password', 'secret-' || i),
    'Q' || (i / 100 % 4), i / 400 % 4,
    -- What waits is due within an hour, some of it by now.
    :now + iif(part < 45, -60000 - i % 3600000, (i * 7919) % 3600000 - 120000),
    :now - 3600000 - i % 1000, state,
    iif(state = 'waiting', i % 50 = 0, 1), iif(state = 'dead', 3, i % 50 = 0),
    iif(state = 'running', 'worker-' || (i % 7), null),
    iif(state = 'running', :now + 86400000, null),
    iif(state = 'running', :now, null),
    iif(state in ('done', 'dead', 'cancelled'), :now - (i * 31) % 86400000, null),
    iif(state = 'dead', 'ValueError: no mailbox for ''user' || i || '''' || ' on host ' || (i % 12),
        null),
    iif(state = 'dead', 'Traceback (most recent call last): …', null),
    iif(state = 'done', '{"order":1}', null), '[]',
    iif(i % 10 = 0, json_object('customer', cast(i % 1000 as text)), null)
from (select i, i % 100 as part, case
    when i % 100 < :done then 'done' when i % 100 < :done + :dead then 'dead'
    when i % 100 < :done + :dead + :cancelled then 'cancelled'
    when i % 100 < :done + :dead + :cancelled + :running then 'running'
    else 'waiting' end as state from number)
"""


async def fill(path: str | Path, jobs: int = 1_000_000) -> None:
    """Create the embedded store at this path with so many jobs, as of now."""
    store: Store = open_store(f"sqlite:///{path}")
    await store.open()
    await store.close()
    db = apsw.Connection(str(path))
    names = "case i / 100 % 4 " + " ".join(
        f"when {n} then '{name}'" for n, name in enumerate(QUEUES)
    )
    db.execute("pragma synchronous = off")
    with db:
        db.execute(
            _FILL.replace("'Q' || (i / 100 % 4)", f"{names} end"),
            {
                "jobs": jobs,
                "now": time.time_ns() // 1_000_000,
                "done": DONE,
                "dead": DEAD,
                "cancelled": CANCELLED,
                "running": RUNNING,
            },
        )
    db.execute("pragma wal_checkpoint(truncate)")
    db.close()
