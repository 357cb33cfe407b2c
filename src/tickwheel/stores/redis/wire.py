"""Calls to a Redis server, each bounded in time, and its errors in our words."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from tickwheel.errors import BadConfig, StoreError, StoreUnavailable
from tickwheel.stores.redis.options import Options

try:
    import redis.asyncio as driver
    from redis import exceptions as wrong
    from redis.asyncio.connection import Connection, SSLConnection
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
except ImportError as error:
    if error.name is None or error.name.partition(".")[0] != "redis":
        raise
    raise BadConfig("redis:// needs its driver: pip install 'tickwheel[redis]'") from None

# The driver's parts come from here, so that its absence is said in one place.
__all__ = ["Connection", "Wire", "translated", "wrong"]

# Connections that one handle uses at once; further calls wait for one of them.
CONNECTIONS = 16
CONNECT_S = 5.0
# A connection that was idle for longer is asked whether it is still there before it is used.
IDLE_S = 15.0

SCRIPT = Path(__file__).with_name("steps.lua").read_text(encoding="utf-8")
SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

_pack = msgspec.msgpack.Encoder().encode
# Errors that go away by themselves or by an operator's hand: nothing is wrong with the call. The
# driver makes some of them classes and strips the word; servers before 7 put it amid the words of
# an error inside a script.
_CODES = {
    wrong.ReadOnlyError: "READONLY",
    wrong.OutOfMemoryError: "OOM",
    wrong.BusyLoadingError: "LOADING",
    wrong.TryAgainError: "TRYAGAIN",
    wrong.ClusterDownError: "CLUSTERDOWN",
}
_CODE = re.compile(r"\b(READONLY|OOM|MISCONF|NOREPLICAS|LOADING|BUSY|MASTERDOWN)\b")
_FORBIDDEN = re.compile(r"\bNOPERM\b|no permissions|user executing the script can't", re.I)
_FIXES = {
    "READONLY": "it is a replica, or a failover is under way",
    "OOM": "its memory is full: raise maxmemory, or keep ended jobs for a shorter time",
    "MISCONF": "it can't write to its disk, and so takes no jobs",
    "NOREPLICAS": "too few replicas are connected (min-replicas-to-write)",
    "LOADING": "it is still reading its data",
    "BUSY": "a script holds it up",
}


class Wire:
    """One handle's connections to the server, or to the cluster."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._client: Any = _client(options)
        self._key = f"{options.root}job"

    async def step(self, name: str, *args: Any) -> Any:
        """Run one step of steps.lua. It is sent whole only where the server doesn't know it."""
        packed = _pack(args)
        try:
            return await self.send("EVALSHA", SHA, 1, self._key, name, packed)
        except wrong.NoScriptError:
            # A fresh server, a failover or SCRIPT FLUSH. Nothing has run yet.
            return await self.send("EVAL", SCRIPT, 1, self._key, name, packed)

    async def send(self, *command: Any) -> Any:
        """One command on the keys of this store."""
        return await self._bounded(self._client.execute_command(*command))

    async def ask(self, *command: Any) -> Any:
        """One command about the server itself; of a cluster, the node that has our keys."""
        if not self._options.cluster:
            return await self.send(*command)
        await self._bounded(self._client.initialize())
        node = self._client.get_node_from_key(self._key)
        return await self._bounded(self._client.execute_command(*command, target_nodes=node))

    async def _bounded(self, call: Any) -> Any:
        cancels = _cancels()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                answer = await call
        except wrong.NoScriptError:
            raise
        except (wrong.RedisError, OSError, TimeoutError) as error:
            failure = translated(error, self._options)
            if code_of(error) == "READONLY":
                # What was the primary no longer is: connect anew, to whoever is by then.
                await self._drop()
            raise failure from error
        # The driver sends with asyncio.wait_for, which before Python 3.12 loses a cancel that comes
        # in the moment when the sending is done.
        if _cancels() > cancels:
            raise asyncio.CancelledError
        return answer

    async def _drop(self) -> None:
        with contextlib.suppress(wrong.RedisError, OSError):
            if self._options.cluster:
                await self._client.aclose()
            else:
                await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        with contextlib.suppress(wrong.RedisError, OSError):
            await self._client.aclose()

    async def listener(self) -> Connection:
        """A connection of its own, for news. In a cluster every node passes them on."""
        host, port = self._options.host, self._options.port
        if self._options.cluster:
            await self._bounded(self._client.initialize())
            node = self._client.get_node_from_key(self._key)
            host, port = node.host, node.port
        kind = SSLConnection if self._options.tls else Connection
        return kind(host=host, port=port, **_settings(self._options), **_tls(self._options))


def _cancels() -> int:
    """How often the running task was asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _client(options: Options) -> Any:
    settings = _settings(options)
    if options.cluster:
        tls = {"ssl": True, **_tls(options)} if options.tls else {}
        del settings["db"]
        return driver.RedisCluster(
            host=options.host,
            port=options.port,
            max_connections=CONNECTIONS,
            **settings,
            **tls,
        )
    pool = driver.BlockingConnectionPool(
        connection_class=SSLConnection if options.tls else Connection,
        max_connections=CONNECTIONS,
        timeout=options.timeout_s,
        host=options.host,
        port=options.port,
        health_check_interval=IDLE_S,
        **settings,
        **_tls(options),
    )
    return driver.Redis.from_pool(pool)


def _settings(options: Options) -> dict[str, Any]:
    return {
        "db": options.db,
        "username": options.user,
        "password": options.password,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": min(CONNECT_S, options.timeout_s),
        "socket_keepalive": True,
        "protocol": 2,
        # Whoever calls repeats: only the caller knows what an answer to a repeat means.
        "retry": Retry(NoBackoff(), 0),
    }


def _tls(options: Options) -> dict[str, Any]:
    if not options.tls:
        return {}
    names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
    return {names[name]: str(path) for name, path in options.files.items()} | {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }


# --- Errors


def translated(error: Exception, options: Options) -> StoreError:
    """A driver's error as ours: away for now, or wrong until somebody mends it."""
    where, words = f"Redis at {options.where}", _words(error, options)
    if isinstance(error, wrong.AuthenticationError | wrong.AuthorizationError):
        return StoreError(f"{where} doesn't let us in: {words}: check user and password in the URL")
    if isinstance(error, wrong.NoPermissionError) or _FORBIDDEN.search(words):
        return StoreError(f"{where} forbids what is needed: {words}: see docs/redis.md for the ACL")
    if code := code_of(error):
        return StoreUnavailable(f"{where} refuses for now ({code}): {_FIXES.get(code, words)}")
    # Before OSError, of which Python's own TimeoutError is a kind.
    if isinstance(error, wrong.TimeoutError | TimeoutError):
        return StoreUnavailable(f"{where} gave no answer within {options.timeout_s:g} s")
    if isinstance(error, wrong.ConnectionError | wrong.ClusterError | OSError):
        return StoreUnavailable(f"{where} can't be reached: {words}")
    if isinstance(error, wrong.RedisClusterException):
        return StoreUnavailable(f"{where}, a cluster, can't be used for now: {words}")
    return StoreError(f"{where}: {words}")


def code_of(error: Exception) -> str:
    """Redis's word for an error that goes away; empty where it is another one."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    found = _CODE.search(str(error)) if isinstance(error, wrong.ResponseError) else None
    return found[1] if found else ""


def _words(error: Exception, options: Options) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words.replace(options.password, "***") if options.password else words
