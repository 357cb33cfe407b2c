"""An app's access to its store: one client per event loop, and calls from code without one."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any, Protocol, TypeVar

from tickwheel import transaction
from tickwheel.changes import IfExists
from tickwheel.client import Client, JobInfo
from tickwheel.clock import MS_NS, Clock
from tickwheel.engine.counts import Counts
from tickwheel.errors import BadConfig, UsageError
from tickwheel.job import Job, which_added
from tickwheel.outbox import Outbox
from tickwheel.registry import Registry
from tickwheel.sealing import Sealing
from tickwheel.store import Store
from tickwheel.sync import Bridge
from tickwheel.trust import seal_all, sealed

R = TypeVar("R")


class Ambient(Protocol):
    """The transaction that the calling thread is in, as a framework knows it."""

    def connection(self) -> Any:
        """The connection to the database of the store or the outbox, if it is in a transaction."""

    def on_commit(self, call: Callable[[], object]) -> bool:
        """Call this when the transaction is committed; False if there is none."""


class StoreAccess:
    """The access to the store that an app, its tasks and its job handles share."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        outbox: Callable[[], Outbox | None],
        payload_limit: int,
        keys: Sealing,
    ) -> None:
        self._store = store
        self._keys = keys
        self._outbox = outbox
        self.payload_limit = payload_limit
        self.tasks = Registry()
        # What adds to the meta of each new job; and whether a job that a task enqueues has the meta
        # of the task's own job, unless its caller says otherwise.
        self.on_enqueue: list[Callable[[Job], Mapping[str, str] | None]] = []
        self.inherit_meta = False
        # The caller's transaction, where a framework knows of it.
        self.ambient: Ambient | None = None
        self._clock = clock
        # Counts what goes through the store, if metrics are on.
        self.counts: Counts | None = None
        # What else is put around a handle on the store, from the next one on.
        self.around: Callable[[Store], Store] | None = None
        self._connect: Callable[[], Client] = lambda: Client(self._new_handle(), clock)
        self._reset()

    @cached_property
    def store(self) -> Store:
        """The store as the app uses it: with keys, jobs are sealed on their way there."""
        return sealed(self._store, self._keys.trust)

    def _new_handle(self) -> Store:
        handle = self.store.new_handle()
        if self.counts is not None:
            handle = self.counts.counted(handle)
        return handle if self.around is None else self.around(handle)

    @property
    def outbox(self) -> Outbox | None:
        return self._outbox()

    def _reset(self) -> None:
        """Connections, threads and locks don't survive a fork."""
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client]
        self._clients = weakref.WeakKeyDictionary()
        # The loop and the client that `now_ms` used last: it is called for every job.
        self._last: tuple[asyncio.AbstractEventLoop, Client] | None = None
        self._lock = threading.Lock()
        self._bridge = Bridge()
        self._pid = os.getpid()

    def info_of(self, job: Job) -> JobInfo:
        return JobInfo.of(job, self.tasks.find(job.task))

    # --- With an event loop

    async def client(self) -> Client:
        """The client of the running event loop, open."""
        client = self._client()
        await client.ready()
        return client

    async def enter(self) -> None:
        """Open the client of the running event loop, and keep it open until `leave`."""
        client = self._client()
        client.users += 1
        try:
            await client.ready()
        except BaseException:
            await self._release(client)
            raise

    async def leave(self) -> None:
        client = self._clients.get(asyncio.get_running_loop())
        if client is not None:
            client.unwanted = True
            await self._release(client)

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Client]:
        """The client of the running event loop, which stays open until the block ends."""
        client = self._client()
        client.users += 1
        try:
            yield client
        finally:
            await self._release(client)

    def close_unused(self) -> None:
        """Close the client of the running event loop once nothing uses it."""
        self._client().unwanted = True

    async def _release(self, client: Client) -> None:
        """The last user closes it, if `close_unused` was called."""
        client.users = max(client.users - 1, 0)
        if client.users or not client.unwanted:
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            self._last = None
            if self._clients.get(loop) is client:
                del self._clients[loop]
        await client.close()

    def _client(self) -> Client:
        """The client of the running event loop; each loop has its own handle on the store."""
        if self._pid != os.getpid():
            self._reset()
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                for other in [each for each in self._clients if each.is_closed()]:
                    del self._clients[other]
                client = self._clients[loop] = self._connect()
        return client

    # --- Without one

    def run_sync(self, work: Coroutine[Any, Any, R]) -> R:
        if self._pid != os.getpid():
            self._reset()
        if self._bridge.is_here():
            work.close()
            raise UsageError(
                "app.sync and enqueue_sync can't be called inside another of their calls, for "
                "example by a validator: it would wait for itself"
            )

        async def undisturbed() -> R:
            # Another thread may close the app in the meantime.
            async with self.using():
                return await work

        return self._bridge.call(undisturbed())

    def now_ms(self) -> int:
        """The store's time as known here; without an open store, our own."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return -(-self._clock.now_ns() // MS_NS)
        last = self._last
        if last is not None and last[0] is loop:
            return last[1].clock.next_ms()
        client = self._clients.get(loop)
        if client is None:
            return -(-self._clock.now_ns() // MS_NS)
        self._last = loop, client
        return client.clock.next_ms()

    # --- Inside a user's transaction

    async def add_within(self, connection: Any, jobs: Sequence[Job]) -> list[bool]:
        statement = self._statement(connection, jobs)
        return self._added(jobs, await transaction.run(connection, statement))

    def add_within_sync(self, connection: Any, jobs: Sequence[Job]) -> list[bool]:
        statement = self._statement(connection, jobs)
        return self._added(jobs, transaction.run_sync(connection, statement))

    def joined(self) -> Any:
        """The connection whose transaction jobs join without being told; None if there is none."""
        return None if self.ambient is None else self.ambient.connection()

    def after_commit(self, jobs: Sequence[Job], if_exists: IfExists = IfExists.KEEP) -> bool:
        """Add these jobs once the caller's transaction is committed; False if it has none."""
        jobs = list(jobs)
        return self.ambient is not None and self.ambient.on_commit(
            lambda: self.run_sync(self._add(jobs, if_exists))
        )

    async def _add(self, jobs: Sequence[Job], if_exists: IfExists) -> None:
        client = await self.client()
        if if_exists is IfExists.KEEP:
            await client.add_many([jobs])
        else:
            await client.put_many(jobs, if_exists)

    def _statement(self, connection: Any, jobs: Sequence[Job]) -> transaction.Statement:
        driver = transaction.driver_of(connection)
        if self.outbox is not None:
            # Sealed here: who moves them to the store doesn't vouch for them.
            return self.outbox.adding(seal_all(self.store, jobs), driver=driver)
        if not isinstance(self.store, transaction.Transactional):
            raise BadConfig(
                "connection= needs a postgresql:// or sqlite:// store; with others, give the "
                "app an outbox in your database: App(…, outbox='postgresql://…')"
            )
        return self.store.adding(jobs, driver=driver)

    def _added(self, jobs: Sequence[Job], ids: Sequence[str]) -> list[bool]:
        """The outbox can't tell whether an id is taken: only the store can, when it gets the
        job."""
        if self.outbox is not None:
            return [True] * len(jobs)
        return which_added(jobs, ids)

    # --- In tests

    @contextmanager
    def replaced(
        self, clock: Clock, connect: Callable[[], Client], bridge: Callable[[Bridge], Bridge]
    ) -> Iterator[None]:
        """Use another clock and other clients for a while, then restore."""
        own = self._clock, self._connect, self._clients, self._bridge
        ambient, self.ambient = self.ambient, None
        self._clock, self._connect, self._bridge = clock, connect, bridge(self._bridge)
        self._clients, self._last = weakref.WeakKeyDictionary(), None
        try:
            yield
        finally:
            self._clock, self._connect, self._clients, self._bridge = own
            self.ambient = ambient
            self._last = None
