"""The README is true: its code runs, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
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


def commands(id: str) -> Iterator[list[str]]:
    """The commands of "Operate" that end by themselves, for this job."""
    [block] = re.findall(r"## Operate\n\n```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines():
        _, *words = shlex.split(line, comments=True)
        if words[0] not in ("dev", "worker"):
            # Nobody is there to ask.
            yes = ["--yes"] if words[1:2] == ["cancel"] else []
            yield [id if word == "ID" else word for word in words] + yes


def test_the_first_example_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(BLOCKS[0])
    log = tmp_path / "log"
    with log.open("w") as stderr:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tickwheel", "worker", "shop:app"], cwd=tmp_path, stderr=stderr
        )
    try:
        shop = run(tmp_path, "shop.py")
        assert "order 42 cancelled" in shop.stdout, shop.stderr
        [id] = re.findall(r"stored: (\w+)", shop.stdout)
        for words in commands(id):
            said = run(tmp_path, "-m", "tickwheel", *words)
            assert said.returncode == 0, (words, said.stdout, said.stderr)
        jobs = run(tmp_path, "-m", "tickwheel", "jobs")
        assert re.search(r"done +cancel_order +order_id=42", jobs.stdout), jobs.stderr
    finally:
        worker.terminate()
        assert worker.wait(20) == 0
    line = r"INFO    tickwheel: cancel_order \w+…?: done in \w+, \w+ late"
    assert re.search(line, README)
    assert re.search(line, log.read_text()), log.read_text()


@pytest.mark.parametrize("block", BLOCKS[1:], ids=range(2, len(BLOCKS) + 1))
def test_every_other_example_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block)
    example = run(tmp_path, "-W", "error", "example.py")
    assert example.returncode == 0, example.stderr


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_every_link_leads_somewhere(path: str) -> None:
    assert path.startswith("https://") or (ROOT / path).exists()
