"""Idempotency-Key: the job's id is derived from it, so that adding it again adds nothing. Pure.

What was asked for is kept as a fingerprint in the job's meta, so that a key that is used for
something else is noticed for as long as the job exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from tickwheel.http.forms import NewJob
from tickwheel.http.problems import Kind, Problem
from tickwheel.job import Job

# Names in a job's meta that start like this are ours.
RESERVED = "tickwheel."
FINGERPRINT = RESERVED + "request"


def derived_id(caller: str, route: str, key: str, index: int | None = None) -> str:
    """The id of the job that a request with this key adds; of a batch, its job number `index`."""
    parts = msgspec.json.encode([caller, route, key, index])
    return f"idem-{hashlib.blake2b(parts, digest_size=16).hexdigest()}"


def fingerprint(form: NewJob) -> str:
    """The same for equal requests, whatever the order of their fields."""
    fields = msgspec.to_builtins(form)
    # An earlier release has made the same without these; with a key they can't be given.
    for name in ("if_exists", "request"):
        fields.pop(name, None)
    text = msgspec.json.encode(fields, order="deterministic")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def with_fingerprint(meta: Mapping[str, str] | None, mark: str | None) -> dict[str, str] | None:
    """The meta of a job to add. Raises Problem if it has a name that is ours."""
    for name in meta or {}:
        if name.startswith(RESERVED):
            raise Problem(
                Kind.INVALID,
                f"meta: {name[:80]!r} is reserved, like all that start with {RESERVED!r}",
            )
    if mark is None:
        return None if meta is None else dict(meta)
    return {**(meta or {}), FINGERPRINT: mark}


def check_same(job: Job, mark: str) -> None:
    """Raise Problem unless the job was added by the same request."""
    if (job.meta or {}).get(FINGERPRINT) != mark:
        raise Problem(Kind.IDEMPOTENCY_KEY_REUSED)


def request_number(caller: str, request: str) -> int:
    """The number of a request that a caller has named."""
    text = f"{caller}\n{request}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2
