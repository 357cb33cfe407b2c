"""Sessions: browsers that have shown an API key. The store keeps only a hash of each secret."""

from __future__ import annotations

import hashlib
import re
import secrets

import msgspec

from tickwheel.client import Client
from tickwheel.config import setting
from tickwheel.duration import Duration, duration_ms
from tickwheel.operate.keys import Key, Keys
from tickwheel.operate.remembered import Remembered
from tickwheel.store import RECORDS_LIMIT

KIND = "session"
# How many sessions a key has at most: the oldest ends when another one starts.
SESSIONS_OF_KEY = 20

# When it ends, and the secret.
_TOKEN = re.compile(r"([0-9]{15})\.([A-Za-z0-9_-]{43})")


class _Session(msgspec.Struct, frozen=True):
    key: str


class Sessions:
    """The sessions of a store, through a client that is open.

    A session may do what its key may do, for `lifetime`, by default the setting `session_lifetime`,
    and for no longer than its key is valid.
    """

    def __init__(self, client: Client, keys: Keys, *, lifetime: Duration | None = None) -> None:
        self._client = client
        self._keys = keys
        self._records = Remembered(client, KIND)
        chosen = setting("session_lifetime") if lifetime is None else lifetime
        self.lifetime_ms = duration_ms(chosen)

    async def start(self, key: Key) -> str:
        """Start a session; returns its token, which nobody can read again."""
        await self._make_room(key)
        ends_ms = self._client.clock.now_ms() + self.lifetime_ms
        token = f"{ends_ms:015}.{secrets.token_urlsafe(32)}"
        text = msgspec.json.encode(_Session(key=key.id)).decode()
        await self._client.put_records(KIND, {_name(token): text})
        return token

    async def find(self, token: str) -> Key | None:
        """The key of a session; None if it has ended, or never was, or its key is no longer valid.

        What was read a moment ago counts, as for keys.
        """
        found = _TOKEN.fullmatch(token)
        if found is None or int(found[1]) <= self._client.clock.now_ms():
            return None
        id = _key_of(await self._records.get(_name(token)))
        return None if id is None else await self._keys.find(id)

    async def end(self, token: str) -> None:
        """End a session: here at once, on other servers within two seconds."""
        if _TOKEN.fullmatch(token):
            await self._client.delete_records(KIND, [_name(token)])
            self._records.forget(_name(token))

    async def _make_room(self, key: Key) -> None:
        """Delete sessions that have ended, and the oldest of this key if it has too many."""
        now = f"{self._client.clock.now_ms():015}"
        of_key: list[str] = []
        after = ""
        while True:
            page = await self._client.records(KIND, after=after, limit=RECORDS_LIMIT)
            ended = [name for name, _ in page if name < now]
            if ended:
                await self._client.delete_records(KIND, ended)
            of_key += [name for name, text in page if name >= now and _key_of(text) == key.id]
            if len(page) < RECORDS_LIMIT:
                break
            after = page[-1][0]
        if too_many := of_key[: max(0, len(of_key) - SESSIONS_OF_KEY + 1)]:
            await self._client.delete_records(KIND, too_many)


def _name(token: str) -> str:
    """Those that end first come first. No salt and no slow hash: nobody can guess the secret."""
    return f"{token[:15]}-{hashlib.sha256(token.encode()).hexdigest()}"


def _key_of(text: str | None) -> str | None:
    """None also for what another release stored and this one can't read: it lets nobody in."""
    try:
        return None if text is None else msgspec.json.decode(text, type=_Session).key
    except msgspec.MsgspecError:
        return None
