"""API keys: who may do what over HTTP. The store keeps only a hash of each secret."""

from __future__ import annotations

import asyncio
import builtins
import fnmatch
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum

import msgspec

from tickwheel.checks import LATEST_MS
from tickwheel.client import Client
from tickwheel.clock import S_NS
from tickwheel.duration import Duration, due_ms, duration_ms, moment_text
from tickwheel.errors import BadArguments, BadConfig, StoreUnavailable, UsageError, shown
from tickwheel.limit import parse_rate
from tickwheel.operate.remembered import CACHE_S, NO_ANSWER, READ_S, STALE_S, Remembered
from tickwheel.store import RECORDS_LIMIT

KIND = "key"
# How many keys a store has at most, and how many patterns of queues or tasks a key.
KEYS_LIMIT, PATTERNS_LIMIT = 1000, 100
NAME_LIMIT = 128

_TEXT = re.compile(r"tw_([0-9a-f]{16})_([0-9a-f]{64})")
# What is enough of it to name the key, and what may be copied around an id.
_BEGINNING, _AROUND = re.compile(r"tw_([0-9a-f]{16})_"), " \t\r\n\"'`,"
_PATTERN = re.compile(r"[A-Za-z0-9_.:*-]{1,128}")


class Scope(StrEnum):
    """What a key is for. `admin` includes all others, `operate` includes `read`."""

    ENQUEUE = "enqueue"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


_INCLUDED_IN = {
    Scope.ENQUEUE: {Scope.ENQUEUE, Scope.ADMIN},
    Scope.READ: {Scope.READ, Scope.OPERATE, Scope.ADMIN},
    Scope.OPERATE: {Scope.OPERATE, Scope.ADMIN},
    Scope.ADMIN: {Scope.ADMIN},
}


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    # Names or patterns such as "mail.*"; none stands for all.
    queues: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    created_ms: int
    expires_ms: int | None = None
    # As in "100/s": see `limit.parse_rate`.
    rate: str | None = None

    def may(self, scope: Scope, *, queue: str | None = None, task: str | None = None) -> bool:
        """Whether it has this scope, for this queue and task.

        None is for what is about no single queue or task, or about many: whoever asks then checks
        each job as well.
        """
        return (
            not _INCLUDED_IN[scope].isdisjoint(self.scopes)
            and _matches(self.queues, queue)
            and _matches(self.tasks, task)
        )


def _matches(patterns: Sequence[str], name: str | None) -> bool:
    if not patterns or name is None:
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def id_of(text: str) -> str:
    """The id of a key: from its text, or as it is, without what was copied around it. The rest of
    the text may be mistyped: it is not needed, and goes no further."""
    found = _BEGINNING.search(text)
    return found[1] if found else text.removeprefix("Bearer ").strip(_AROUND)


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it is stored. Scopes of a later release are kept, and grant nothing here."""

    name: str
    scopes: tuple[str, ...]
    queues: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    created_ms: int
    expires_ms: int | None = None
    rate: str | None = None
    sha256: str

    def key(self, id: str) -> Key:
        return Key(
            id=id,
            name=self.name,
            scopes=tuple(scope for scope in Scope if scope in self.scopes),
            queues=self.queues,
            tasks=self.tasks,
            created_ms=self.created_ms,
            expires_ms=self.expires_ms,
            rate=self.rate,
        )


_decoder = msgspec.json.Decoder(_Stored)


def _as_stored(text: str | None) -> _Stored | None:
    """None also for what another release stored and this one can't read: it lets nobody in."""
    try:
        return None if text is None else _decoder.decode(text)
    except msgspec.MsgspecError:
        return None


