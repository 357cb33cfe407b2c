"""What a NATS store guarantees now, and what an operator should know about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.masking import masked
from tickwheel.store import Durability, Finding, Level, Size
from tickwheel.stores.nats.consumers import consumer_name, is_source
from tickwheel.stores.nats.heal import better_leader
from tickwheel.stores.nats.monitor import monitored
from tickwheel.stores.nats.settings import NO_LIMITS, described, drift
from tickwheel.stores.nats.steps import PRIORITIES
from tickwheel.stores.nats.stream import Stream
from tickwheel.stores.nats.url import NatsOptions
from tickwheel.stores.nats.wire import Wire

# Enough for a job of a mebibyte with a result of a mebibyte.
PAYLOAD = 4 * 1024 * 1024
# A limit counts as reached at this share.
FULL = 0.9


# --- Durability


async def durability_of(options: NatsOptions, stream: Stream) -> Durability:
    """The replicas of the stream, and how the server syncs, as the server or its operator says."""
    replicas = (await stream.info())["config"]["num_replicas"]
    synced, source = await _synced(options)
    fixes = []
    if synced is None:
        fixes.append(
            "say how the server syncs: add monitor=http://host:8222 to the URL to ask the server, "
            "or durability=strict if its jetstream block has sync_interval: always"
        )
    elif not synced:
        fixes.append("set sync_interval: always in the server's jetstream block")
    if replicas < 3:
        fixes.append("to survive the loss of a machine: a cluster of three, replicas=3 in the URL")
    words = {True: "synced at every write", False: "synced periodically", None: "sync unknown"}
    return Durability(
        process_crash=True,
        power_loss=bool(synced) or replicas >= 3,
        machine_loss=replicas >= 3,
        summary=f"JetStream, {replicas} replica{'s' if replicas > 1 else ''}, "
        f"{words[synced]} ({source})",
        fixes=tuple(fixes),
    )


async def _synced(options: NatsOptions) -> tuple[bool | None, str]:
    """Whether every write is synced, and the source of that."""
    jetstream = await monitored(options.monitor, "jsz")
    if jetstream is not None:
        synced = bool(jetstream.get("config", {}).get("sync_always"))
        return synced, f"as {masked(options.monitor)} says"
    if options.embedded is not None:
        return options.durability == "strict", "embedded server"
    if options.durability:
        return options.durability == "strict", "as the URL says"
    return None, "not specified"


# --- Findings


async def findings_of(options: NatsOptions, wire: Wire, streams: Sequence[Stream]) -> list[Finding]:
    found = [_server(wire.info), _payload(wire.info), *await _resources(options)]
    found += limits_of(await streams[0].api("INFO"))
    for stream in streams:
        try:
            info = await stream.info()
        except StoreUnavailable as error:
            fix = "bring its servers back, or restore it from a backup: until then its jobs wait"
            found.append(Finding(Level.BAD, f"stream {stream.name}", str(error), fix))
            continue
        found += of_stream(stream.config(), info)
        found += await _deliveries(stream, info)
    return found


async def sizes_of(streams: Sequence[Stream]) -> list[Size]:
    """Of the streams, and of the limit of the account, if it has one."""
    states = [(await stream.info())["state"] for stream in streams]
    limits = (await streams[0].api("INFO")).get("limits") or {}
    found = [
        Size("Streams, on each replica", sum(each["bytes"] for each in states)),
        Size("Their messages", sum(each["messages"] for each in states), "messages"),
    ]
    if (most := limits.get("max_storage", -1)) > 0:
        found.append(Size("Limit of the account", most))
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


async def _resources(options: NatsOptions) -> list[Finding]:
    if not options.monitor:
        return []
    process = await monitored(options.monitor, "varz")
    jetstream = await monitored(options.monitor, "jsz")
    if process is None or jetstream is None:
        fix = "give the address of the server's http port: monitor=http://host:8222"
        words = f"{masked(options.monitor)} does not answer"
        return [Finding(Level.WARN, "monitor", words, fix)]
    memory = Finding(Level.OK, "memory", f"the server's process uses {_mib(process.get('mem', 0))}")
    most = jetstream.get("config", {}).get("max_storage", -1)
    return [memory, _filled("disk", jetstream.get("storage", 0), most, "the server", _mib)]


def limits_of(account: dict[str, Any]) -> list[Finding]:
    """How much of the account's limits is used; with tiers, by the number of replicas."""
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
    """A limit and its use: beyond it nothing can be added."""
    if most <= 0:
        return Finding(Level.OK, about, f"{written(used)} used, no limit for {whose}")
    words = f"{written(used)} of {written(most)} for {whose}"
    if used <= FULL * most:
        return Finding(Level.OK, about, words)
    return Finding(Level.BAD, about, words, "raise the limit, or prune ended jobs sooner")


