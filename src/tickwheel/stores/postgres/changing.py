"""Changes that others ask for, in PostgreSQL: jobs are read, decided on and written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from tickwheel import changes
from tickwheel.batch import portions
from tickwheel.changes import Put
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job, Move
from tickwheel.stores.postgres import rows
from tickwheel.stores.postgres.pool import Connection
from tickwheel.stores.postgres.rows import ROW_BYTES, write_jobs
from tickwheel.stores.postgres.statements import add

T = TypeVar("T")

# How often a change is tried that others keep getting in the way of, and the pauses between.
CHANGE_TRIES, CHANGE_PAUSE_S = 30, 0.002


async def change(
    db: Connection,
    schema: str,
    ids: Sequence[str],
    decide: Callable[[Job | None, str], tuple[T, Job | None]],
) -> dict[str, T]:
    """Read jobs, let `decide` say what becomes of each and what to answer, and write that, unless
    they have changed since: then it is asked again. An unknown job may become a new one."""
    answers: dict[str, T] = {}
    rest = sorted(set(ids))
    for tries in range(CHANGE_TRIES):
        cursor = await db.execute(
            f"select id, {ROW_BYTES} from {schema}.job where id = any(%s)", (rest,)
        )
        sizes = dict.fromkeys(rest, 0) | dict(await cursor.fetchall())
        rest = []
        for some in portions(list(sizes.items()), itemgetter(1)):
            seen = await rows.marked(db, schema, [id for id, _ in some])
            changed, new = [], []
            for id, _ in some:
                mark, before = seen.get(id, ("", None))
                answers[id], after = decide(before, id)
                if after is not None and after is not before:
                    new += [after] if before is None else []
                    changed += [(mark, after)] if before is not None else []
            written = await write_jobs(db, schema, changed)
            if new:
                added = await add(db, schema, new)
                written |= {job.id for job, ok in zip(new, added, strict=True) if ok}
            tried = [job.id for _, job in changed] + [job.id for job in new]
            rest += [id for id in tried if id not in written]
        if not rest:
            return answers
        await asyncio.sleep(random.uniform(0, CHANGE_PAUSE_S * min(tries + 1, 10)))
    raise StoreUnavailable(f"{len(rest)} jobs kept changing while they were being changed")


async def ask(db: Connection, schema: str, asks: Sequence[Put | Move], now_ms: int) -> list[Any]:
    """Put or move."""
    asked = changes.by_id(asks)

    def decide(job: Job | None, id: str) -> tuple[list[Any], Job | None]:
        return asked[id].of(job, now_ms=now_ms)

    return changes.in_order(asks, await change(db, schema, list(asked), decide))
