"""The README is true: its code runs, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_the_first_example_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(BLOCKS[0])
    worker = subprocess.Popen(
        [sys.executable, "-m", "tickwheel", "worker", "shop:app"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        shop = run(tmp_path, "shop.py")
        assert "order 42 cancelled" in shop.stdout, shop.stderr
        jobs = run(tmp_path, "-m", "tickwheel", "jobs", "list", "--store", "sqlite:///jobs.db")
        assert "cancel_order" in jobs.stdout, jobs.stderr
    finally:
        worker.terminate()
        assert worker.wait(20) == 0


@pytest.mark.parametrize("block", BLOCKS[1:], ids=range(2, len(BLOCKS) + 1))
def test_every_other_example_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block)
    example = run(tmp_path, "-W", "error", "example.py")
    assert example.returncode == 0, example.stderr


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_every_link_leads_somewhere(path: str) -> None:
    assert path.startswith("https://") or (ROOT / path).exists()
