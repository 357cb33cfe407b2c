"""`tickwheel dev`: a real process that restarts when a file changes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from worker_process import Command

from tickwheel.cli.autoreload import differing, stamps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="needs POSIX"),
]

SHOP = """
from tickwheel import App
app = App("sqlite:///jobs.db")
@app.every("1s")
def tick() -> None:
    print("first", flush=True)
"""


def test_a_change_restarts_the_worker_and_a_mistake_waits_for_its_fix(
    tmp_path: Path,
) -> None:
    shop = tmp_path / "shop.py"
    shop.write_text(SHOP)
    with Command(tmp_path, "dev", "shop:app") as dev:
        dev.until_it_says("first")
        shop.write_text(SHOP.replace("first", "second"))
        dev.until_it_says("second")
        shop.write_text(SHOP + "oops = (\n")
        dev.until_it_says("it restarts when a file changes")
        assert "shop.py:7: '(' was never closed" in dev.said
        shop.write_text(SHOP.replace("first", "third"))
        dev.until_it_says("third")
        dev.signal(signal.SIGINT)
        assert dev.code() == 0


def test_what_is_watched(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "sub/c.toml", ".hidden/d.py", "env/pyvenv.cfg", "env/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = stamps(tmp_path)
    assert sorted(Path(name).name for name in before) == ["a.py", "c.toml"]
    assert differing(before, before) == []
    (tmp_path / "a.py").unlink()
    (tmp_path / "new.py").touch()
    names = [Path(name).name for name in differing(before, stamps(tmp_path))]
    assert names == ["a.py", "new.py"]
