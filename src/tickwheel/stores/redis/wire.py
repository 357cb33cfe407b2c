"""Calls to a Redis server: each has a timeout, and raises our errors instead of the driver's."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.masking import scrubbed
from tickwheel.stores.redis.cluster import ClusterClient
from tickwheel.stores.redis.connections import Connection, client_of, connection_to, errors
from tickwheel.stores.redis.keys import FIXED
from tickwheel.stores.redis.url import RedisOptions


def _script() -> str:
    """statements.lua with the parts that it includes: Redis knows only whole scripts."""
    folder = Path(__file__).parent
    whole = (folder / "statements.lua").read_text(encoding="utf-8")
    for name in ("parking.lua", "changing.lua"):
        part = (folder / name).read_text(encoding="utf-8")
        whole = whole.replace(f"-- include {name}\n", part)
    return whole


SCRIPT = _script()
SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

_pack = msgspec.msgpack.Encoder().encode
# Errors that pass, or that an operator can end; the call itself was right. The driver turns some of
# them into classes and drops the code. Servers before 7 put the code in the middle of the message
# if a script failed.
_CODES = {
    errors.ReadOnlyError: "READONLY",
    errors.OutOfMemoryError: "OOM",
    errors.BusyLoadingError: "LOADING",
    errors.TryAgainError: "TRYAGAIN",
    errors.ClusterDownError: "CLUSTERDOWN",
    errors.AskError: "MOVED",
}
_CODE = re.compile(
    r"\b(READONLY|OOM|MISCONF|NOREPLICAS|LOADING|BUSY|MASTERDOWN|TRYAGAIN|CLUSTERDOWN"
    r"|non local key)\b"
)
_FORBIDDEN = re.compile(r"\bNOPERM\b|no permissions|user executing the script can't", re.I)
_MOVING = (
    "its keys are being moved to another node; if no move is under way, one was interrupted: "
    "run redis-cli --cluster fix"
)
_FIXES = {
    "READONLY": "it is a replica, or a failover is under way",
    "OOM": "its memory is full: raise maxmemory, or keep ended jobs for a shorter time",
    "MISCONF": "it can't write to its disk, so it accepts no jobs",
    "NOREPLICAS": "too few replicas are connected (min-replicas-to-write)",
    "LOADING": "it is still loading its data",
    "BUSY": "a long script is running",
    "TRYAGAIN": _MOVING,
    "MOVED": _MOVING,
    "non local key": _MOVING,
    "CLUSTERDOWN": "too many nodes of the cluster are down, or none has the slot of these keys",
}


class Wire:
    """One handle's connections to the server, or to the cluster."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._cluster = ClusterClient(options) if options.cluster else None
        self._client: Any = self._cluster or client_of(options, (options.host, options.port))
        self._fixed = [options.root + name for name in FIXED]

    def key(self, name: str) -> str:
        """The full name of a key of this store."""
        return self._options.root + name

    async def step(self, name: str, *args: Any, keys: Iterable[str] = ()) -> Any:
        """Run one step of statements.lua, which touches these keys and the fixed ones.

        The script itself is sent only if the server doesn't have it.
        """
        root, packed = self._options.root, _pack(args)
        names = self._fixed + [root + key for key in keys]
        try:
            return await self.send("EVALSHA", SHA, len(names), *names, name, packed)
        except errors.NoScriptError:
            # After a restart, a failover or SCRIPT FLUSH. Nothing has run yet.
            return await self.send("EVAL", SCRIPT, len(names), *names, name, packed)

    async def send(self, *command: Any) -> Any:
        """Run one command on the keys of this store."""
        return await self._bounded(self._client.execute_command(*command))

    async def ask(self, *command: Any) -> Any:
        """Run one command about the server itself; in a cluster, the node that has our keys."""
        return await self._bounded(self._ask_home(*command))

    async def _ask_home(self, *command: Any) -> Any:
        client = await self._cluster.home_client() if self._cluster else self._client
        return await client.execute_command(*command)

    async def _bounded(self, call: Any) -> Any:
        cancels = _cancels()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                answer = await call
        except errors.NoScriptError:
            raise
        except (errors.RedisError, OSError, TimeoutError) as error:
            failure = translated(error, self._options)
            if self._cluster is not None:
                self._cluster.lost()
            if code_of(error) == "READONLY":
                # After a failover, new connections lead to the new primary.
                await self._drop()
            raise failure from error
        # The driver sends with asyncio.wait_for. Before Python 3.12, that loses a cancellation that
        # comes just when it is done.
        if _cancels() > cancels:
            raise asyncio.CancelledError
        return answer

    async def _drop(self) -> None:
        with contextlib.suppress(errors.RedisError, OSError):
            pool = self._cluster or self._client.connection_pool
            await pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        with contextlib.suppress(errors.RedisError, OSError):
            await self._client.aclose()

    async def listener(self) -> Connection:
        """A separate connection for SUBSCRIBE. In a cluster, every node forwards messages."""
        address = self._options.host, self._options.port
        if self._cluster is not None:
            address = await self._bounded(self._cluster.home())
        return connection_to(self._options, address)


def _cancels() -> int:
    """How often the running task was cancelled."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


# --- Errors


def translated(error: Exception, options: RedisOptions) -> StoreError:
    """The error for a driver's error: StoreUnavailable if it may pass, or else StoreError."""
    where, words = f"Redis at {options.where}", _words(error, options)
    if isinstance(error, errors.AuthenticationError | errors.AuthorizationError):
        return StoreError(f"{where} refuses the login: {words}: check user and password in the URL")
    if isinstance(error, errors.NoPermissionError) or _FORBIDDEN.search(words):
        return StoreError(f"{where} denies a permission: {words}: see docs/redis.md for the ACL")
    if isinstance(error, errors.AskError) and not options.cluster:
        return StoreError(f"{where} is a node of a cluster: add cluster=true to the URL")
    if code := code_of(error):
        return StoreUnavailable(f"{where} is unavailable ({code}): {_FIXES.get(code, words)}")
    # Before OSError, because Python's TimeoutError is a subclass of it.
    if isinstance(error, errors.TimeoutError | TimeoutError):
        return StoreUnavailable(f"{where} did not answer within {options.timeout_s:g} s")
    if isinstance(error, errors.ConnectionError | OSError):
        return StoreUnavailable(f"{where} can't be reached: {words}")
    return StoreError(f"{where}: {words}")


def code_of(error: Exception) -> str:
    """Redis's code for an error that may pass; empty for other errors."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    found = _CODE.search(str(error)) if isinstance(error, errors.ResponseError) else None
    return found[1] if found else ""


def _words(error: Exception, options: RedisOptions) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return scrubbed(words, options.password)
