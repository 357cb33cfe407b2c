"""What a `nats://` URL says: where the servers are, who we are there, and how the store uses them.

nats://user:password@host1:4222,host2:4222/namespace?replicas=3&shards=2&ahead=1s
nats+embedded:///folder        a server of our own, shared by the processes of this machine
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.errors import BadConfig
from tickwheel.stores.nats.servers.embedded import Embedded
from tickwheel.stores.nats.steps import subject_part
from tickwheel.stores.nats.wire import Credentials
from tickwheel.stores.url import Host, StoreUrl, UrlOptions

PORT = 4222
AHEAD_MS = 1_000
# With less, the server's own schedules, which are up to a quarter of a second late, come too late.
LEAST_AHEAD_MS = 750
SHARDS = 64
FILES = ("creds", "nkey", "ca", "cert", "key")
OPTIONS = ("replicas", "shards", "ahead", "durability", "monitor", *FILES)

_EXAMPLE = "nats://host:4222 or nats://host1:4222,host2:4222"
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SEED = re.compile(r"\bS[A-Z]A[A-Z2-7]{55}\b")
_JWT = re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]+")


@dataclass(slots=True)
class NatsOptions:
    """Everything that a URL says. Shared by a store and its other handles."""

    hosts: list[Host]
    namespace: str = "default"
    # A user without a password is a token, so it is not shown either.
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    # None leaves an existing stream as it is.
    replicas: int | None = None
    shards: int = 1
    ahead_ms: int = AHEAD_MS
    # What the operator says about the server's sync_interval, if anything.
    durability: str = ""
    # The server's HTTP monitoring address, if known.
    monitor: str = field(default="", repr=False)
    files: Mapping[str, Path] = field(default_factory=dict)
    embedded: Embedded | None = None
    # How many handles are open.
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, url: str) -> NatsOptions:
        """Raises BadConfig, never with the password in it."""
        parts = StoreUrl.of(url)
        given = UrlOptions(parts.query, OPTIONS)
        embedded = parts.scheme == "nats+embedded"
        options = cls([]) if embedded else _at(parts)
        if "replicas" in given.given:
            options.replicas = given.number("replicas", 1, least=1, most=5)
        options.shards = given.number("shards", 1, least=1, most=SHARDS)
        options.ahead_ms = given.duration_ms(
            "ahead", f"{AHEAD_MS}ms", least_ms=LEAST_AHEAD_MS, most_ms=60_000
        )
        options.durability = given.one_of("durability", "", "strict", "fast")
        options.monitor = given.given.get("monitor", "")
        options.files = {name: Path(given.given[name]) for name in FILES if name in given.given}
        if embedded:
            if not parts.file:
                raise BadConfig("nats+embedded:// names no folder: write nats+embedded:///jobs")
            options.durability = options.durability or "strict"
            options.embedded = Embedded(parts.file, durability=options.durability)
        return options

    async def open(self) -> list[Host]:
        """Where to connect, once a server of our own is started or joined."""
        if self.embedded is None:
            return self.hosts
        async with self._turn():
            joined = _at(StoreUrl.of(await self.embedded.ensure()))
            self.user, self.password = joined.user, joined.password
            self.users += 1
        return joined.hosts

    async def close(self) -> None:
        """The last handle of the process that started a server of our own stops it."""
        if self.embedded is None:
            return
        async with self._turn():
            self.users -= 1
            if not self.users:
                await self.embedded.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One handle at a time, whatever event loop it belongs to."""
        await asyncio.to_thread(self.lock.acquire)
        try:
            yield
        finally:
            self.lock.release()

    @property
    def inbox(self) -> str:
        """The prefix for replies: each user has one of its own that the others can't read."""
        return f"_INBOX_{subject_part(self.user)}" if self.password else "_INBOX"

    def credentials(self) -> Credentials:
        """How we log in."""
        if "creds" in self.files:
            text = _read(self.files["creds"])
            seed, jwt = _SEED.search(text), _JWT.search(text)
            if seed is None or jwt is None:
                raise BadConfig(f"{self.files['creds']} holds no NATS credentials")
            return _signed(seed[0], {"jwt": jwt[0]})
        if "nkey" in self.files:
            seed = _SEED.search(_read(self.files["nkey"]))
            if seed is None:
                raise BadConfig(f"{self.files['nkey']} holds no nkey seed")
            return _signed(seed[0], {})
        if self.user and not self.password:
            return Credentials({"auth_token": self.user})
        return Credentials({"user": self.user, "pass": self.password} if self.user else {})

    def tls(self) -> ssl.SSLContext | None:
        if not {"ca", "cert", "key"} & set(self.files):
            return None
        try:
            context = ssl.create_default_context(cafile=self.files.get("ca"))
            if "cert" in self.files:
                context.load_cert_chain(self.files["cert"], self.files.get("key"))
        except OSError as error:
            raise BadConfig(f"the TLS files can't be used: {error}") from error
        return context


def _at(url: StoreUrl) -> NatsOptions:
    """Hosts, who we are, and the namespace."""
    server = url.server(port=PORT, example=_EXAMPLE)
    if server.path and not _NAMESPACE.fullmatch(server.path):
        raise BadConfig(f"namespace {server.path!r}: must be letters, digits, - and _, at most 64")
    return NatsOptions(
        server.hosts,
        namespace=server.path or "default",
        user=server.user,
        password=server.password,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise BadConfig(f"{path} can't be read: {error.strerror}") from error


def _signed(seed: str, public: dict[str, str]) -> Credentials:
    try:
        import nkeys
    except ImportError:
        raise BadConfig("nkeys and creds files need: pip install 'tickwheel[nats]'") from None
    try:
        pair = nkeys.from_seed(seed.encode())
    except nkeys.NkeysError as error:
        raise BadConfig(f"the nkey seed can't be used: {error}") from None

    def sign(nonce: bytes) -> str:
        return base64.urlsafe_b64encode(pair.sign(nonce)).rstrip(b"=").decode()

    return Credentials(public or {"nkey": pair.public_key.decode()}, sign)
