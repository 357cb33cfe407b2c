"""A headless Chromium, started once and visited by many tests.

As a program: exits with 0 if there is one, or if it could be installed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--remote-debugging-port=0"),
    # Under load a page that is not in front may be slowed down.
    *("--disable-background-timer-throttling", "--disable-renderer-backgrounding"),
)


def found_chromium() -> str | None:
    """The program, if there is one."""
    named = os.environ.get("TICKWHEEL_TEST_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def running_chromium(program: str) -> Iterator[str]:
    """Run it for the duration of the block, which gets the address that Playwright connects to."""
    with tempfile.TemporaryDirectory(
        prefix="tickwheel-chromium-", ignore_cleanup_errors=True
    ) as home:
        # Root may not use the sandbox; the pages are our own.
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()
        command = [program, *FLAGS, *root, f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield f"http://127.0.0.1:{_port(process, Path(home))}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _port(process: subprocess.Popen[bytes], home: Path) -> int:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((home / "DevToolsActivePort").read_text().splitlines()[0])
        time.sleep(0.05)
    raise RuntimeError(f"Chromium did not start within {START_S} s")


def _install() -> None:
    """By the system's packages, where we may."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", "-qq", *command], stdout=subprocess.DEVNULL, timeout=600)


if __name__ == "__main__":
    if found_chromium() is None:
        _install()
    if found_chromium() is None:
        sys.exit(
            "*** THE DASHBOARD WAS NOT TESTED: there is no Chromium (apt-get install chromium) ***"
        )
