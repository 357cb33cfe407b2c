"""docs/http.md is true: its examples run, and there is one for every operation."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from pathlib import Path

import pytest
from http_server import PATIENCE_S, served, shop
from worker_process import environment

from tickwheel.http.asgi import OPERATIONS

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("bash") is None, reason="needs curl and bash"
)
async def test_every_example_works_and_every_operation_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tickwheel.http")
    async with served(shop(tmp_path), keys=True) as its:
        key = its.client.headers["authorization"].removeprefix("Bearer ")
        script = "\n".join(BLOCKS)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", script),
            cwd=tmp_path,
            env=environment() | {"API": its.url, "KEY": key},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()[-3000:]
    called = {getattr(record, "operation", None) for record in caplog.records}
    assert {operation.id for operation in OPERATIONS} - called == set()
    assert '"added":1,"results":[' in said.decode()
