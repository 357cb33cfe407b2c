"""The settings of a stream of jobs: the required values, and which of them somebody changed."""

from __future__ import annotations

import re
from typing import Any

from tickwheel.errors import StoreIncompatible
from tickwheel.stores.nats.answers import BYTES_REQUIRED, code
from tickwheel.stores.nats.steps import Layout

OLDEST_SERVER = (2, 15)
# The stream's own format; a later release may raise it.
SCHEMA = 1
# Settings that could make a stream drop, refuse or change messages, each switched off. A stream
# with schedules always drops its oldest messages at a limit: it can't refuse new ones instead.
NO_LIMITS: dict[str, Any] = {
    "max_bytes": -1,
    "max_msgs": -1,
    "max_age": 0,
    "max_msg_size": -1,
    "max_msgs_per_subject": 1,
    "max_consumers": -1,
    "no_ack": False,
    "sealed": False,
    "consumer_limits": {},
    "subject_transform": None,
    "subject_delete_marker_ttl": 0,
}


def settings_of(layout: Layout, *, replicas: int, shards: int) -> dict[str, Any]:
    """The settings that the steps rely on."""
    return {
        "name": layout.stream,
        "subjects": [f"{layout.prefix}.>"],
        "retention": "workqueue",
        "storage": "file",
        "discard": "old",
        **NO_LIMITS,
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_msg_schedules": True,
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "republish": {
            "src": f"{layout.prefix}.r.>",
            "dest": f"{layout.notify}.r.>",
            "headers_only": True,
        },
        "metadata": {"tickwheel-schema": str(SCHEMA), "tickwheel-shards": str(shards)},
    }


def drift(wanted: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """The settings of a stream that differ from the required ones."""
    different = [
        key
        for key, value in wanted.items()
        # A setting that is off may be missing.
        if key != "metadata" and (stored.get(key) or None) != (value or None)
    ]
    metadata = stored.get("metadata", {})
    changed = any(metadata.get(key) != value for key, value in wanted["metadata"].items())
    return different + (["metadata"] if changed else [])


def described(wrong: list[str], stored: dict[str, Any]) -> str:
    """These settings for people; limits with their values."""
    return ", ".join(f"{key}={stored.get(key)}" if key in NO_LIMITS else key for key in wrong)


def refuse_demands(answer: dict[str, Any]) -> None:
    if code(answer) == BYTES_REQUIRED:
        raise StoreIncompatible(
            "this NATS account requires max_bytes of every stream, and such a stream drops its "
            "oldest jobs: set max_bytes_required: false, and limit the account by max_file"
        )


def refuse_old(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise StoreIncompatible(f"this NATS server is {version}; jobs need {oldest} or later")


def refuse_other(stored: dict[str, Any], *, shards: int) -> None:
    """Raises StoreIncompatible if a later release, or one with other shards, made the stream."""
    metadata = stored.get("metadata", {})
    schema = int(metadata.get("tickwheel-schema", 0))
    if schema > SCHEMA:
        raise StoreIncompatible(
            f"stream {stored['name']} has schema {schema}, this release supports {SCHEMA}: "
            "upgrade tickwheel"
        )
    found = metadata.get("tickwheel-shards", str(shards))
    if found != str(shards):
        raise StoreIncompatible(
            f"this namespace has shards={found}, the URL says {shards}: the number can't be "
            "changed; tickwheel migrate-jobs moves jobs to another namespace"
        )
