"""`tickwheel serve` and `tickwheel dev`: the API in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import trustme
from worker_process import SHOP, Command, environment, folder, look, until

from receiver import receiving
from tickwheel import webhooks
from tickwheel.http.server import Listening, bind, serving

__all__ = ["folder"]

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


def url_in(said: str) -> str:
    found = re.search(r"^api +(\S+)/v1/openapi\.json$", said, re.MULTILINE)
    assert found, said
    return found[1]


# --- What is refused


@pytest.mark.parametrize(
    "argv, words",
    [
        (("--host", "0.0.0.0"), "there are no API keys"),
        (("--host", "::"), "there are no API keys"),
        (("--host", ""), "it is empty"),
        (("--port", "70000"), "70000 is not in the range"),
        (("shop:app", "--store", "memory://"), "name an app or use --store, not both"),
        (("nope:app",), "no module named 'nope'"),
        (("--tls-cert", "cert.pem"), "TLS needs both"),
        (("--tls-cert", "cert.pem", "--tls-key", "key.pem"), "can't be used"),
        (("--store", "nope://"), "no store for 'nope://'"),
    ],
)
def test_what_can_not_be_served_is_one_line(
    tmp_path: Path, argv: tuple[str, ...], words: str
) -> None:
    assert words in refused(tmp_path, *argv)


def refused(folder: Path, *argv: str) -> str:
    """What the command says, in a process of its own: it may end that."""
    result = subprocess.run(
        [sys.executable, "-m", "tickwheel", "serve", *argv],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    return next(line for line in result.stderr.splitlines() if line.startswith("error: "))


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, "--port", str(port))
    assert f"can't listen on 127.0.0.1 port {port}" in said


async def test_another_port_is_taken_if_that_is_wanted() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        async with serving(_nothing, Listening(port=port, or_any=True)) as url:
            assert url.startswith("http://127.0.0.1:") and not url.endswith(f":{port}")


async def _nothing(scope: object, receive: object, send: object) -> None: ...


def test_connections_are_known_to_be_tcp() -> None:
    """Or asyncio would not send small answers at once."""
    with bind("127.0.0.1", 0) as bound, socket.create_connection(bound.getsockname()):
        connection, _ = bound.accept()
        with connection:
            assert connection.proto == socket.IPPROTO_TCP


WITHOUT = """
import sys
import time
sys.modules["starlette"] = None
from importlib.util import find_spec
import importlib.util
importlib.util.find_spec = lambda name, *a: None if name == "starlette" else find_spec(name, *a)
from tickwheel.cli import main
sys.exit(main(["serve"]))
"""


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2
    assert "pip install 'tickwheel[http]'" in result.stderr


def test_the_package_itself_does_not_import_its_libraries() -> None:
    code = "import sys, tickwheel; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.split()
    assert not {"starlette", "uvicorn", "tickwheel.http"} & set(said)


# --- What is served


@pytest.mark.slow
@posix
def test_the_api_and_a_worker_in_one_process(folder: Path, runner: asyncio.Runner) -> None:
    with Command(folder, "serve", "shop:app", "--worker", "--port", "0") as server:
        server.until_it_says("worker ")
        until(lambda: "pid " in server.said, "the banner")
        assert "access     without API keys: this machine only" in server.said
        assert f"dashboard  {url_in(server.said)}/\n" in server.said
        with httpx.Client(base_url=url_in(server.said)) as client:
            assert client.get("/").headers["content-type"].startswith("text/html")
            secret = "s3cret"
            form = {"task": "mark", "arguments": {"name": "packed"}, "meta": {"note": secret}}
            id = client.post("/v1/jobs", json=form, params={}).json()["id"]
            until((folder / "packed").exists, "the job")
            assert (folder / "packed").read_text() == str(server.process.pid)
            client.get("/v1/jobs", params={"meta": f"note={secret}"})
            nap = {"task": "nap", "arguments": {"seconds": 1}}
            client.post("/v1/jobs", json=nap)
            until((folder / "napping").exists, "the nap")
        server.signal(signal.SIGTERM)
        assert server.code() == 0
        said = server.said
    assert (folder / "rested").exists()
    assert look(folder, runner, id).state == "done"
    assert re.search(r"INFO    tickwheel\.http: POST /v1/jobs 201 \S+ ms, anonymous, 127", said)
    assert "stopping: requests under way finish first" in said and secret not in said


@pytest.mark.slow
@posix
def test_a_store_alone_with_tls_behind_a_path(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    with Command(
        tmp_path,
        *("serve", "--store", "sqlite:///jobs.db", "--port", "0", "--root-path", "tick/"),
        *(
            "--no-dashboard",
            "--tls-cert",
            "cert.pem",
            "--tls-key",
            "key.pem",
            "--log-format",
            "json",
        ),
    ) as server:
        server.until_it_says("serving https://")
        found = re.search(r"serving (https://127\.0\.0\.1:(\d+)/tick)", server.said)
        assert found, server.said
        import ssl

        trust = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        base = f"https://localhost:{found[2]}"
        with httpx.Client(base_url=base, verify=trust) as client:
            answer = client.post("/v1/jobs", json={"task": "anything", "arguments": {"a": 1}})
            assert answer.status_code == 201, answer.text
            assert answer.headers["location"].startswith("/tick/v1/jobs/")
            assert client.get("/").status_code == 404
        server.signal(signal.SIGINT)
        assert server.code() == 0


@pytest.mark.slow
@posix
async def test_a_url_is_called_on_time_without_any_python(tmp_path: Path) -> None:
    key = webhooks.new_key()
    async with receiving() as receiver:
        env = {"TICKWHEEL_CALLBACK_KEYS": key, "TICKWHEEL_CALLBACK_ALLOW": receiver.url}
        argv = ("serve", "--store", "sqlite:///jobs.db", "--worker", "--port", "0")
        with Command(tmp_path, *argv, **env) as server:
            await asyncio.to_thread(until, lambda: "pid " in server.said, "the banner")
            async with httpx.AsyncClient(base_url=url_in(server.said)) as client:
                due = time.time() + 1
                form = {
                    "url": f"{receiver.url}/paid",
                    "body": {"order": 42},
                    "at": datetime.fromtimestamp(due, UTC).isoformat(),
                    "on_done": f"{receiver.url}/told",
                }
                created = await client.post("/v1/jobs", json=form)
                assert created.status_code == 201, created.text
                inside = await client.post("/v1/jobs", json={"url": "http://127.0.0.1:1/"})
                assert inside.status_code == 422
                [called] = await receiver.until(1, "/paid")
                assert time.time() >= due
                assert webhooks.verify(called.body, called.headers, key) == created.json()["id"]
                assert called.body == b'{"order":42}'
                [told] = await receiver.until(1, "/told")
                assert json.loads(told.body)["data"]["id"] == created.json()["id"]
                host = receiver.url.removeprefix("http://")
                counted = f'tickwheel_callbacks_total{{host="{host}",status="200"}} 2.0'
                async with asyncio.timeout(20):
                    while counted not in (await client.get("/metrics")).text:
                        await asyncio.sleep(0.05)
            server.signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.code) == 0
            assert key not in server.said


@pytest.mark.slow
@posix
def test_dev_serves_the_api_too(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    with Command(tmp_path, "dev", "shop:app") as dev:
        dev.until_it_says("started, serving default and http://")
        url = url_in(dev.said)
        assert f"default and {url}" in dev.said and f"dashboard  {url}/\n" in dev.said
        with httpx.Client(base_url=url) as client:
            assert client.get("/jobs").headers["content-type"].startswith("text/html")
            client.post("/v1/jobs", json={"task": "mark", "arguments": {"name": "packed"}})
        until((tmp_path / "packed").exists, "the job")
        dev.signal(signal.SIGINT)
        assert dev.code() == 0
