"""docs/http.md is true of Python, too: its examples run."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from http_server import served, shop

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


def load(folder: Path, name: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(BLOCKS[name])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_name() -> None:
    assert len(BLOCKS) == PAGE.count("```python") == 2


async def test_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = shop(tmp_path)
    async with served(app, keys=True) as its:
        monkeypatch.setenv("API", its.url)
        monkeypatch.setenv("KEY", its.texts[0])
        await asyncio.to_thread(load, tmp_path, "orders")
        said = capsys.readouterr().out
        assert said.startswith("waiting cancelled\n{2: BadArguments(")
        assert "order-43 {'order': 43}" in said and "QueueInfo(name='mail', paused=True" in said
        [schedule] = await app.schedules.list()
        assert schedule.name == "nightly"
        receipts = load(tmp_path, "receipts")
        async with app.worker():
            assert await receipts.receipt(7) == {"order": 7}
