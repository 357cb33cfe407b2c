"""Rate limits that all nodes share: each bucket is one message, replaced by compare-and-set."""

from __future__ import annotations

from tickwheel.clock import S_NS
from tickwheel.errors import StoreUnavailable
from tickwheel.limit import Rate, admit
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.shard import Shard
from tickwheel.stores.nats.steps import Check, Step

# The state of a rate limit expires when it was not used for this long and is full again.
BUCKET_TTL_S = 3600
# How often a rate limit is tried that others change at the same moment.
TRIES = 50


async def take_token(shard: Shard, key: str, rate: Rate, now_ms: int) -> int:
    """As `Store.throttle` says."""
    subject = f"{shard.layout.prefix}.b.{steps.subject_part(key)}"
    for _ in range(TRIES):
        found = await shard.stream.leader_last(subject)
        full_ns, seq = (int(found[2]), found[1]) if found else (None, 0)
        full_ns, wait_ms = admit(full_ns, rate, now_ms)
        if wait_ms:
            return wait_ms
        full_s = full_ns // S_NS - now_ms // 1000 + 1
        ttl = f"Nats-TTL: {max(full_s, BUCKET_TTL_S)}s\r\n"
        headers = Check(subject, seq).headers + ttl
        step = Step(subject, headers, str(full_ns).encode())
        if await shard.room.store(step):
            return 0
    raise StoreUnavailable(f"the rate limit {key!r} is too busy")
