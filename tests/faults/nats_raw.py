"""NATS servers as others run them: with users, limits and settings that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from tickwheel.stores.nats.servers.process import find_binary

SOON_S = 20.0


@contextlib.asynccontextmanager
async def raw_server(folder: Path, conf: str) -> AsyncIterator[str]:
    """A server with this configuration; gives host and port."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("nats-server*.ports"):
        left.unlink()  # of one that was killed here
    file = folder / "raw.conf"
    file.write_text(f'host: "127.0.0.1"\nport: -1\nports_file_dir: "{folder}"\n{conf}')
    with (folder / "raw.log").open("wb") as log:
        process = subprocess.Popen([find_binary(), "-c", str(file)], stdout=log, stderr=log)
    try:
        async with asyncio.timeout(SOON_S):
            while not (place := _place(folder)) or not await _listens(place):
                assert process.poll() is None, (folder / "raw.log").read_text()
                await asyncio.sleep(0.02)
        yield place
    finally:
        process.kill()
        process.wait(SOON_S)


def jetstream(folder: Path) -> str:
    return f'jetstream {{ store_dir: "{folder}/js" }}\n'


def _place(folder: Path) -> str:
    for file in folder.glob("nats-server*.ports"):
        with contextlib.suppress(ValueError, LookupError):
            found: str = json.loads(file.read_text())["nats"][0]
            return found.removeprefix("nats://")
    return ""


async def _listens(place: str) -> bool:
    host, _, port = place.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True
