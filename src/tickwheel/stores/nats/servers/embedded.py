"""The embedded server: one per folder, shared by all processes of this machine that open it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.stores.nats.servers.conf import ServerSettings
from tickwheel.stores.nats.servers.process import (
    POLL_S,
    START_S,
    Address,
    FolderTaken,
    Server,
    ask_monitor,
    read_address,
)


class Embedded:
    """A handle to the server of a folder.

    The first handle that needs the server starts it, the others join it. The server ends with the
    handle that started it, or with that handle's process. The next call of `ensure`, from any
    process, starts it again, with everything that was acknowledged, and on the same port if that is
    still free, so that the clients of the others find it again. Until somebody calls `ensure`, the
    server stays down.
    """

    def __init__(
        self, folder: str | Path, *, durability: str = "strict", patience_s: float = START_S
    ) -> None:
        self._durability = durability
        self._patience_s = patience_s
        settings = ServerSettings(folder=Path(folder), durability=durability)
        self._server = Server(settings, secure=True, patience_s=patience_s)
        self.folder = self._server.folder
        self._turn = asyncio.Lock()

    @property
    def owner(self) -> bool:
        """Whether this handle started the running server."""
        return self._server.alive

    async def ensure(self) -> str:
        """Join the server or start it; returns its URL. Cheap if it is running.

        Raises StoreUnavailable, BadConfig.
        """
        async with self._turn:
            return await self._start_or_join()

    async def close(self) -> None:
        """Stop the server if this handle started it."""
        async with self._turn:
            await self._server.stop()

    async def _start_or_join(self) -> str:
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while asyncio.get_running_loop().time() < deadline:
            try:
                await self._server.start()
                return self._server.url
            except FolderTaken:
                address = read_address(self.folder)
            if address is not None and await _answers(address):
                self._check_durability(address)
                return address.url
            await asyncio.sleep(POLL_S)
        raise StoreUnavailable(
            f"a NATS server holds {self.folder} but did not answer within {self._patience_s:g} s"
        )

    def _check_durability(self, address: Address) -> None:
        if self._durability == "strict" and address.durability != "strict":
            raise BadConfig(
                f"the NATS server on {self.folder} (pid {address.pid}) was started with durability "
                f"{address.durability}: ask for that, or stop it and start it again as strict"
            )


async def _answers(address: Address) -> bool:
    """Whether that very server still listens there: another program may have got its port."""
    about = await ask_monitor(address.monitor, "varz")
    return isinstance(about, dict) and about.get("server_id") == address.server
