"""JetStream itself, with nats-py: a work queue, and the server's own message schedules.

No task layer: what a hand-written worker can do, and the floor for a store on NATS.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import nats
from nats.js.api import RetentionPolicy, StreamConfig
from record import URL, ran

_where = urlsplit(URL)
SERVER = f"{_where.scheme}://{_where.netloc}"
# Each empty store has a name of its own.
STREAM = _where.path.strip("/")
WORK, LATER = f"{STREAM}.work", f"{STREAM}.later"
_streams: list[Any] = []


async def open() -> None:
    connection = await nats.connect(SERVER)
    stream = connection.jetstream()
    _streams.append(stream)
    await stream.add_stream(
        StreamConfig(
            name=STREAM,
            subjects=[f"{STREAM}.>"],
            retention=RetentionPolicy.LIMITS,
            allow_msg_schedules=True,
            allow_msg_ttl=True,
        )
    )


async def add_async(n: int) -> None:
    await _streams[0].publish(WORK, b"%d" % n)


async def add_at(n: int, due: float) -> None:
    at = datetime.fromtimestamp(due, UTC).isoformat(timespec="microseconds")
    headers = {"Nats-Schedule": f"@at {at.replace('+00:00', 'Z')}", "Nats-Schedule-Target": WORK}
    # One schedule per subject.
    await _streams[0].publish(f"{LATER}.{n}", b"%d" % n, headers=headers)


async def main() -> None:
    """The worker: fetch, run, acknowledge."""
    connection = await nats.connect(SERVER)
    source = await connection.jetstream().pull_subscribe(WORK, durable="workers", stream=STREAM)
    while True:
        try:
            messages = await source.fetch(100, timeout=5)
        except nats.errors.TimeoutError:
            continue
        for message in messages:
            ran(int(message.data))
            await message.ack()


if __name__ == "__main__":
    asyncio.run(main())
