"""Whether a Redis server can be used, what it guarantees, and what an operator should know."""

from __future__ import annotations

import re
from typing import Any

from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable
from tickwheel.store import Durability, Finding, Level, Size
from tickwheel.stores.redis.url import RedisOptions
from tickwheel.stores.redis.wire import Wire

# The oldest version that is tested. Older ones have all that the script needs, but known bugs.
LEAST = (6, 2)
# A script that takes longer than this delays everybody.
SLOW_MICROS = 50_000
NEARLY_FULL = 0.8
# How often `appendfsync everysec` syncs.
SYNCED_MS = 1000
MIB = 1024**2

_VERSION = re.compile(r"(\d+)\.(\d+)")


# --- Opening


async def check(wire: Wire, options: RedisOptions) -> None:
    """Refuse a server that is too old, or that may drop jobs to make room."""
    info = await _info(wire)
    name, version = _server(info)
    found = _VERSION.match(version)
    if found and (int(found[1]), int(found[2])) < LEAST:
        raise StoreIncompatible(f"{name} {version} is too old: use 6.2 or later")
    if info.get("cluster_enabled") == "1" and not options.cluster:
        # Even if this node has our keys now: they may be moved.
        raise StoreError(f"{options.where} is a node of a cluster: add cluster=true to the URL")
    policy = info.get("maxmemory_policy", "noeviction")
    if int(info.get("maxmemory", 0)) and policy != "noeviction" and not options.eviction_allowed:
        raise StoreIncompatible(
            f"{name} at {options.where} may drop jobs when its memory is full "
            f"(maxmemory-policy {policy}): CONFIG SET maxmemory-policy noeviction, use another "
            "server for jobs, or accept the loss with eviction=allowed in the URL"
        )


async def _info(wire: Wire) -> dict[str, str]:
    return as_fields(await wire.ask("INFO"))


def as_fields(answer: Any) -> dict[str, str]:
    """The fields of INFO, which the driver has parsed or not."""
    if isinstance(answer, dict):
        return {str(name): str(value) for name, value in answer.items()}
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    lines = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


def _server(info: dict[str, str]) -> tuple[str, str]:
    if "valkey_version" in info:
        return "Valkey", info["valkey_version"]
    return "Redis", info.get("redis_version", "of an unknown version")


# --- Durability


async def durability(wire: Wire) -> Durability:
    info = await _info(wire)
    return durability_of(info, await _setting(wire, "appendfsync"), await _setting(wire, "save"))


async def _setting(wire: Wire, name: str) -> str | None:
    """A setting of the server; None if it doesn't say, as many hosted ones don't."""
    try:
        answer = await wire.ask("CONFIG", "GET", name)
    except StoreUnavailable:
        raise
    except StoreError:
        return None
    found = {_text(key): _text(value) for key, value in _pairs(answer)}
    return found.get(name)


def _pairs(answer: Any) -> list[tuple[Any, Any]]:
    if isinstance(answer, dict):
        return list(answer.items())
    return list(zip(answer[::2], answer[1::2], strict=True))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def durability_of(info: dict[str, str], fsync: str | None, save: str | None) -> Durability:
    """From the fields of INFO, and two settings if the server tells them."""
    logged = info.get("aof_enabled") == "1" or info.get("appendonly") == "yes"
    words, fixes = _disk(logged, fsync, save)
    replicas = int(info.get("connected_slaves", 0))
    if replicas:
        words += f"; {replicas} replica{'s' if replicas > 1 else ''}, which may lag behind"
    fixes.append(
        "no setting of Redis makes an acknowledged job survive the loss of its machine: a failover "
        "loses what the replica had not received; if that matters, use nats:// with replicas=3"
    )
    name, version = _server(info)
    safe = logged and fsync == "always"
    return Durability(
        process_crash=safe,
        power_loss=safe,
        machine_loss=False,
        window_ms=SYNCED_MS if logged and fsync == "everysec" else None,
        summary=f"{name} {version}, {words}",
        fixes=tuple(fixes),
    )


def _disk(logged: bool, fsync: str | None, save: str | None) -> tuple[str, list[str]]:
    if logged and fsync == "always":
        return "append-only file, synced at every write", []
    if logged and fsync == "everysec":
        return (
            "append-only file, synced every second: a crash may lose the last second",
            ["CONFIG SET appendfsync always: then a crash loses nothing"],
        )
    if logged and fsync is None:
        return (
            "append-only file, unknown how often it is synced: a crash may lose a second or more",
            ["allow this user to run CONFIG GET, or check appendfsync on the server"],
        )
    if logged:
        return (
            f"append-only file, appendfsync {fsync}: a crash may lose half a minute",
            ["CONFIG SET appendfsync always (or everysec, to lose a second at most)"],
        )
    fix = "CONFIG SET appendonly yes and appendfsync always, and set both in redis.conf"
    if save is None:
        return "no append-only file: a crash loses all jobs since the last snapshot, if any", [fix]
    if save:
        return f"snapshots only (save {save}): a crash loses all jobs since the last one", [fix]
    return "nothing is written to disk: a restart loses all jobs", [fix]


