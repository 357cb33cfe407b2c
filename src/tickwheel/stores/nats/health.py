"""What a NATS store guarantees right now, and what an operator should know of it."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tickwheel.errors import StoreError
from tickwheel.store import Durability, Finding, Level
from tickwheel.stores.nats.options import Options
from tickwheel.stores.nats.stream import Stream, drift
from tickwheel.stores.nats.wire import Wire

# Enough for a job of a mebibyte with a result of a mebibyte.
PAYLOAD = 4 * 1024 * 1024
MONITOR_S = 2.0


# --- Durability


async def durability_of(options: Options, stream: Stream) -> Durability:
    """Replicas as the stream has them; how the server syncs is for it or its operator to say."""
    replicas = (await stream.info())["config"]["num_replicas"]
    synced, source = await _synced(options)
    fixes = []
    if synced is None:
        fixes.append(
            "say how the server syncs: add monitor=http://host:8222 to the URL, so that it is "
            "asked, or durability=strict if its jetstream block has sync_interval: always"
        )
    elif not synced:
        fixes.append("set sync_interval: always in the server's jetstream block")
    if replicas < 3:
        fixes.append("for the loss of a machine: a cluster of three and replicas=3 in the URL")
    words = {True: "synced at every write", False: "synced now and then", None: "sync unknown"}
    return Durability(
        process_crash=True,
        power_loss=bool(synced) or replicas >= 3,
        machine_loss=replicas >= 3,
        summary=f"JetStream, {replicas} replica{'s' if replicas > 1 else ''}, "
        f"{words[synced]} ({source})",
        fixes=tuple(fixes),
    )


async def _synced(options: Options) -> tuple[bool | None, str]:
    """Whether every write is synced, and who says so."""
    if options.monitor:
        limits = await asyncio.to_thread(_monitored, options.monitor)
        if limits is not None:
            return bool(limits.get("sync_always")), f"as {options.monitor} says"
    if options.embedded is not None:
        return options.durability == "strict", "a server of our own"
    if options.durability:
        return options.durability == "strict", "as the URL says"
    return None, "nobody says"


def _monitored(address: str) -> dict[str, Any] | None:
    """The JetStream settings of a server, from its monitoring port."""
    if urlsplit(address).scheme not in ("http", "https"):
        return None
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/jsz", timeout=MONITOR_S) as answer:
            found: dict[str, Any] = msgspec.json.decode(answer.read(1 << 20))
    except (OSError, urllib.error.URLError, msgspec.MsgspecError):
        return None
    config: dict[str, Any] = found.get("config", {})
    return config


# --- Findings


async def findings_of(wire: Wire, streams: Sequence[Stream]) -> list[Finding]:
    found = [_server(wire.info), _payload(wire.info)]
    account = await streams[0].api("INFO")
    found += _limits(account)
    for stream in streams:
        info = await stream.info()
        found += of_stream(stream.config(), info)
        try:
            consumers = await stream.list_consumers()
        except StoreError as error:
            fix = "let this user use $JS.API.CONSUMER.LIST: tickwheel nats conf prints the rights"
            found.append(Finding(Level.BAD, "permissions", str(error), fix))
        else:
            found += await _of_consumers(stream, consumers)
    return found


def _server(info: dict[str, Any]) -> Finding:
    words = f"nats-server {info.get('version')}, {info.get('server_name')}"
    if info.get("cluster"):
        words += f" of cluster {info['cluster']}"
    return Finding(Level.OK, "server", words)


def _payload(info: dict[str, Any]) -> Finding:
    most = info.get("max_payload", 0)
    words = f"messages of up to {most:,} bytes"
    if most >= PAYLOAD:
        return Finding(Level.OK, "max_payload", words)
    fix = f"max_payload: {PAYLOAD} in the server's config, for large payloads and results"
    return Finding(Level.WARN, "max_payload", words, fix)


def _limits(account: dict[str, Any]) -> list[Finding]:
    """How much of what this account may store is used."""
    used, most = account.get("storage", 0), account.get("limits", {}).get("max_storage", -1)
    words = f"{used / 1024**2:,.1f} MiB used"
    if most <= 0:
        return [Finding(Level.OK, "storage", f"{words}, no limit for this account")]
    words += f" of {most / 1024**2:,.1f}"
    level = Level.BAD if used > 0.9 * most else Level.OK
    fix = "raise max_file, or keep ended jobs for a shorter time" if level is Level.BAD else ""
    return [Finding(level, "storage", words, fix)]


def of_stream(wanted: dict[str, Any], info: dict[str, Any]) -> list[Finding]:
    """Drift of the stream's settings, and replicas that are behind."""
    name, state = info["config"]["name"], info["state"]
    words = f"{state['messages']:,} messages, {state['bytes'] / 1024**2:,.1f} MiB"
    found = [Finding(Level.OK, f"stream {name}", words)]
    if different := drift(wanted, info["config"]):
        words = f"changed by somebody: {', '.join(different)}"
        fix = "open the store again with the right to update the stream"
        found.append(Finding(Level.BAD, f"stream {name}", words, fix))
    for replica in (info.get("cluster") or {}).get("replicas") or ():
        if replica.get("offline") or not replica.get("current", True):
            words = (
                f"replica {replica['name']} is {'offline' if replica.get('offline') else 'behind'}"
            )
            fix = "bring the node back: until then another loss stops the store"
            found.append(Finding(Level.WARN, f"stream {name}", words, fix))
    return found


async def _of_consumers(stream: Stream, consumers: Sequence[dict[str, Any]]) -> list[Finding]:
    """How many consumers there are, and whether one is missed."""
    by_queue: dict[str, set[str]] = {}
    for each in consumers:
        by_queue.setdefault(each["config"]["metadata"]["queue"], set()).add(each["name"])
    found = []
    for queue, names in by_queue.items():
        for priority in await stream.stranded(queue, names):
            words = f"jobs of priority {priority} are ready, and no consumer hands them out"
            fix = "open the store anew and add a job of that priority: that makes it again"
            found.append(Finding(Level.BAD, f"queue {queue}", words, fix))
    held = sum(each["num_ack_pending"] for each in consumers)
    words = f"{len(consumers)} for {len(by_queue)} queues, {held:,} tokens on their way"
    return [Finding(Level.OK, "consumers", words), *found]