def _mib(count: int) -> str:
    return f"{count / 1024**2:,.1f} MiB"


def of_stream(wanted: dict[str, Any], info: dict[str, Any]) -> list[Finding]:
    """Drift of the stream's settings, and replicas that are behind."""
    about, state = f"stream {info['config']['name']}", info["state"]
    found = [Finding(Level.OK, about, f"{state['messages']:,} messages, {_mib(state['bytes'])}")]
    if different := drift(wanted, info["config"]):
        words = f"settings were changed on the server: {described(different, info['config'])}"
        if NO_LIMITS.keys() & different:
            words += "; jobs may be lost"
        fix = "open the store with a user that may update the stream"
        found.append(Finding(Level.BAD, about, words, fix))
    for replica in (info.get("cluster") or {}).get("replicas") or ():
        if replica.get("offline") or not replica.get("current", True):
            state_of = "offline" if replica.get("offline") else "behind"
            fix = "bring the node back: until then, another loss stops the store"
            words = f"replica {replica['name']} is {state_of}"
            found.append(Finding(Level.WARN, about, words, fix))
    return found


async def _deliveries(stream: Stream, info: dict[str, Any]) -> list[Finding]:
    try:
        consumers = await stream.list_consumers()
    except StoreError as error:
        fix = "allow this user $JS.API.CONSUMER.LIST: tickwheel nats conf prints the permissions"
        return [Finding(Level.BAD, "permissions", str(error), fix)]
    found = of_consumers(consumers) + behind(consumers, info)
    by_queue: defaultdict[str, set[str]] = defaultdict(set)
    for each in consumers:
        by_queue[each["config"]["metadata"]["queue"]].add(each["name"])
    for queue, names in sorted(by_queue.items()):
        for priority in await _stranded(stream, queue, names):
            words = f"jobs of priority {priority} are ready, and no consumer delivers them"
            fix = "start a worker for that queue: it creates the consumer within seconds"
            found.append(Finding(Level.BAD, f"queue {queue}", words, fix))
    return found


def behind(consumers: Sequence[dict[str, Any]], stream: dict[str, Any]) -> list[Finding]:
    """Consumers that may deliver nothing, because the server that leads them is behind."""
    found = []
    for each in filter(is_source, consumers):
        if better := better_leader(each, stream):
            leads, name = each["cluster"]["leader"], stream["config"]["name"]
            words = f"{each['name']} is led by {leads}, which is behind: it may deliver no jobs"
            fix = (
                "workers move it if they may use $JS.API.CONSUMER.LEADER.STEPDOWN; by hand: nats "
                f"consumer cluster step-down {name} {each['name']} --preferred {better}"
            )
            found.append(Finding(Level.WARN, "consumers", words, fix))
    return found


def of_consumers(consumers: Sequence[dict[str, Any]]) -> list[Finding]:
    """How many ready jobs wait to be delivered, and whether a consumer is blocked."""
    delivering = [each for each in consumers if is_source(each)]
    queues = {each["config"]["metadata"]["queue"] for each in consumers}
    lag = sum(each["num_pending"] for each in delivering)
    out = sum(each["num_ack_pending"] for each in delivering)
    words = (
        f"{len(consumers)} for {len(queues)} queues: {lag:,} ready jobs not delivered, "
        f"{out:,} being claimed"
    )
    found = [Finding(Level.OK, "consumers", words)]
    for each in delivering:
        most = each["config"].get("max_ack_pending", 0)
        if most and each["num_ack_pending"] >= most:
            words = f"{each['name']} is blocked: {most:,} jobs were delivered and not claimed"
            fix = "a worker pulls jobs without claiming them: stop it; they are back within 10 s"
            found.append(Finding(Level.WARN, "consumers", words, fix))
    return found


async def _stranded(stream: Stream, queue: str, names: Iterable[str]) -> list[str]:
    """Priorities of a queue that have ready messages and, by these names, no consumer."""
    known = set(names)
    return [
        priority
        for priority in PRIORITIES
        if consumer_name(queue, f"r{priority}") not in known
        and await stream.first_ready(queue, priority) is not None
    ]
