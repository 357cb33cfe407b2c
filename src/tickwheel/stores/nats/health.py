"""What a NATS store guarantees right now, and what an operator should know of it."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tickwheel.errors import StoreError
from tickwheel.store import Durability, Finding, Level
from tickwheel.stores.nats.options import Options
from tickwheel.stores.nats.stream import Stream, drift, is_source
from tickwheel.stores.nats.wire import Wire

# Enough for a job of a mebibyte with a result of a mebibyte.
PAYLOAD = 4 * 1024 * 1024
MONITOR_S = 2.0
# A limit that is used up to this share is as good as reached.
FULL = 0.9


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
    jetstream = await _monitored(options, "jsz")
    if jetstream is not None:
        synced = bool(jetstream.get("config", {}).get("sync_always"))
        return synced, f"as {options.monitor} says"
    if options.embedded is not None:
        return options.durability == "strict", "a server of our own"
    if options.durability:
        return options.durability == "strict", "as the URL says"
    return None, "nobody says"


async def _monitored(options: Options, page: str) -> dict[str, Any] | None:
    """What a server says of itself on its monitoring port, where we know of one that answers."""
    if urlsplit(options.monitor).scheme not in ("http", "https"):
        return None
    return await asyncio.to_thread(_fetched, f"{options.monitor.rstrip('/')}/{page}")


def _fetched(address: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(address, timeout=MONITOR_S) as answer:
            found: dict[str, Any] = msgspec.json.decode(answer.read(1 << 20))
    except (OSError, urllib.error.URLError, msgspec.MsgspecError):
        return None
    return found


# --- Findings


async def findings_of(options: Options, wire: Wire, streams: Sequence[Stream]) -> list[Finding]:
    found = [_server(wire.info), _payload(wire.info), *await _resources(options)]
    found += limits_of(await streams[0].api("INFO"))
    for stream in streams:
        found += of_stream(stream.config(), await stream.info())
        found += await _hand_outs(stream)
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


async def _resources(options: Options) -> list[Finding]:
    if not options.monitor:
        return []
    process, jetstream = await _monitored(options, "varz"), await _monitored(options, "jsz")
    if process is None or jetstream is None:
        fix = "give the address of the server's http port: monitor=http://host:8222"
        words = f"{options.monitor} does not answer"
        return [Finding(Level.WARN, "monitor", words, fix)]
    memory = Finding(Level.OK, "memory", f"the server's process has {_mib(process.get('mem', 0))}")
    most = jetstream.get("config", {}).get("max_storage", -1)
    return [memory, _filled("disk", jetstream.get("storage", 0), most, "the server", _mib)]


def limits_of(account: dict[str, Any]) -> list[Finding]:
    """How much is used of what this account may have; with tiers, by the number of replicas."""
    found = []
    for tier, usage in (account.get("tiers") or {"": account}).items():
        limits = usage.get("limits", {})
        whose = f"this account at {tier}" if tier else "this account"
        storage, most = usage.get("storage", 0), limits.get("max_storage", -1)
        found.append(_filled("storage", storage, most, whose, _mib))
        for name in ("streams", "consumers"):
            most = limits.get(f"max_{name}", -1)
            if most > 0:
                found.append(_filled(name, usage.get(name, 0), most, whose, str))
    return found


def _filled(about: str, used: int, most: int, whose: str, written: Callable[[int], str]) -> Finding:
    """A limit, and how near it is: beyond it nothing can be added."""
    if most <= 0:
        return Finding(Level.OK, about, f"{written(used)} used, no limit for {whose}")
    words = f"{written(used)} of {written(most)} that {whose} may use"
    if used <= FULL * most:
        return Finding(Level.OK, about, words)
    return Finding(Level.BAD, about, words, "raise the limit, or keep ended jobs for less long")


def _mib(count: int) -> str:
    return f"{count / 1024**2:,.1f} MiB"


def of_stream(wanted: dict[str, Any], info: dict[str, Any]) -> list[Finding]:
    """Drift of the stream's settings, and replicas that are behind."""
    about, state = f"stream {info['config']['name']}", info["state"]
    found = [Finding(Level.OK, about, f"{state['messages']:,} messages, {_mib(state['bytes'])}")]
    if different := drift(wanted, info["config"]):
        words = f"changed by somebody: {', '.join(different)}"
        fix = "open the store again with the right to update the stream"
        found.append(Finding(Level.BAD, about, words, fix))
    for replica in (info.get("cluster") or {}).get("replicas") or ():
        if replica.get("offline") or not replica.get("current", True):
            state_of = "offline" if replica.get("offline") else "behind"
            fix = "bring the node back: until then another loss stops the store"
            words = f"replica {replica['name']} is {state_of}"
            found.append(Finding(Level.WARN, about, words, fix))
    return found


async def _hand_outs(stream: Stream) -> list[Finding]:
    try:
        consumers = await stream.list_consumers()
    except StoreError as error:
        fix = "let this user use $JS.API.CONSUMER.LIST: tickwheel nats conf prints the rights"
        return [Finding(Level.BAD, "permissions", str(error), fix)]
    found = of_consumers(consumers)
    by_queue: defaultdict[str, set[str]] = defaultdict(set)
    for each in consumers:
        by_queue[each["config"]["metadata"]["queue"]].add(each["name"])
    for queue, names in sorted(by_queue.items()):
        for priority in await stream.stranded(queue, names):
            words = f"jobs of priority {priority} are ready, and no consumer hands them out"
            fix = "open the store anew and add a job of that priority: that makes it again"
            found.append(Finding(Level.BAD, f"queue {queue}", words, fix))
    return found


def of_consumers(consumers: Sequence[dict[str, Any]]) -> list[Finding]:
    """How many ready jobs wait to be handed out, and whether that stands still."""
    handing = [each for each in consumers if is_source(each)]
    queues = {each["config"]["metadata"]["queue"] for each in consumers}
    lag = sum(each["num_pending"] for each in handing)
    out = sum(each["num_ack_pending"] for each in handing)
    words = (
        f"{len(consumers)} for {len(queues)} queues: {lag:,} ready jobs not handed out, "
        f"{out:,} on their way to a worker"
    )
    found = [Finding(Level.OK, "consumers", words)]
    for each in handing:
        most = each["config"].get("max_ack_pending", 0)
        if most and each["num_ack_pending"] >= most:
            words = f"{each['name']} hands out no more: {most:,} jobs were taken and not claimed"
            fix = "a worker takes without claiming: stop it, and they are back within 10 s"
            found.append(Finding(Level.WARN, "consumers", words, fix))
    return found
