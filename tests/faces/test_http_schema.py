"""The served OpenAPI document is true: generated requests get documented answers only."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from http_server import served, shop
from worker_process import environment

from tickwheel.http import jobs

SECONDS = 110
# Not checked: that every id exists, what only makes sense for a sequence of requests, and whether
# a batch is refused as a whole.
CONFIG = """
[checks]
positive_data_acceptance.enabled = false
missing_required_header.enabled = false
use_after_free.enabled = false
ensure_resource_availability.enabled = false
object_level_authorization.enabled = false
negative_data_rejection.expected-statuses = ["4xx"]

[[operations]]
include-name = "POST /v1/jobs/batch"
checks.negative_data_rejection.enabled = false
"""

# Ended within the time, whatever it finds.
ST = """
import sys
from schemathesis.cli import schemathesis
sys.argv[0] = "schemathesis"
schemathesis()
"""


@pytest.mark.slow
async def test_generated_requests_get_no_server_error_and_only_documented_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no time to wait for the end of jobs.
    monkeypatch.setattr(jobs, "WAIT_MOST_S", 0.1)
    async with served(shop(tmp_path), keys=True) as its:
        await its.add(id="order-1", delay="1h")
        (tmp_path / "schemathesis.toml").write_text(CONFIG)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ST, "run", f"{its.url}/v1/openapi.json"),
            *("--header", f"Authorization: {its.client.headers['authorization']}"),
            *("--phases", "coverage,fuzzing", "--max-examples", "15", "--seed", "1"),
            # Several threads that parse at the same time fail in Python 3.11 itself.
            *("--workers", "1"),
            # A stream does not end: tests/faces/test_http_watch.py.
            *("--exclude-operation-id", "revoke_key", "--exclude-operation-id", "watch"),
            *("--generation-database", "none"),
            *("--no-color", "--max-failures", "5", "--request-timeout", "20"),
            cwd=tmp_path,
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(SECONDS):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, said.decode()[-6000:]
