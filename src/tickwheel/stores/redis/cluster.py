"""A client for the one cluster node that has our keys; it follows them when they are moved.

All keys of a store are in one slot, so only one node matters at a time. The driver's cluster client
can't be used: it sends ASKING and the command that follows it on different connections, and when it
learns of a move it closes connections that other calls are using. See docs/adr/0016.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from tickwheel.stores.redis.connections import Address, client_of, errors, key_slot
from tickwheel.stores.redis.url import RedisOptions

# How long a call waits while its keys are being moved, and how often it retries. Not for long: the
# `now_ms` in its arguments gets old.
PATIENCE_S = 1.0
RETRY_S = 0.05
# How many redirections are followed without a pause. Two nodes may redirect to each other briefly.
HOPS = 2


class ClusterClient:
    """Sends commands to the node that has our slot."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._slot = key_slot(options.root.encode())
        self._seed: Address = (options.host, options.port)
        # All known nodes, in the order in which we ask them where our slot is.
        self._nodes: dict[Address, None] = {self._seed: None}
        self._clients: dict[Address, Any] = {}
        self._home: Address | None = None
        self._finding = asyncio.Lock()

    async def execute_command(self, *command: Any) -> Any:
        """Follows redirections. That is safe: a node that redirects has not run the command."""
        now = asyncio.get_running_loop().time
        until, hops = now() + PATIENCE_S, 0
        ask: Address | None = None
        while True:
            node = ask or await self.home()
            try:
                if ask:
                    return await self._asking(ask, command)
                return await self._client(node).execute_command(*command)
            except errors.MovedError as moved:
                self._home, ask = _address(moved.host, moved.port, node), None
                error: Exception = moved
                hops += 1
            except errors.AskError as asked:
                ask, error = _address(asked.host, asked.port, node), asked
                hops += 1
            except errors.TryAgainError as again:
                ask, error = None, again
                hops = HOPS + 1
            if hops > HOPS:
                if now() >= until:
                    raise error
                await asyncio.sleep(RETRY_S)
                hops = 0

    async def _asking(self, node: Address, command: tuple[Any, ...]) -> Any:
        """ASKING applies to the next command on the same connection, so both go in one pipeline."""
        pipe = self._client(node).pipeline(transaction=False)
        pipe.execute_command("ASKING")
        pipe.execute_command(*command)
        _, answer = await pipe.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        return answer

    # --- Nodes

    async def home(self) -> Address:
        """The node that has our slot, according to the last answer."""
        async with self._finding:
            if self._home is None:
                self._home = await self._found()
            return self._home

    async def home_client(self) -> Any:
        return self._client(await self.home())

    def lost(self) -> None:
        """The node failed: before the next call, find out again who has our slot."""
        self._home = None

    async def _found(self) -> Address:
        failure: Exception = errors.ClusterDownError("no node has the slot of these keys")
        for node in list(self._nodes):
            # To the end of the order first: a node that doesn't answer may use up all our time.
            self._nodes[node] = self._nodes.pop(node)
            try:
                slots = await self._client(node).execute_command("CLUSTER", "SLOTS")
            except errors.AuthenticationError:
                raise
            except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
                failure = error
                continue
            owner = await self._learn(slots, node)
            if owner is not None:
                return owner
        raise failure

    async def _learn(self, slots: Any, teller: Address) -> Address | None:
        """Remember all nodes; returns the one that has our slot."""
        owner: Address | None = None
        nodes: list[Address] = []
        for first, last, *members in slots:
            addresses = [_address(host, port, teller) for host, port, *_ in members]
            nodes += addresses
            if first <= self._slot <= last:
                owner = addresses[0]
        if nodes:
            self._nodes = dict.fromkeys([*nodes, self._seed])
        for gone in [each for each in self._clients if each not in self._nodes]:
            await self._clients.pop(gone).aclose()
        return owner

    def _client(self, node: Address) -> Any:
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = client_of(self._options, node)
        return client

    # --- Closing

    def _all(self) -> Iterator[Any]:
        yield from list(self._clients.values())

    async def disconnect(self, *, inuse_connections: bool) -> None:
        for client in self._all():
            await client.connection_pool.disconnect(inuse_connections)

    async def aclose(self) -> None:
        for client in self._all():
            await client.aclose()


def _address(host: Any, port: Any, teller: Address) -> Address:
    """A node that doesn't know its own host leaves it out; then it is the host that answered."""
    name = host.decode() if isinstance(host, bytes) else host
    return (teller[0] if name in (None, "", "?") else str(name)), int(port)
