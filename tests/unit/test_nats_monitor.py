"""Asking a server's monitoring port: an answer, or None for everything else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tickwheel.stores.nats import monitor
from tickwheel.stores.nats.monitor import monitored


@asynccontextmanager
async def served(answer: bytes | None) -> AsyncIterator[str]:
    """The address of a server that gives this answer to whatever it is asked."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await done.wait()
        writer.write(answer or b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        done.set()
        server.close()


OK = b'HTTP/1.0 200 OK\r\n\r\n{"server_id": "N1"}'


async def test_a_page_is_decoded() -> None:
    async with served(OK) as address:
        assert await monitored(address, "varz") == {"server_id": "N1"}


async def test_this_machine_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with served(OK) as address:
        assert await monitored(address, "varz") is not None


@pytest.mark.parametrize(
    "answer",
    [b"", b"nonsense", b"HTTP/1.0 503 no\r\n\r\n{}", b"HTTP/1.0 200 OK\r\n\r\n{", None],
)
async def test_whatever_else_comes_is_no_answer(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "ANSWER_S", 0.1)
    async with served(answer) as address:
        assert await monitored(address, "varz") is None


@pytest.mark.parametrize(
    "address",
    ["", "ftp://host", "file:///etc", "http://127.0.0.1:9", "http://ann:secret@host", "http://["],
)
async def test_an_address_that_cannot_be_used_is_no_answer(address: str) -> None:
    assert await monitored(address, "varz") is None