# --- Findings


async def findings(wire: Wire) -> list[Finding]:
    info = await _info(wire)
    found = [of_server(info), of_memory(info), of_clients(info), *of_disk(info), *of_role(info)]
    return found + await _slow_scripts(wire)


async def sizes(wire: Wire) -> list[Size]:
    """Of the server, with all that others keep there."""
    found = sizes_of(await _info(wire))
    try:
        found.append(Size("Keys", int(await wire.ask("DBSIZE")), "keys"))
    except StoreUnavailable:
        raise
    except StoreError:  # not allowed
        pass
    return found


def sizes_of(info: dict[str, str]) -> list[Size]:
    found = [Size("Memory used by the server", int(info.get("used_memory", 0)))]
    if most := int(info.get("maxmemory", 0)):
        found.append(Size("Its limit", most))
    if log := int(info.get("aof_current_size", 0)):
        found.append(Size("Append-only file", log))
    return found


def of_server(info: dict[str, str]) -> Finding:
    name, version = _server(info)
    days = int(info.get("uptime_in_seconds", 0)) / 86_400
    mode = info.get("redis_mode") or info.get("server_mode", "standalone")
    return Finding(Level.OK, "server", f"{name} {version}, {mode}, up for {days:,.1f} days")


def of_memory(info: dict[str, str]) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy, evicted = info.get("maxmemory_policy", ""), int(info.get("evicted_keys", 0))
    words = f"{used / MIB:,.1f} MiB used" + (f" of {most / MIB:,.1f}" if most else ", no limit set")
    if evicted:
        words += f", {evicted:,} keys dropped to make room"
        fix = "CONFIG SET maxmemory-policy noeviction, and raise maxmemory: jobs may be gone"
        return Finding(Level.BAD, "memory", words, fix)
    if most and policy not in ("", "noeviction"):
        fix = "CONFIG SET maxmemory-policy noeviction"
        words += f", then jobs are dropped ({policy})"
        return Finding(Level.BAD, "memory", words, fix)
    if most and used > NEARLY_FULL * most:
        fix = "raise maxmemory, or keep ended jobs for less time: a full server accepts no jobs"
        return Finding(Level.BAD, "memory", words, fix)
    return Finding(Level.OK, "memory", words)


def of_clients(info: dict[str, str]) -> Finding:
    now, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    words = f"{now:,} connected" + (f" of {most:,} at most" if most else "")
    if most and now > NEARLY_FULL * most:
        return Finding(Level.WARN, "clients", words, "raise maxclients, or close idle clients")
    return Finding(Level.OK, "clients", words)


def of_disk(info: dict[str, str]) -> list[Finding]:
    """Whether the last attempts to write to disk went well."""
    found = []
    for field, what in (
        ("rdb_last_bgsave_status", "the last snapshot"),
        ("aof_last_write_status", "the last write to the append-only file"),
        ("aof_last_bgrewrite_status", "the last rewrite of the append-only file"),
    ):
        if info.get(field, "ok") != "ok":
            fix = "check the server's log: is the disk full, or memory too low for a fork?"
            found.append(Finding(Level.BAD, "disk", f"{what} failed", fix))
    changes = int(info.get("rdb_changes_since_last_save", 0))
    words = f"{changes:,} changes since the last snapshot"
    return found or [Finding(Level.OK, "disk", words)]


def of_role(info: dict[str, str]) -> list[Finding]:
    if info.get("role") == "master":
        return []
    words, fix = f"this server is a {info.get('role')} and accepts no jobs", "use the primary"
    return [Finding(Level.BAD, "role", words, fix)]


async def _slow_scripts(wire: Wire) -> list[Finding]:
    try:
        entries = await wire.ask("SLOWLOG", "GET", 128)
    except StoreUnavailable:
        raise
    except StoreError:
        return []
    slow = [micros for micros, command in map(_slow, entries) if command.startswith(b"EVAL")]
    worst = max(slow, default=0)
    if worst < SLOW_MICROS:
        return []
    words = f"scripts took up to {worst / 1000:,.0f} ms and blocked the server meanwhile"
    fix = "see SLOWLOG GET; use smaller batches, a faster machine, or a server only for jobs"
    return [Finding(Level.WARN, "slow scripts", words, fix)]


def _slow(entry: Any) -> tuple[int, bytes]:
    """Microseconds and command of an entry, which the driver has parsed or not."""
    if isinstance(entry, dict):
        return int(entry["duration"]), bytes(entry["command"])
    command = entry[3][0] if entry[3] else b""
    return int(entry[2]), command
