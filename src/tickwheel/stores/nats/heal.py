"""Restoring consumers: one that is gone is created again, one that is stuck is moved."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Container
from typing import Any

from tickwheel.clock import S_NS
from tickwheel.errors import StoreUnavailable
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.answers import nanoseconds
from tickwheel.stores.nats.consumers import consumer_name, is_changed
from tickwheel.stores.nats.stream import Stream
from tickwheel.stores.nats.wire import Denied

log = logging.getLogger("tickwheel")

# A message that has been ready for longer than this, and that no claim finds, is stuck.
STUCK_NS = S_NS
# One handle moves a consumer at most this often.
MOVE_S = 3.0


class Healer:
    """Restores the consumers of one stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # When we last moved a consumer, by its name.
        self._moved: dict[str, float] = {}
        self._forbidden = False

    async def heal(self, queue: str, stuck: Container[str]) -> bool:
        """Restore the consumers of this queue; those of `stuck` priorities answer but give nothing.
        Returns whether claims may find something now."""
        found: dict[str, dict[str, Any] | None] = {}
        for priority in steps.PRIORITIES:
            # A consumer without a leader doesn't answer either: its servers are about to elect one.
            with contextlib.suppress(StoreUnavailable):
                name = consumer_name(queue, f"r{priority}")
                found[priority] = await self._stream.consumer(name)
        paused = any(each.get("paused") for each in found.values() if each)
        healed = False
        for priority, consumer in found.items():
            if consumer is None:
                healed |= await self._make(queue, priority, paused)
            elif is_changed(consumer):
                log.warning(
                    "consumer %s had been changed on the server; restored its settings",
                    consumer["name"],
                )
                await self._stream.make_source(queue, priority, paused=paused)
                healed |= not paused
            elif priority in stuck and not paused and not consumer["num_pending"]:
                healed |= await self._move(queue, priority, consumer)
        return healed

    async def _make(self, queue: str, priority: str, paused: bool) -> bool:
        """Create a consumer that is missing. If nothing is ready, the next add does that."""
        if await self._stream.first_ready(queue, priority) is None:
            return False
        log.warning("queue %r, priority %s had no consumer; created it", queue, priority)
        await self._stream.make_source(queue, priority, paused=paused)
        return not paused

    async def _move(self, queue: str, priority: str, consumer: dict[str, Any]) -> bool:
        """Move a consumer that is stuck. A server that was away may lead consumers before it has
        caught up with the stream; until then they don't see what is ready."""
        name, now = consumer["name"], asyncio.get_running_loop().time()
        if not (consumer.get("cluster") or {}).get("replicas") or self._forbidden:
            return False
        if now - self._moved.get(name, now - MOVE_S) < MOVE_S:
            return False
        stream = await self._stream.info()
        if not (leader := better_leader(consumer, stream)):
            return False
        since_ns = await self._stream.first_ready(queue, priority)
        if since_ns is None or nanoseconds(stream["ts"]) - since_ns < STUCK_NS:
            return False
        self._moved[name] = now
        try:
            moved = await self._stream.move_consumer(name, leader)
        except Denied as error:
            self._forbidden = True
            log.warning("consumer %s is stuck and can't be moved: %s", name, error)
            return False
        if moved:
            log.warning(
                "consumer %s was stuck, because its server is behind; moved it to %s", name, leader
            )
        return moved


def better_leader(consumer: dict[str, Any], stream: dict[str, Any]) -> str:
    """The server that should lead a consumer: the leader of its stream, if the server that leads it
    is behind. Empty if it can stay where it is."""
    leads = (consumer.get("cluster") or {}).get("leader")
    cluster = stream.get("cluster") or {}
    for replica in cluster.get("replicas") or ():
        if replica.get("name") == leads and (
            replica.get("offline") or not replica.get("current", True)
        ):
            better: str = cluster.get("leader", "")
            return better
    return ""
