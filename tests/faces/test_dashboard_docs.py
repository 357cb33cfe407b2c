"""docs/dashboard.md is true: its example serves the dashboard, and its numbers are those."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import httpx
import pytest

from tickwheel.config import COLOURS, Settings
from tickwheel.http.streams import STREAMS_MOST, STREAMS_OF_KEY
from tickwheel.operate.sessions import SESSIONS_OF_KEY

PAGE = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text()
[CODE] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


async def test_the_example_serves_the_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_site.py").write_text(CODE)
    spec = importlib.util.spec_from_file_location("a_site", tmp_path / "a_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_site", module)
    spec.loader.exec_module(module)
    transport = httpx.ASGITransport(module.site, client=("127.0.0.1", 1))
    async with (
        module.lifespan(module.site),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        assert '<base href="/tickwheel/">' in (await client.get("/tickwheel/jobs")).text
        assert (await client.get("/tickwheel/v1/session")).json()["app"] == "shop"
        # As people type it.
        assert (await client.get("/tickwheel")).headers["location"].endswith("/tickwheel/")


def test_its_numbers_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert Settings().session_lifetime == "12h" and "lasts 12 hours" in text
    assert f"A key has {SESSIONS_OF_KEY} sign-ins at most" in text
    assert f"A server has {STREAMS_MOST} such tabs at most, and {STREAMS_OF_KEY} with" in text
    assert f"one of {', '.join(COLOURS[:-1])} and {COLOURS[-1]}" in text
