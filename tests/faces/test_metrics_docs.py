"""docs/metrics.md is true: its examples run."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tickwheel import JobFailed

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
PATIENCE_S = 30

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports an example, on a store in memory."""
    monkeypatch.chdir(tmp_path)

    def loaded(name: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(BLOCKS[name].replace("sqlite:///jobs.db", "memory://"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_every_example_has_a_name() -> None:
    assert len(BLOCKS) == PAGE.count("```python") == 4


async def test_metrics_in_a_program_of_one_s_own(load: Load) -> None:
    embedded = load("embedded")
    async with embedded.app:
        body, kind = await embedded.main()
    assert kind.startswith("text/plain")
    assert b'tickwheel_jobs_done_total{queue="default",task="ship"} 1.0' in body
    assert b'tickwheel_jobs_added_total{queue="default",task="ship"} 1.0' in body


def test_the_objective(load: Load) -> None:
    assert str(load("promise").app.objective) == "99% within 100ms"


async def test_the_function_is_told(load: Load) -> None:
    oncall = load("oncall")
    async with oncall.app, oncall.app.worker():
        with pytest.raises(JobFailed):
            await (await oncall.charge.enqueue()).result(timeout=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while not oncall.told:
                await asyncio.sleep(0.01)
    [alert] = oncall.told
    assert (alert.kind, alert.subject) == ("dead", "charge")


async def test_an_instrumented_app_works_without_an_sdk(load: Load) -> None:
    instrumented = load("instrumented")
    async with instrumented.app, instrumented.app.worker():
        job = await instrumented.send.enqueue("a")
        assert await job.result(timeout=PATIENCE_S) == "a"
