"""Who may speak to a NATS server, and over what, against real servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import nkeys
import pytest

from certificates import certificate
from stores import Harness, NatsHarness
from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.stores.nats.servers.process import find_binary
from tickwheel.stores.nats.servers.production import production_text, variables


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def serving(folder: Path, extra: str) -> Iterator[int]:
    """A server with these lines in its configuration; gives its port."""
    [port] = free_ports(1)
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


class Openable(Protocol):
    async def open(self) -> None: ...


async def open_soon(store: Openable, patience_s: float = 5) -> None:
    """Open what is on a server that is still starting."""
    end = time.monotonic() + patience_s
    while True:
        try:
            await store.open()
            return
        except StoreUnavailable as error:
            if time.monotonic() > end or "certificate" in str(error).lower():
                raise
            await asyncio.sleep(0.1)


async def lived(url: str, patience_s: float = 5) -> None:
    """One job's whole life, once the server is up."""
    harness = Elsewhere(url)
    await open_soon(harness, patience_s)
    [held] = await harness.claimed(harness.job())
    assert await harness.settle(harness.done(held))
    await harness.close()


# Whose a key is, as its text begins.
OPERATOR, ACCOUNT, USER = 14, 0, 20


def new_seed(kind: int = USER) -> tuple[bytes, str]:
    """A fresh nkey: its seed, and its public part."""
    # What a seed is made of: two bytes that say whose it is, the key, and a checksum.
    head = bytes([(18 << 3) | kind << 3 >> 5, (kind << 3 & 31) << 3])
    body = head + os.urandom(32)
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
    seed, public = new_seed()
    other, _ = new_seed()
    (tmp_path / "seed").write_bytes(seed)
    (tmp_path / "other").write_bytes(other)
    with serving(tmp_path, f"authorization {{ users: [{{ nkey: {public} }}] }}") as port:
        await lived(f"nats://127.0.0.1:{port}/ns?nkey={tmp_path}/seed")
        with pytest.raises(StoreError, match=r"(?i)authorization"):
            await lived(f"nats://127.0.0.1:{port}/ns?nkey={tmp_path}/other")


def jwt(issuer: bytes, subject: str, claims: Mapping[str, object]) -> str:
    """What the issuer says of the subject, signed."""
    pair = nkeys.from_seed(bytearray(issuer))
    said = {
        "jti": os.urandom(8).hex(),
        "iat": int(time.time()),
        "iss": pair.public_key.decode(),
        "sub": subject,
        "name": "tests",
        "nats": {**claims, "version": 2},
    }
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, said]
    text = ".".join(_base64(json.dumps(part).encode()) for part in parts)
    return f"{text}.{_base64(pair.sign(text.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def test_a_credentials_file_opens_the_store(tmp_path: Path) -> None:
    operator, operator_public = new_seed(OPERATOR)
    account, account_public = new_seed(ACCOUNT)
    _, system_public = new_seed(ACCOUNT)
    seed, public = new_seed()
    names = ("subs", "data", "payload", "conn", "leaf", "imports", "exports")
    disk = ("mem_storage", "disk_storage", "streams", "consumer")
    limits = {**dict.fromkeys(names, -1), "wildcards": True}
    ours = {"type": "account", "limits": {**limits, **dict.fromkeys(disk, -1)}}
    system = {"type": "account", "limits": limits}
    user = jwt(account, public, {"type": "user", **dict.fromkeys(names[:3], -1)})
    (tmp_path / "user.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
    )
    extra = f"""
        operator: "{jwt(operator, operator_public, {"type": "operator"})}"
        resolver: MEMORY
        resolver_preload: {{
            {account_public}: "{jwt(operator, account_public, ours)}"
            {system_public}: "{jwt(operator, system_public, system)}"
        }}
        system_account: {system_public}
    """
    with serving(tmp_path, extra) as port:
        await lived(f"nats://127.0.0.1:{port}/ns?creds={tmp_path}/user.creds")
        with pytest.raises(StoreError, match=r"(?i)authorization"):
            await lived(f"nats://127.0.0.1:{port}/ns")


async def test_a_token_opens_the_store_and_another_does_not(tmp_path: Path) -> None:
    with serving(tmp_path, "authorization { token: right }") as port:
        await lived(f"nats://right@127.0.0.1:{port}/ns")
        with pytest.raises(StoreError, match=r"(?i)authorization") as refused:
            await lived(f"nats://wrong@127.0.0.1:{port}/ns")
        assert "wrong" not in str(refused.value)


async def test_a_server_behind_tls_is_used_and_checked(tmp_path: Path) -> None:
    ca, cert, key = certificate(tmp_path / "right")
    other, _, _ = certificate(tmp_path / "other")
    with serving(tmp_path, f'tls {{ cert_file: "{cert}", key_file: "{key}" }}') as port:
        await lived(f"nats://127.0.0.1:{port}/ns?ca={ca}")
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            await lived(f"nats://127.0.0.1:{port}/ns?ca={other}")


async def test_a_server_that_asks_for_our_certificate(tmp_path: Path) -> None:
    ca, cert, key = certificate(tmp_path / "tls")
    tls = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca}", verify: true }}'
    with serving(tmp_path, tls) as port:
        await lived(f"nats://127.0.0.1:{port}/ns?ca={ca}&cert={cert}&key={key}")
        with pytest.raises(StoreUnavailable):
            await lived(f"nats://127.0.0.1:{port}/ns?ca={ca}")


async def test_the_production_config_makes_a_cluster_over_tls(tmp_path: Path) -> None:
    """As `tickwheel nats conf` prints it, but for what three servers of one machine can't share."""
    ca, _, _ = certificate(tmp_path / "tls")
    hosts = ("a", "b", "c")
    ports = free_ports(9)
    clients, routes, monitors = ports[:3], ports[3:6], ports[6:]
    passwords = {name: f"pw-{name}" for name in variables()}
    servers = []
    try:
        for number, name in enumerate(hosts):
            text = production_text(name=name, hosts=hosts, tls=str(tmp_path / "tls"))
            text = text.replace(":4222", f":{clients[number]}").replace("0.0.0.0", "127.0.0.1")
            text = text.replace(":8222", f":{monitors[number]}")
            text = text.replace('127.0.0.1:6222"', f'127.0.0.1:{routes[number]}"')
            for host, port in zip(hosts, routes, strict=True):
                text = text.replace(f"//{host}:6222", f"//127.0.0.1:{port}")
            text = text.replace("/var/lib/nats", f"{tmp_path}/{name}")
            config = tmp_path / f"{name}.conf"
            config.write_text(text)
            servers.append(
                subprocess.Popen(
                    [find_binary(), "-c", str(config)],
                    env={**os.environ, **passwords},
                    stderr=subprocess.DEVNULL,
                )
            )
        place = ",".join(f"127.0.0.1:{port}" for port in clients)
        password = passwords["NATS_OPERATOR_PASSWORD"]
        query = f"replicas=3&ca={ca}"
        await lived(f"nats://operator:{password}@{place}/default?{query}", patience_s=30)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(20)
