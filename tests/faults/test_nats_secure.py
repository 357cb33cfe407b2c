"""Who may speak to a NATS server, and over what: nkeys and TLS, against real servers."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nkeys
import pytest
from test_redis import certificate

from stores import Harness, NatsHarness
from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.stores.nats_process import find_binary


@contextmanager
def serving(folder: Path, extra: str) -> Iterator[int]:
    """A server with these lines in its configuration; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/data" }}\n{extra}\n'
    )
    process = subprocess.Popen([find_binary(), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(10)


class Elsewhere(NatsHarness):
    """On a server that is not the tests' own."""

    def __init__(self, url: str) -> None:
        Harness.__init__(self, url)


async def lived(url: str) -> None:
    """One job's whole life, once the server is up."""
    harness = Elsewhere(url)
    for tries_left in reversed(range(50)):
        try:
            await harness.open()
            break
        except StoreUnavailable as error:
            if not tries_left or "certificate" in str(error).lower():
                raise
            await asyncio.sleep(0.1)
    [held] = await harness.claimed(harness.job())
    assert await harness.settle(harness.done(held))
    await harness.close()


def user_seed() -> tuple[bytes, str]:
    """A fresh nkey of a user: its seed, and its public part."""
    raw = os.urandom(32)
    # What a seed is made of: two bytes that say whose it is, the key, and a checksum.
    head = bytes([(18 << 3) | (20 << 3) >> 5, ((20 << 3) & 31) << 3])
    body = head + raw
    seed = base64.b32encode(body + _crc16(body).to_bytes(2, "little")).rstrip(b"=")
    return seed, nkeys.from_seed(bytearray(seed)).public_key.decode()


def _crc16(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
        crc &= 0xFFFF
    return crc


async def test_an_nkey_opens_the_store_and_another_does_not(tmp_path: Path) -> None:
    seed, public = user_seed()
    other, _ = user_seed()
    (tmp_path / "seed").write_bytes(seed)
    (tmp_path / "other").write_bytes(other)
    with serving(tmp_path, f"authorization {{ users: [{{ nkey: {public} }}] }}") as port:
        await lived(f"nats://127.0.0.1:{port}/ns?nkey={tmp_path}/seed")
        with pytest.raises(StoreError, match=r"(?i)authorization"):
            await lived(f"nats://127.0.0.1:{port}/ns?nkey={tmp_path}/other")


async def test_a_server_behind_tls_is_used_and_checked(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "right")
    other, _ = certificate(tmp_path, "other")
    with serving(tmp_path, f'tls {{ cert_file: "{cert}", key_file: "{key}" }}') as port:
        await lived(f"nats://127.0.0.1:{port}/ns?ca={cert}")
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            await lived(f"nats://127.0.0.1:{port}/ns?ca={other}")
