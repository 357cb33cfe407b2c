"""The audit log: who changed what, when, from where, and how it ended."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from tickwheel.checks import LATEST_MS
from tickwheel.client import Client
from tickwheel.clock import S_NS
from tickwheel.config import setting
from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import StoreError
from tickwheel.masking import without_keys
from tickwheel.store import RECORDS_LIMIT, not_a_cursor

KIND = "audit"
# How many entries one call of `prune` deletes at most, and how often writes prune.
PRUNED, PRUNE_S = RECORDS_LIMIT, 60.0
# How many characters of each field are kept.
LENGTHS = {"who": 128, "action": 64, "target": 256, "source": 128, "outcome": 64, "detail": 1000}
# How many names the detail of an entry has.
NAMED = 100
# How many entries of one call are told apart by their order.
MOST = 99_999

_NAME = re.compile(r"\d{15}-\d{5}-[0-9a-f]{12}")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that somebody did, or tried to do. It never has the secret of a key."""

    at_ms: int
    # The id of an API key, "cli:" and a user's name, or "anonymous".
    who: str
    # An operation of the API, as "cancel_job", or a command, as "jobs cancel".
    action: str
    target: str
    # The address that the request came from, or the machine that the command ran on.
    source: str
    # "ok", or the type of the problem; of a command, also "unchanged" and "failed".
    outcome: str
    detail: str = ""

    def __post_init__(self) -> None:
        # A target may be any text of a request or a command, also somebody's key.
        for name in ("target", "detail"):
            msgspec.structs.force_setattr(self, name, without_keys(getattr(self, name)))


_decoder = msgspec.json.Decoder(Entry)


class Audit:
    """The audit log of a store, through a client that is open.

    Entries are kept for `retention`, by default the setting `audit_retention`; later writes delete
    older ones, some at a time.
    """

    def __init__(self, client: Client, *, retention: Duration | None = None) -> None:
        self._client = client
        kept = setting("audit_retention") if retention is None else retention
        self._retention_ms = duration_ms(kept)
        # When a write may prune again, by the monotonic clock.
        self._prune_at_ns = 0

    async def write(self, entries: Sequence[Entry]) -> None:
        """Add entries. Fields that are too long are cut."""
        if not entries:
            return
        records = {
            _name(entry.at_ms, MOST - n % MOST): _text(entry) for n, entry in enumerate(entries)
        }
        await self._client.put_records(KIND, records)
        # What was written is what counts: the next write tries again.
        with contextlib.suppress(StoreError):
            await self._prune_some()

    async def list(
        self,
        *,
        cursor: str | None = None,
        limit: int = 100,
        before_ms: int | None = None,
        after_ms: int | None = None,
    ) -> tuple[list[Entry], str | None]:
        """Entries, the newest first, and where to continue; no cursor means no more.

        Only those of `after_ms` or later, and before `before_ms`. `limit` is at most RECORDS_LIMIT.
        """
        after = _start(before_ms)
        if cursor is not None:
            if not _NAME.fullmatch(cursor):
                raise not_a_cursor(cursor)
            after = max(after, cursor)
        page = await self._client.records(KIND, after=after, limit=limit)
        # Later names are of earlier entries.
        end = _start(after_ms) if after_ms is not None else ""
        wanted = [text for name, text in page if not end or name < end]
        more = len(wanted) == limit
        return [*filter(None, map(_as_entry, wanted))], page[-1][0] if more else None

    async def prune(self, before_ms: int) -> int:
        """Delete entries of before this time, at most PRUNED; returns how many. Fewer than PRUNED
        means that no more are left."""
        old = await self._client.records(KIND, after=_start(before_ms), limit=PRUNED)
        return sum(await self._client.delete_records(KIND, [name for name, _ in old]))

    async def _prune_some(self) -> None:
        """Now and then; after a full round again with the next write, so that it keeps up with
        writes of fewer entries than it deletes."""
        clock = self._client.clock
        now_ns = clock.monotonic_ns()
        if now_ns < self._prune_at_ns:
            return
        pruned = await self.prune(clock.now_ms() - self._retention_ms)
        if pruned < PRUNED:
            self._prune_at_ns = now_ns + int(PRUNE_S * S_NS)


def in_words(
    conditions: Mapping[str, str],
    names: Sequence[str] = (),
    changed: int = 0,
    count: int | None = None,
) -> str:
    """The detail of an operation on several things: what they were chosen by, how many of them it
    changed or added, and the first of their names."""
    chosen = " ".join(f"{name}={_one_line(value)}" for name, value in conditions.items())
    if count is None:
        return chosen
    listed = " ".join(map(_one_line, names[:NAMED]))
    more = " …" if count > NAMED else ""
    colon = ": " if listed else ""
    return f"{chosen + '; ' if chosen else ''}{changed} of {count} changed{colon}{listed}{more}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:80]


# --- Names: the newest entry comes first


def _name(at_ms: int, rank: int) -> str:
    """Another one each time: two entries of one millisecond are both kept. In one call, the later
    entry has the lower rank and comes first."""
    return f"{_number(at_ms)}-{rank:05}-{secrets.token_hex(6)}"


def _start(before_ms: int | None) -> str:
    """The names after this one are those of entries before this time. A full stop comes after the
    hyphen of names of the same time."""
    return "" if before_ms is None else f"{_number(before_ms)}."


def _number(at_ms: int) -> str:
    return f"{LATEST_MS - min(max(at_ms, 0), LATEST_MS):015}"


# --- Texts


def _text(entry: Entry) -> str:
    cut = {name: _cut(getattr(entry, name), length) for name, length in LENGTHS.items()}
    return msgspec.json.encode(msgspec.structs.replace(entry, **cut)).decode()


def _as_entry(text: str) -> Entry | None:
    """None for what another release stored and this one can't read: the others are shown."""
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return None


def _cut(text: str, length: int) -> str:
    # A target may be any text of a request, also one that is not valid Unicode.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= length else text[: length - 1] + "…"
