"""What JetStream answers, and what that means to the caller."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from tickwheel.clock import S_NS
from tickwheel.errors import StoreError, StoreUnavailable

# "wrong last sequence": somebody else was faster.
REFUSED = (10071, 10164)
NO_STREAM = 10059
NOT_FOUND = (10037, 10014)
# "invalid stream configuration", and an account that requires max_bytes of every stream.
INVALID = 10052
BYTES_REQUIRED = 10113
# Resources of the account or the server, memory, storage; limits of the stream; and a write that
# failed, which has no details.
FULL = (10002, 10023, 10028, 10047, 10053, 10077)
# Called a bad request, but caused by a temporary state of the server: a batch that was refused in
# part, and changes in progress.
PASSING = (10176, 10202, 10226)
# Settings of the stream that somebody changed, and that are corrected within seconds: a limit on
# messages, no batches, sealed.
CHANGED = (10054, 10109, 10174)
# More messages in a batch than the server's settings allow.
TOO_MANY = 10199


class StoreFull(StoreUnavailable):
    """There is no room for this now; there may be later."""


class Stored(msgspec.Struct):
    """The answer to a message that was to be stored."""

    seq: int = 0
    error: dict[str, Any] | None = None


as_stored = msgspec.json.Decoder(Stored).decode


def code(answer: dict[str, Any]) -> int:
    """The code of an error; 0 if the answer is no error."""
    found: int = answer.get("error", {}).get("err_code", 0)
    return found


def must(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, if it is no error. Raises StoreFull, StoreUnavailable, StoreError."""
    if answer.get("error") is None:
        return answer
    raise failure(answer)


def failure(refusal: dict[str, Any]) -> StoreError | StoreUnavailable:
    """What an error means to the caller."""
    error, number = refusal["error"], code(refusal)
    words = f"NATS: {error.get('description', 'unknown error')} ({number})"
    if number in FULL:
        return StoreFull(f"{words}: the store is full; raise max_file, or prune ended jobs sooner")
    if error.get("code") in (400, 403) and number not in (*PASSING, *CHANGED):
        return StoreError(words)
    return StoreUnavailable(words)


def nanoseconds(text: str) -> int:
    """Parse RFC 3339 with any number of fractional digits, as a server writes it."""
    whole, _, rest = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * S_NS + int(rest.ljust(9, "0")[:9] or 0)


def allowed(refusal: dict[str, Any], tried: int) -> int:
    """How many messages a batch may have, from the refusal of a larger one."""
    named = re.search(r"\d+", refusal["error"].get("description", ""))
    return max(1, min(int(named[0]) if named else tried // 2, tried - 1))