class Keys:
    """The API keys of a store, through a client that is open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # A revoked key stops within two seconds.
        self._records = Remembered(client, KIND)
        # When somebody last looked whether there are keys, and what there was.
        self._any: tuple[int, bool] | None = None

    async def create(
        self,
        name: str,
        scopes: Iterable[Scope | str],
        *,
        queues: Sequence[str] = (),
        tasks: Sequence[str] = (),
        expires: Duration | datetime | None = None,
        rate: str | None = None,
    ) -> tuple[Key, str]:
        """Create a key; returns it with its text, which nobody can read again."""
        now_ms = self._client.clock.now_ms()
        secret = secrets.token_hex(32)
        stored = _Stored(
            name=_checked_name(name),
            scopes=_checked_scopes(scopes),
            queues=_checked_patterns("queues", queues),
            tasks=_checked_patterns("tasks", tasks),
            created_ms=now_ms,
            expires_ms=None if expires is None else _expiry_ms(expires, now_ms),
            rate=_checked_rate(rate),
            sha256=_hash(secret),
        )
        _check_admin(stored)
        if len(await self.list()) >= KEYS_LIMIT:
            raise UsageError(f"the store has {KEYS_LIMIT:,} API keys: revoke those of no use first")
        id = secrets.token_hex(8)
        await self._client.put_records(KIND, {id: msgspec.json.encode(stored).decode()})
        self._any = None
        return stored.key(id), f"tw_{id}_{secret}"

    async def list(self) -> list[Key]:
        """All keys, also expired ones, the oldest first."""
        found: builtins.list[Key] = []
        after = ""
        while True:
            page = await self._client.records(KIND, after=after, limit=RECORDS_LIMIT)
            read = [(id, _as_stored(text)) for id, text in page]
            found += [stored.key(id) for id, stored in read if stored is not None]
            if len(page) < RECORDS_LIMIT:
                return sorted(found, key=lambda key: (key.created_ms, key.id))
            after = page[-1][0]

    async def revoke(self, id: str) -> bool:
        """Delete a key; False if there is none. It stops within two seconds, here at once."""
        [deleted] = await self._client.delete_records(KIND, [id])
        self._records.forget(id)
        self._any = None
        return deleted

    async def check(self, text: str) -> Key | None:
        """The key of this text; None if it is unknown, revoked, expired or not a key at all."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        id, secret = found.groups()
        stored = await self._valid(id)
        if stored is None or not _same(stored.sha256, _hash(secret)):
            return None
        return stored.key(id)

    async def find(self, id: str) -> Key | None:
        """The key of this id, for somebody who has shown it before; None as for `check`."""
        stored = await self._valid(id)
        return None if stored is None else stored.key(id)

    async def any(self) -> bool:
        """Whether there are keys; what was read a moment ago counts, as for `check`."""
        now_ns = self._client.clock.monotonic_ns()
        if self._any is None or now_ns - self._any[0] >= CACHE_S * S_NS:
            try:
                async with asyncio.timeout(READ_S):
                    self._any = now_ns, bool(await self._client.records(KIND, limit=1))
            except (StoreUnavailable, TimeoutError) as error:
                if self._any is None or now_ns - self._any[0] >= STALE_S * S_NS:
                    raise StoreUnavailable(str(error) or NO_ANSWER) from error
        return self._any[1]

    async def _valid(self, id: str) -> _Stored | None:
        stored = _as_stored(await self._records.get(id))
        if stored is None:
            return None
        if stored.expires_ms is not None and stored.expires_ms <= self._client.clock.now_ms():
            return None
        return stored


def _same(known: str, given: str) -> bool:
    """In constant time. What is stored may be any text."""
    return hmac.compare_digest(known.encode(errors="replace"), given.encode())


def _hash(secret: str) -> str:
    # No salt and no slow hash: the secret has 256 random bits, which nobody can guess.
    return hashlib.sha256(secret.encode()).hexdigest()


# --- What a key may be


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
        raise BadArguments(
            f"a key's name must be 1 to {NAME_LIMIT} printable characters, not {shown(name)}"
        )
    return name


def _checked_scopes(scopes: Iterable[Scope | str]) -> tuple[str, ...]:
    given = [scopes] if isinstance(scopes, str) else [*scopes]
    if unknown := [each for each in given if each not in [*Scope]]:
        raise BadArguments(f"scope {shown(unknown[0])}: must be one of {', '.join(Scope)}")
    if not given:
        raise BadArguments(f"a key needs a scope: one of {', '.join(Scope)}")
    return tuple(str(scope) for scope in Scope if scope in given)


def _checked_patterns(what: str, patterns: Sequence[str]) -> tuple[str, ...]:
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if len(given) > PATTERNS_LIMIT:
        raise BadArguments(f"{what}: {len(given):,} patterns, and a key may have {PATTERNS_LIMIT}")
    for pattern in given:
        if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
            raise BadArguments(
                f"{what}: {shown(pattern)} must be a name, or a pattern such as 'mail.*', of 1 to "
                "128 letters, digits and _ . : - *"
            )
    return tuple(dict.fromkeys(given))


def _checked_rate(rate: str | None) -> str | None:
    if rate is not None:
        parse_rate(rate)
    return rate


def _check_admin(stored: _Stored) -> None:
    """With an admin key others can be created, so limits to it would be of no use."""
    if Scope.ADMIN in stored.scopes and (stored.queues or stored.tasks):
        raise BadConfig(
            "an admin key may do everything, so it can't be limited to queues or tasks: "
            "leave these out, or use other scopes"
        )


def _expiry_ms(expires: Duration | datetime, now_ms: int) -> int:
    if isinstance(expires, datetime):
        ms = due_ms(expires, "expires")
    else:
        ms = now_ms + duration_ms(expires)
    if not now_ms < ms <= LATEST_MS:
        raise BadArguments(f"expires: {moment_text(ms)} is not in the future")
    return ms
