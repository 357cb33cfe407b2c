"""Where a NATS store is and how it is to be: from its URL.

nats://user:password@host1:4222,host2:4222/namespace?replicas=3&shards=2&ahead=1s
nats+embedded:///folder            a server of our own, shared by the processes of this machine
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
from urllib.parse import parse_qsl, unquote

from tickwheel.config import close_to
from tickwheel.errors import BadConfig, BadTime
from tickwheel.span import span_ms
from tickwheel.stores.nats.server import Embedded
from tickwheel.stores.nats.steps import token
from tickwheel.stores.nats.wire import Sign

PORT = 4222
AHEAD_MS = 1_000
# Below this the server's own schedules, coarse to a quarter of a second, come too late.
LEAST_AHEAD_MS = 750
SHARDS = 64
KNOWN = (
    "replicas",
    "shards",
    "ahead",
    "durability",
    "monitor",
    "creds",
    "nkey",
    "ca",
    "cert",
    "key",
)

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SEED = re.compile(r"\bS[A-Z]A[A-Z2-7]{55}\b")
_JWT = re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]+")


@dataclass(slots=True)
class Options:
    """Everything that a URL says. Shared by a store and its twins."""

    hosts: list[tuple[str, int]]
    namespace: str = "default"
    # A user without a password is a token: neither is for anybody's log.
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    # None leaves a stream that is there as it is.
    replicas: int | None = None
    shards: int = 1
    ahead_ms: int = AHEAD_MS
    # What the operator says of the server's sync_interval; empty where nothing was said.
    durability: str = ""
    # The server's HTTP monitoring address, where it can be asked.
    monitor: str = ""
    files: Mapping[str, Path] = field(default_factory=dict)
    embedded: Embedded | None = None
    # Open handles: the store and its twins.
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, url: str) -> Options:
        """Raises BadConfig, never with the password in it."""
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        given = _query(query)
        options = cls([]) if scheme == "nats+embedded" else _at(place)
        options.replicas = _number("replicas", given, 1, 5) if "replicas" in given else None
        options.shards = _number("shards", given, 1, SHARDS)
        options.ahead_ms = _ahead(given.get("ahead"))
        options.durability = _one_of("durability", given, ("", "strict", "fast"))
        options.monitor = given.get("monitor", "")
        options.files = {
            name: Path(given[name])
            for name in ("creds", "nkey", "ca", "cert", "key")
            if name in given
        }
        if scheme == "nats+embedded":
            folder = unquote(place.removeprefix("/"))
            if not folder:
                raise BadConfig("nats+embedded:// names no folder: write nats+embedded:///jobs")
            options.durability = options.durability or "strict"
            options.embedded = Embedded(folder, durability=options.durability)
        return options

    async def open(self) -> list[tuple[str, int]]:
        """Where to connect; a server of our own is started or joined first."""
        if self.embedded is None:
            return self.hosts
        async with self._turn():
            joined = _at((await self.embedded.ensure()).partition("://")[2])
            self.user, self.password = joined.user, joined.password
            self.users += 1
        return joined.hosts

    async def close(self) -> None:
        """A server of our own ends with the last handle of the process that started it."""
        if self.embedded is None:
            return
        async with self._turn():
            self.users -= 1
            if not self.users:
                await self.embedded.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One handle after the other, whatever event loop it belongs to."""
        await asyncio.to_thread(self.lock.acquire)
        try:
            yield
        finally:
            self.lock.release()

    @property
    def inbox(self) -> str:
        """Where answers come to: each user has a place of its own, closed to the others."""
        return f"_INBOX_{token(self.user)}" if self.password else "_INBOX"

    def sign(self) -> Sign:
        """Who we are, for the server."""
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
            return Sign({"auth_token": self.user})
        return Sign({"user": self.user, "pass": self.password} if self.user else {})

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


def _at(place: str) -> Options:
    """Hosts, who we are, and the namespace."""
    authority, _, namespace = place.partition("/")
    login, at, hosts = authority.rpartition("@")
    user, _, password = login.partition(":")
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise BadConfig(
            f"namespace {namespace!r}: it is made of letters, digits, - and _, 64 at most"
        )
    return Options(
        [_host(each) for each in hosts.split(",")],
        namespace=namespace or "default",
        user=unquote(user) if at else "",
        password=unquote(password) if at else "",
    )


def _host(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadConfig("a NATS URL names hosts: nats://host:4222 or nats://host1:4222,host2:4222")
    return host.strip("[]"), int(port)


def _query(text: str) -> dict[str, str]:
    given = dict(parse_qsl(text, keep_blank_values=True))
    for name in given:
        if name not in KNOWN:
            raise BadConfig(
                f"a NATS URL has no option {name!r}{close_to(name, KNOWN)} "
                f"There are: {', '.join(KNOWN)}"
            )
    return given


def _number(name: str, given: Mapping[str, str], least: int, most: int) -> int:
    text = given.get(name, str(least))
    if not text.isdigit() or not least <= int(text) <= most:
        raise BadConfig(f"{name}={text}: it is from {least} to {most}")
    return int(text)


def _one_of(name: str, given: Mapping[str, str], known: tuple[str, ...]) -> str:
    value = given.get(name, "")
    if value not in known:
        raise BadConfig(f"{name}={value}: it is {' or '.join(filter(None, known))}")
    return value


def _ahead(text: str | None) -> int:
    if text is None:
        return AHEAD_MS
    try:
        ahead_ms = span_ms(text)
    except BadTime as error:
        raise BadConfig(f"ahead: {error}") from None
    if not LEAST_AHEAD_MS <= ahead_ms <= 60_000:
        raise BadConfig(f"ahead={text}: it is from {LEAST_AHEAD_MS}ms to 1m")
    return ahead_ms


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise BadConfig(f"{path} can't be read: {error.strerror}") from error


def _signed(seed: str, public: dict[str, str]) -> Sign:
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

    return Sign(public or {"nkey": pair.public_key.decode()}, sign)
