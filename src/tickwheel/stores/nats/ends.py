"""Notifications of jobs that ended, for those who wait for their results.

The server drops a message that nobody has subscribed to, so whoever settles jobs sends one in any
case: a single one for all jobs that it settled together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

import msgspec

from tickwheel.errors import StoreUnavailable
from tickwheel.store import Tell
from tickwheel.stores.nats.steps import Layout
from tickwheel.stores.nats.wire import Message, Wire, publish_line
from tickwheel.stores.waiting import Watches

# If the ids take more than this, the message doesn't name them.
MOST_BYTES = 64 * 1024
# In a cluster, other servers learn of a subscription a little later: look again after this long.
LATER_S = 0.1


class Ends:
    """Sends and receives these notifications, for one handle."""

    def __init__(self, namespace: str) -> None:
        # None while the store is closed.
        self.wire: Wire | None = None
        # No worker can have this name.
        self._subject = f"{Layout(namespace, 0, 0).notify_cancel}.=ended"
        self._watches = Watches()
        self._subscription: int | None = None

    def notify(self, ids: Collection[str]) -> None:
        """These jobs may have ended. If this is lost, whoever waits finds out a little later."""
        if ids and self.wire is not None:
            data = msgspec.json.encode(list(ids))
            with contextlib.suppress(StoreUnavailable):
                self.wire.send(
                    publish_line(self._subject, data if len(data) <= MOST_BYTES else b"")
                )

    async def watch(self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int) -> None:
        """Call `tell` with those of these jobs that may have ended, until then."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (until_ms - now_ms) / 1000
        if (wire := self.wire) is None:
            raise StoreUnavailable("the store is closed")
        if self._subscription is None:
            self._subscription = wire.subscribe(self._subject, self._on_message)
        try:
            with self._watches.watching(ids, tell) as watch:
                watch.tell()
                if await watch.until(min(end, loop.time() + LATER_S)):
                    return
                watch.tell()
                await watch.until(end)
        finally:
            if not self._watches.anyone and self._subscription is not None:
                wire.unsubscribe(self._subscription)
                self._subscription = None

    def _on_message(self, message: Message) -> None:
        self._watches.hear(_ids(message.data) if message.data else None)

    def reconnected(self) -> None:
        """Some notifications may have been missed."""
        self._watches.hear(None)

    def close(self) -> None:
        self.wire = self._subscription = None
        self._watches.close()


_ids = msgspec.json.Decoder(list[str]).decode
