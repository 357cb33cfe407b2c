"""The PostgreSQL store's schema: which version a database has, and how it is upgraded."""

from __future__ import annotations

import re
from pathlib import Path

from tickwheel.errors import StoreIncompatible
from tickwheel.stores.postgres.pool import Connection

OLDEST_SERVER = 130000
# For how long a node that is cut off while it migrates keeps others from migrating.
PATIENCE_MS = 5000


def parts_of(schema: str) -> list[str]:
    """The numbered parts, for a schema of this name."""
    text = Path(__file__).with_name("schema.sql").read_text()
    text = text.replace("'tickwheel'", f"'{schema}'")
    text = re.sub(r"\btickwheel(?=[.;])", schema, text)
    return [part.partition("\n")[2].strip() + "\n" for part in text.split("\n-- part ")[1:]]


def missing_of(schema: str, version: int) -> list[str]:
    """The parts that a schema of this version lacks. The new version is written last: before part 3
    its table has no key, and can't be updated if it is replicated."""
    missing = parts_of(schema)[version:]
    known = version + len(missing)
    return [*missing, f"update {schema}.version set version = {known};\n"] if missing else []


async def version_of(db: Connection, schema: str) -> int | None:
    """The version of the schema; None if there is none, or none that this role may see."""
    # Not to_regclass: it may answer with what this session knew before it waited for a lock.
    cursor = await db.execute(
        """select exists (
               select from pg_class join pg_namespace on pg_namespace.oid = relnamespace
               where nspname = %s and relname = 'version'
                 and has_schema_privilege(pg_namespace.oid, 'usage'))""",
        (schema,),
    )
    if await cursor.fetchone() != (True,):
        return None
    [version] = await (await db.execute(f"select version from {schema}.version")).fetchone() or [0]
    return int(version)


async def make_ready(db: Connection, schema: str) -> None:
    """Create or upgrade the schema if it is missing or old; if this role may not, say who must."""
    known = len(parts_of(schema))
    version = await version_of(db, schema)
    if version is None or version < known:
        if not await _may_migrate(db, schema, version):
            raise StoreIncompatible(_missing(schema, version, known))
        await migrate(db, schema, False)
        version = await version_of(db, schema)
    refuse_newer(schema, version)


async def migrate(db: Connection, schema: str, dry_run: bool) -> tuple[int, int, str]:
    """Run the missing parts, all or none; returns the versions before and after, and the SQL."""
    await _check_server(db)
    async with db.transaction():
        # One at a time: nodes of a new release start together.
        await db.execute(
            """select set_config('idle_in_transaction_session_timeout', %s, true),
                      pg_advisory_xact_lock(hashtext(%s))""",
            (str(PATIENCE_MS), f"tickwheel {schema}"),
        )
        version = await version_of(db, schema) or 0
        refuse_newer(schema, version)
        missing = missing_of(schema, version)
        for part in [] if dry_run else missing:
            await db.execute(part.encode(), prepare=False)
    return version, len(parts_of(schema)), "\n".join(missing)


def refuse_newer(schema: str, version: int | None) -> None:
    known = len(parts_of(schema))
    if version is not None and version > known:
        raise StoreIncompatible(
            f"the schema {schema} was created by a newer Tickwheel (version {version}, this one "
            f"knows {known}): upgrade Tickwheel, or use another schema"
        )


def _missing(schema: str, version: int | None, known: int) -> str:
    if version is None:
        return (
            f"there is no Tickwheel schema {schema!r} that this role may use: "
            "run tickwheel migrate as the database's owner, and grant this role its privileges"
        )
    return (
        f"the schema {schema!r} has version {version} and this Tickwheel needs {known}, but this "
        "role may not change it: run tickwheel migrate as the schema's owner"
    )


async def _may_migrate(db: Connection, schema: str, version: int | None) -> bool:
    """The schema's owner may; if there is no schema, whoever may create one."""
    cursor = await db.execute(
        """select coalesce(
               (select pg_has_role(nspowner, 'usage') from pg_namespace where nspname = %s),
               has_database_privilege(current_database(), 'create'))""",
        (schema,),
    )
    return await cursor.fetchone() == (True,)


async def _check_server(db: Connection) -> None:
    if db.info.server_version < OLDEST_SERVER:
        raise StoreIncompatible(
            f"PostgreSQL {OLDEST_SERVER // 10000} or later is needed; "
            f"this server is {db.info.server_version // 10000}"
        )
    [encoding] = await (await db.execute("show server_encoding")).fetchone() or [""]
    if encoding != "UTF8":
        raise StoreIncompatible(
            f"the database's encoding is {encoding}, which can't store every text: "
            "create it with encoding 'UTF8'"
        )
