"""The PostgreSQL store's schema: which version is there, and how it comes to be the one we know."""

from __future__ import annotations

import re
from pathlib import Path

from tickwheel.errors import StoreIncompatible
from tickwheel.stores.postgres.steps import Link

OLDEST_SERVER = 130000


def parts_of(schema: str) -> list[str]:
    """The numbered parts, for this schema. Each ends by noting its number."""
    text = Path(__file__).with_name("schema.sql").read_text()
    text = text.replace("'tickwheel'", f"'{schema}'")
    text = re.sub(r"\btickwheel(?=[.;])", schema, text)
    parts = [part.partition("\n")[2].strip() for part in text.split("\n-- part ")[1:]]
    return [
        f"{part}\n\nupdate {schema}.version set version = {number};\n"
        for number, part in enumerate(parts, 1)
    ]


async def version_of(db: Link, schema: str) -> int | None:
    """The version of the schema; None where there is none, or none that this role may see."""
    # Not by to_regclass: that may answer from what this session knew before it waited for a lock.
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


async def make_ready(db: Link, schema: str) -> None:
    """Leave a schema of our version behind, or say what has to be done by whom."""
    known = len(parts_of(schema))
    version = await version_of(db, schema)
    if version is None or version < known:
        if not await _may_migrate(db, schema, version):
            raise StoreIncompatible(_missing(schema, version, known))
        await migrate(db, schema, False)
        version = await version_of(db, schema)
    refuse_newer(schema, version)


async def migrate(db: Link, schema: str, dry_run: bool) -> tuple[int, int, str]:
    """Run the parts that are missing, all or none; the versions before and after, and the SQL."""
    await _check_server(db)
    parts = parts_of(schema)
    async with db.transaction():
        # One at a time: nodes of a new release start together.
        await db.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"tickwheel {schema}",))
        version = await version_of(db, schema) or 0
        refuse_newer(schema, version)
        for part in [] if dry_run else parts[version:]:
            await db.execute(part.encode(), prepare=False)
    return version, len(parts), "\n".join(parts[version:])


def refuse_newer(schema: str, version: int | None) -> None:
    known = len(parts_of(schema))
    if version is not None and version > known:
        raise StoreIncompatible(
            f"the schema {schema} was made by a newer Tickwheel (version {version}, this one knows "
            f"{known}): upgrade Tickwheel, or use another schema"
        )


def _missing(schema: str, version: int | None, known: int) -> str:
    if version is None:
        return (
            f"there is no Tickwheel schema {schema!r} that this role may use: "
            "run tickwheel migrate as the database's owner, and grant this role its rights"
        )
    return (
        f"the schema {schema!r} is of version {version} and this Tickwheel needs {known}, "
        "which this role may not change: run tickwheel migrate as the schema's owner"
    )


async def _may_migrate(db: Link, schema: str, version: int | None) -> bool:
    """Who owns the schema may; where there is none, who may make one."""
    cursor = await db.execute(
        """select coalesce(
               (select pg_has_role(nspowner, 'usage') from pg_namespace where nspname = %s),
               has_database_privilege(current_database(), 'create'))""",
        (schema,),
    )
    return await cursor.fetchone() == (True,)


async def _check_server(db: Link) -> None:
    if db.info.server_version < OLDEST_SERVER:
        raise StoreIncompatible(
            f"PostgreSQL {OLDEST_SERVER // 10000} or later is needed; "
            f"this server is {db.info.server_version // 10000}"
        )
    [encoding] = await (await db.execute("show server_encoding")).fetchone() or [""]
    if encoding != "UTF8":
        raise StoreIncompatible(
            f"the database's encoding is {encoding}, which can't keep every text: "
            "create it with encoding 'UTF8'"
        )
