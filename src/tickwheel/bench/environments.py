"""Environments of the peers: one each, so that none holds back the libraries of another."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tickwheel.bench.catalogue import Subject
from tickwheel.version import __version__

INSTALL_S = 300
_READY = "ready"
_VERSIONS = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
)


class InstallFailed(Exception):
    """A peer could not be installed; the others are measured all the same."""


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tickwheel" / "bench"


def environment(subject: Subject, folder: Path) -> Path | None:
    """Where a subject is installed, which is done if need be; None: with Tickwheel."""
    if not subject.packages:
        return None
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256(" ".join((python, *subject.packages)).encode()).hexdigest()[:12]
    place = folder / f"{subject.library.lower().replace(' ', '-')}-{key}"
    if not (place / _READY).exists():
        _create(place, subject.packages)
    return place


def _create(place: Path, packages: tuple[str, ...]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    venv.create(place, with_pip=False)
    # Installed by our own pip, so that no environment needs one.
    words = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    words += ["--disable-pip-version-check", "install", "--quiet", *packages]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise InstallFailed(f"pip took more than {INSTALL_S} s") from None
    if done.returncode != 0:
        said = done.stderr.splitlines() or ["it said nothing"]
        errors = [line for line in said if line.startswith("ERROR")]
        raise InstallFailed(f"pip: {(errors or said)[-1]}")
    (place / _READY).touch()


def version(subject: Subject, place: Path | None) -> str:
    """The version of a subject's library, and of those it was installed with."""
    if place is None:
        return __version__
    words = [str(place / "bin" / "python"), "-c", _VERSIONS]
    found = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    names = [re.split(r"[\[<>=]", package)[0] for package in subject.packages]
    first, *others = (f"{name} {found.get(name, '?')}" for name in names)
    return ", ".join([first.partition(" ")[2], *others])
