"""docs/testing.md is true, and pytest finds the fixture: both in projects of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()
# Each begins with the name of its file.
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))

# In place of an asyncio plugin.
CONFTEST = """
import asyncio, inspect, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = inspect.signature(pyfuncitem.obj).parameters
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )


def passed(done: subprocess.CompletedProcess[str], count: int) -> bool:
    return done.returncode == 0 and f"{count} passed" in done.stdout


@pytest.mark.slow
def test_every_example_of_the_page_passes(tmp_path: Path) -> None:
    assert len(BLOCKS) == PAGE.count("```python")
    for name, block in BLOCKS.items():
        (tmp_path / name).write_text(block)
    tests = sum(block.count("def test_") for block in BLOCKS.values())
    done = run_pytest(tmp_path)
    assert passed(done, tests), done.stdout + done.stderr
    # Nothing came near the app's own store.
    assert not list(tmp_path.glob("*.db*"))


@pytest.mark.slow
def test_pytest_finds_the_fixture_by_its_entry_point(tmp_path: Path) -> None:
    assert "tickwheel" in entry_points(group="pytest11").names, "run make setup"
    (tmp_path / "test_it.py").write_text("""
import sys
from tickwheel import App

app = App()

@app.task
def work(): ...

def test_what_is_not_used_is_not_imported():
    assert "tickwheel.testing" not in sys.modules

def test_plain(tickwheel):
    with tickwheel(app) as box:
        work.enqueue_sync()
        assert len(box.drain()) == 1

async def test_coroutine(tickwheel):
    async with tickwheel(app, inline=True) as box:
        await work.enqueue()
        assert len(box.runs) == 1

def test_failure(tickwheel):
    with tickwheel(app) as box:
        box.assert_enqueued(work)
""")
    done = run_pytest(tmp_path, "-p", "no:randomly")
    assert "3 passed" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "expected at least one job work(…), found none; nothing was enqueued" in done.stdout
    # The failure is shown where the test is, not inside Tickwheel.
    assert "test_it.py:25: AssertionError" in done.stdout
    off = run_pytest(tmp_path, "-p", "no:tickwheel")
    assert "fixture 'tickwheel' not found" in off.stdout
