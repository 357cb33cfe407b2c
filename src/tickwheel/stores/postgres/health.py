"""What an add survives on this PostgreSQL server, and what its operator should know about it."""

from __future__ import annotations

from tickwheel.duration import duration_text
from tickwheel.store import Durability, Finding, Level, Size
from tickwheel.stores.postgres.pool import Connection

MIB = 1024**2
# More dead rows than these are too many for a table that is vacuumed regularly.
DEAD_ROWS, DEAD_SHARE = 50_000, 0.5
# The age of a transaction that keeps dead rows from being removed: worth a warning, and harmful.
OLD_MS, ANCIENT_MS = 300_000, 3_600_000
# Workers that fold their counts leave fewer rows than this.
MANY_COUNTS = 100_000
# Shares of the server's connections in use: worth a warning, and nearly exhausted.
MANY, MOST = 0.8, 0.95

_SETTINGS = (
    "synchronous_commit", "fsync", "full_page_writes", "wal_level", "synchronous_standby_names",
)  # fmt: skip


async def durability(db: Connection) -> Durability:
    cursor = await db.execute(
        "select name, setting from pg_settings where name = any(%s)", (list(_SETTINGS),)
    )
    settings: dict[str, str] = dict(await cursor.fetchall())
    cursor = await db.execute("select pg_is_in_recovery()")
    replica = await cursor.fetchone() == (True,)
    return judged(settings, server=_version(db), replica=replica)


def judged(settings: dict[str, str], *, server: str, replica: bool) -> Durability:
    """What jobs survive with these settings."""
    commit = settings["synchronous_commit"]
    waits = commit != "off"
    fixes = []
    if not waits:
        fixes.append("set synchronous_commit = on: a crash can undo the last commits")
    for name in ("fsync", "full_page_writes"):
        if settings[name] != "on":
            fixes.append(f"set {name} = on: a power loss can damage the whole database")
    if replica:
        fixes.append("this server is a replica and accepts no jobs: connect to the primary")
    standby = settings["synchronous_standby_names"] != "" and commit in ("on", "remote_apply")
    power_loss = waits and settings["fsync"] == settings["full_page_writes"] == "on"
    said = ", ".join(f"{name}={settings[name]}" for name in _SETTINGS[:3])
    copies = "a synchronous standby" if standby else "no synchronous standby"
    return Durability(
        process_crash=waits,
        power_loss=power_loss,
        machine_loss=power_loss and standby,
        summary=f"PostgreSQL {server}, {said}, wal_level={settings['wal_level']}, {copies}",
        fixes=tuple(fixes),
    )


def _version(db: Connection) -> str:
    number = db.info.server_version
    return f"{number // 10000}.{number % 10000}"


async def findings(db: Connection, schema: str) -> list[Finding]:
    return [
        Finding(Level.OK, "server", f"PostgreSQL {_version(db)}"),
        *await _of_tables(db, schema),
        *await _of_vacuum(db),
        await _of_old_transactions(db),
        await _of_connections(db),
    ]


async def of_counts(db: Connection, schema: str, unfolded: str) -> Finding:
    """`unfolded` says why the last attempt to fold them failed; empty if it succeeded."""
    cursor = await db.execute(
        f"select count(*) from (select from {schema}.tally limit {MANY_COUNTS + 1}) as counted"
    )
    [rows] = await cursor.fetchone() or [0]
    if unfolded:
        words = f"the rows that add up to the counts of jobs can't be folded: {unfolded}"
        fix = "remove the cause: until then, listing the queues gets slower and slower"
        return Finding(Level.BAD, "counts", words, fix)
    if rows > MANY_COUNTS:
        words = f"more than {MANY_COUNTS:,} rows add up to the counts of jobs: they are not folded"
        fix = "look in the workers' logs for the reason; listing the queues folds some of them"
        return Finding(Level.WARN, "counts", words, fix)
    return Finding(Level.OK, "counts", f"the sum of {rows:,} rows")


