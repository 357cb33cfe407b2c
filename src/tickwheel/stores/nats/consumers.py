"""The consumers of a stream: one per queue and priority delivers, dormant ones count jobs."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from tickwheel.stores.nats import steps
from tickwheel.stores.nats.steps import Layout

_SAFE = re.compile(r"[A-Za-z0-9_]{1,64}")

# Settings that all consumers have.
SETTINGS = {"ack_policy": "explicit", "max_deliver": -1, "max_ack_pending": 10_000}

# What the dormant consumers of a queue count: jobs of these kinds.
RUNNING = "run"
COUNTED = {
    RUNNING: (*steps.RUNNING, *steps.ASKED),
    steps.WAITING[0]: steps.WAITING,
    **{kind: (kind,) for kind in (steps.PARKED, *steps.ENDED.values())},
}


def consumer_name(queue: str, kind: str) -> str:
    """A valid name for NATS; it has the queue's name if possible, for operators."""
    if _SAFE.fullmatch(queue):
        return f"{queue}-{kind}"
    return f"={hashlib.blake2b(queue.encode(), digest_size=10).hexdigest()}-{kind}"


def settings_of_consumer(
    queue: str, kind: str, subjects: list[str], ack_wait_s: int
) -> dict[str, Any]:
    """What a consumer of this kind is created with."""
    name = consumer_name(queue, kind)
    return {
        "name": name,
        "durable_name": name,
        "filter_subjects": subjects,
        **SETTINGS,
        "ack_wait": ack_wait_s * 1_000_000_000,
        "deliver_policy": "all",
        "metadata": {"queue": queue, "kind": kind},
    }


def is_changed(consumer: dict[str, Any]) -> bool:
    """Whether somebody changed the settings of a consumer."""
    return any(consumer["config"].get(name) != value for name, value in SETTINGS.items())


def is_source(consumer: dict[str, Any]) -> bool:
    """Whether it delivers ready messages."""
    kind: str = consumer["config"]["metadata"].get("kind", "")
    return kind not in COUNTED


def is_outdated(consumer: dict[str, Any], layout: Layout) -> bool:
    """Whether a consumer that counts does not count all kinds that it should."""
    config = consumer["config"]
    kind, queue = config["metadata"].get("kind", ""), config["metadata"]["queue"]
    if kind not in COUNTED:
        return False
    wanted = {layout.of_kind(part, queue) for part in COUNTED[kind]}
    there = config.get("filter_subjects") or [config.get("filter_subject", "")]
    return wanted != set(there)
