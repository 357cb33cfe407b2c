"""docs/trust.md is true: its examples run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tickwheel import App, JobFailed
from tickwheel.trust import new_key

TEXT = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", TEXT, re.DOTALL))
PATIENCE_S = 30


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(f"{name}.py").absolute()
    path.write_text(BLOCKS[name])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_example_has_a_name() -> None:
    assert len(BLOCKS) == TEXT.count("```python") == 2


async def test_an_app_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for use in ("SIGNING", "ENCRYPTION"):
        monkeypatch.setenv(f"SHOP_{use}_KEY", new_key("2026-11"))
    shop = load("shop", monkeypatch)
    async with shop.app.worker(guarded=False):
        job = await shop.charge.enqueue("4111", cents=250)
        assert await job.result(timeout=PATIENCE_S) == "charged 250"


async def test_keys_are_changed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step, programs of the step before are still running."""
    rotation = load("rotation", monkeypatch)
    steps: list[App] = [rotation.before, rotation.step_1, rotation.step_2, rotation.step_3]
    tasks = [app.task(name="hello")(hello) for app in steps]

    async def runs(producer: int, worker: int) -> bool:
        async with steps[producer], steps[worker].worker(guarded=False):
            job = await tasks[producer].enqueue()
            try:
                return await job.result(timeout=PATIENCE_S) == "hello"
            except JobFailed:
                return False

    for pair in [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]:
        assert await runs(*pair), pair
    for pair in [(0, 3), (3, 0), (2, 0)]:
        assert not await runs(*pair), pair


async def hello() -> str:
    return "hello"


def test_the_commands_make_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r'python -c "(.*)"', TEXT)
    exec(code)
    App("memory://", signing_keys=[capsys.readouterr().out.strip()])