async def _of_tables(db: Connection, schema: str) -> list[Finding]:
    cursor = await db.execute(
        """select relname, pg_table_size(relid), pg_indexes_size(relid), n_live_tup, n_dead_tup
           from pg_stat_user_tables where schemaname = %s and relname in ('job', 'tally')
           order by relname""",
        (schema,),
    )
    found = []
    for name, table, indexes, live, dead in await cursor.fetchall():
        bloated = dead > DEAD_ROWS and dead > DEAD_SHARE * live
        found.append(
            Finding(
                Level.WARN if bloated else Level.OK,
                f"table {name}",
                f"{table / MIB:,.1f} MiB and {indexes / MIB:,.1f} MiB of indexes; "
                f"about {live:,} rows, {dead:,} dead",
                "check whether autovacuum runs, and what holds it back" if bloated else "",
            )
        )
    return found


async def sizes(db: Connection, schema: str) -> list[Size]:
    """Of the tables, as the files are now. How many rows there are is an estimate of the server."""
    cursor = await db.execute(
        """select relname, pg_table_size(relid), pg_indexes_size(relid), n_live_tup
           from pg_stat_user_tables where schemaname = %s""",
        (schema,),
    )
    found = {name: rest for name, *rest in await cursor.fetchall()}
    table, indexes, rows = found.pop("job", (0, 0, 0))
    return [
        Size("Table of jobs", int(table)),
        Size("Its indexes", int(indexes)),
        Size("Its rows, about", int(rows), "rows"),
        Size("Other tables and indexes", sum(int(t + i) for t, i, _ in found.values())),
    ]


async def _of_vacuum(db: Connection) -> list[Finding]:
    cursor = await db.execute("show autovacuum")
    if await cursor.fetchone() == ("on",):
        return []
    words = "autovacuum is off: finished jobs leave dead rows that are never removed"
    return [Finding(Level.BAD, "autovacuum", words, "set autovacuum = on")]


async def _of_old_transactions(db: Connection) -> Finding:
    # Only members of pg_read_all_stats see the transactions of other roles.
    cursor = await db.execute(
        """select pid, (extract(epoch from clock_timestamp() - xact_start) * 1000)::bigint
           from pg_stat_activity
           where datname = current_database() and pid <> pg_backend_pid()
             and backend_type = 'client backend' and xact_start is not null
           order by xact_start limit 1"""
    )
    pid, age_ms = await cursor.fetchone() or (None, 0)
    if age_ms < OLD_MS:
        return Finding(Level.OK, "transactions", "none has been open for long")
    return Finding(
        Level.BAD if age_ms >= ANCIENT_MS else Level.WARN,
        "transactions",
        f"process {pid} has had one open for {duration_text(age_ms)}: dead rows pile up behind it, "
        "and claims slow down",
        f"end it: select pg_terminate_backend({pid})",
    )


async def _of_connections(db: Connection) -> Finding:
    cursor = await db.execute(
        """select (select count(*) from pg_stat_activity where backend_type = 'client backend'),
                  current_setting('max_connections')::int
                  - current_setting('superuser_reserved_connections')::int"""
    )
    used, most = await cursor.fetchone() or (0, 1)
    share = used / most
    level = Level.BAD if share >= MOST else Level.WARN if share >= MANY else Level.OK
    fix = "" if level is Level.OK else "raise max_connections, or lower pool= in the store URLs"
    return Finding(level, "connections", f"{used} of {most} are in use", fix)


def of_notifications(hearing: bool | None, pooled: bool) -> Finding:
    if hearing is False:
        words = "notifications don't arrive: workers check for new jobs twice a second instead"
        fix = "give workers a URL that bypasses the transaction pooler" if pooled else ""
        return Finding(Level.WARN, "notifications", words, fix)
    known = "they arrive" if hearing else "they are used once a worker waits"
    return Finding(Level.OK, "notifications", known + (", through a pooler" if pooled else ""))
