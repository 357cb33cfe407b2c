"""What an add survives on this PostgreSQL server, and what else its operator should know."""

from __future__ import annotations

from tickwheel.span import span_text
from tickwheel.store import Durability, Finding, Level
from tickwheel.stores.postgres.steps import Link

MIB = 1024**2
# Dead rows beyond these are more than a vacuum leaves between two of its rounds.
DEAD_ROWS, DEAD_SHARE = 50_000, 0.5
# A transaction this old keeps dead rows from being cleaned up; and this old, it hurts.
OLD_MS, ANCIENT_MS = 300_000, 3_600_000
# Shares of the server's connections that are in use.
MANY, MOST = 0.8, 0.95

_SETTINGS = (
    "synchronous_commit", "fsync", "full_page_writes", "wal_level", "synchronous_standby_names",
)  # fmt: skip


async def durability(db: Link) -> Durability:
    cursor = await db.execute(
        "select name, setting from pg_settings where name = any(%s)", (list(_SETTINGS),)
    )
    settings: dict[str, str] = dict(await cursor.fetchall())
    cursor = await db.execute("select pg_is_in_recovery()")
    replica = await cursor.fetchone() == (True,)
    return judged(settings, server=_version(db), replica=replica)


def judged(settings: dict[str, str], *, server: str, replica: bool) -> Durability:
    """What these settings of a server amount to."""
    commit = settings["synchronous_commit"]
    waits = commit != "off"
    fixes = []
    if not waits:
        fixes.append("set synchronous_commit = on: a crash can undo the last commits")
    for name in ("fsync", "full_page_writes"):
        if settings[name] != "on":
            fixes.append(f"set {name} = on: a power loss can damage the whole database")
    if replica:
        fixes.append("this server is a replica and takes no jobs: connect to the primary")
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


def _version(db: Link) -> str:
    number = db.info.server_version
    return f"{number // 10000}.{number % 10000}"


async def findings(db: Link, schema: str, *, hearing: bool | None, pooled: bool) -> list[Finding]:
    return [
        Finding(Level.OK, "server", f"PostgreSQL {_version(db)}"),
        *await _of_tables(db, schema),
        *await _of_vacuum(db),
        await _of_old_transactions(db),
        await _of_connections(db),
        _of_news(hearing, pooled),
    ]


async def _of_tables(db: Link, schema: str) -> list[Finding]:
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
                "see whether autovacuum runs, and what holds it back" if bloated else "",
            )
        )
    return found


async def _of_vacuum(db: Link) -> list[Finding]:
    cursor = await db.execute("show autovacuum")
    if await cursor.fetchone() == ("on",):
        return []
    words = "autovacuum is off: finished jobs leave dead rows that nobody cleans up"
    return [Finding(Level.BAD, "autovacuum", words, "set autovacuum = on")]


async def _of_old_transactions(db: Link) -> Finding:
    # Of the sessions of other roles only members of pg_read_all_stats see more than that they are.
    cursor = await db.execute(
        """select pid, (extract(epoch from clock_timestamp() - xact_start) * 1000)::bigint
           from pg_stat_activity
           where datname = current_database() and pid <> pg_backend_pid()
             and backend_type = 'client backend' and xact_start is not null
           order by xact_start limit 1"""
    )
    pid, age_ms = await cursor.fetchone() or (None, 0)
    if age_ms < OLD_MS:
        return Finding(Level.OK, "transactions", "none is open for long")
    return Finding(
        Level.BAD if age_ms >= ANCIENT_MS else Level.WARN,
        "transactions",
        f"process {pid} has had one open for {span_text(age_ms)}: dead rows pile up behind it, "
        "and claims slow down",
        f"end it: select pg_terminate_backend({pid})",
    )


async def _of_connections(db: Link) -> Finding:
    cursor = await db.execute(
        """select (select count(*) from pg_stat_activity where backend_type = 'client backend'),
                  current_setting('max_connections')::int
                  - current_setting('superuser_reserved_connections')::int"""
    )
    used, most = await cursor.fetchone() or (0, 1)
    share = used / most
    level = Level.BAD if share >= MOST else Level.WARN if share >= MANY else Level.OK
    fix = "" if level is Level.OK else "raise max_connections, lower pool= in the store URLs"
    return Finding(level, "connections", f"{used} of {most} are in use", fix)


def _of_news(hearing: bool | None, pooled: bool) -> Finding:
    if hearing is False:
        words = "notifications don't arrive: workers look for new jobs twice a second instead"
        fix = "give workers a URL that goes past the transaction pooler" if pooled else ""
        return Finding(Level.WARN, "notifications", words, fix)
    known = "arrive" if hearing else "are listened for once a worker waits"
    return Finding(Level.OK, "notifications", known + (", through a pooler" if pooled else ""))
