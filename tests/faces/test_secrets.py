"""No command shows a password or a token, however its URL is written: not on stdout, not on stderr.

The servers are not there: what can't be reached is what is named in errors and in the log.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spellings import NOWHERE, SECRET, SPELLINGS
from tickwheel.cli import main

APP = """
import logging
from tickwheel import App
logging.basicConfig(level="DEBUG")
app = App()
print(app, repr(app), app.outbox)
"""
# A few of each kind, for what takes a process.
SOME = (
    f"nats://{SECRET}@{NOWHERE}",
    f"nats://ann:{SECRET}@{NOWHERE}",
    f"redis://:{SECRET}#x@{NOWHERE}?timeout=1s",
    f"postgresql://ann:{SECRET}%3F@{NOWHERE}/shop?timeout=1s",
    f"postgresql://ann@{NOWHERE}/shop?password={SECRET}&timeout=1s",
    f"sqlite:///no/such/folder/jobs.db?password={SECRET}",
    f"memory://ann:{SECRET}@host",
)


@pytest.mark.parametrize("command", ["config", "config -o json", "migrate", "worker", "jobs list"])
def test_no_spelling_is_shown(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in SPELLINGS:
        monkeypatch.setenv("TICKWHEEL_STORE", url)
        monkeypatch.setenv("TICKWHEEL_OUTBOX", url)
        # Where a URL doesn't belong, too.
        main(command.split() if "config" in command else [*command.split(), url])
        out, err = capsys.readouterr()
        assert out or err
        assert SECRET not in out + err, url


@pytest.mark.slow
@pytest.mark.parametrize("url", SOME)
@pytest.mark.parametrize("command", ["worker shop:app", "doctor --store URL"])
def test_nor_when_a_store_cannot_be_used(url: str, command: str, tmp_path: Path) -> None:
    said = run(tmp_path, command.replace("URL", url), TICKWHEEL_STORE=url)
    assert SECRET not in said
    assert "error" in said


@pytest.mark.slow
@pytest.mark.parametrize("url", SOME[-4:])
def test_nor_that_of_the_outbox(url: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    said = run(tmp_path, "outbox shop:app --once", TICKWHEEL_STORE=store, TICKWHEEL_OUTBOX=url)
    assert SECRET not in said
    assert "error" in said


@pytest.mark.slow
def test_the_banner_of_a_worker_shows_the_store_and_not_its_password(tmp_path: Path) -> None:
    """With a real store, so that the banner comes: a job ends the worker."""
    shop = APP + (
        "import os, signal\n"
        "@app.task\n"
        "async def end() -> None: os.kill(os.getpid(), signal.SIGTERM)\n"
        "if __name__ != '__mp_main__': end.enqueue_sync()\n"
    )
    url = f"sqlite:///{tmp_path}/jobs.db?ahead=1s"
    outbox = f"postgresql://ann:{SECRET}@{NOWHERE}/shop"
    said = run(tmp_path, "worker shop:app", shop, TICKWHEEL_STORE=url, TICKWHEEL_OUTBOX=outbox)
    assert url in said and f"postgresql://ann:***@{NOWHERE}/shop" in said
    assert SECRET not in said


def run(folder: Path, command: str, shop: str = APP, **env: str) -> str:
    """All that a command says, in a process of its own; it may not end by itself."""
    (folder / "shop.py").write_text(shop)
    process = subprocess.Popen(
        [sys.executable, "-m", "tickwheel", *command.split()],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        return process.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
