"""Settings: what each one is, and where it came from.

A flag beats the environment (`TICKWHEEL_LEASE`), which beats `tickwheel.toml`, which beats
`[tool.tickwheel]` in `pyproject.toml`, both in the current folder, setting by setting. What the
code says, as in `App("sqlite:///jobs.db")`, is a flag in this sense.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tickwheel.errors import BadConfig, UsageError
from tickwheel.span import span_ms

PREFIX = "TICKWHEEL_"
FILE = "tickwheel.toml"
SECTION = "[tool.tickwheel]"
DEFAULT = "default"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting with its default. Spans are kept as they were written: "15s"."""

    store: str = "sqlite:///tickwheel.db"
    outbox: str = ""
    app: str = ""
    queues: tuple[str, ...] = ()
    concurrency: int = 100
    lease: str = "15s"
    grace: str = "30s"
    processes: int = 1
    log_level: str = "info"
    retention: str = "7d"
    dead_retention: str = "90d"


NAMES = tuple(field.name for field in fields(Settings))


@dataclass(frozen=True, slots=True)
class Config:
    """Settings in effect, with the source of each: a flag, a variable, a file, or the default."""

    settings: Settings
    sources: Mapping[str, str]

    def chosen(self, name: str) -> bool:
        """Whether anybody chose this setting, rather than leave it to the default."""
        return self.sources[name] != DEFAULT


def load(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Config:
    """The settings in effect here; a flag of None was not given. Raises BadConfig."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(NAMES, DEFAULT)
    for source, name, value in _given(flags or {}, environ, folder or Path()):
        values[name] = _checked(source, name, value)
        sources[name] = source
    return Config(Settings(**values), sources)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that look like settings and are none: a slip of the pen, most likely."""
    known = {PREFIX + name.upper() for name in NAMES}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def close_to(name: str, known: Iterable[str]) -> str:
    """A guess at what was meant, as the end of a sentence."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


# --- From the weakest source to the strongest


def _given(
    flags: Mapping[str, object], environ: Mapping[str, str], folder: Path
) -> Iterator[tuple[str, str, object]]:
    section = _read(folder / "pyproject.toml").get("tool", {}).get("tickwheel", {})
    yield from _of_file("pyproject.toml", section)
    yield from _of_file(FILE, _read(folder / FILE))
    for name in NAMES:
        if environ.get(PREFIX + name.upper()):
            yield PREFIX + name.upper(), name, environ[PREFIX + name.upper()]
    for name, value in flags.items():
        if value is not None:
            yield "--" + name.replace("_", "-"), name, value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"{path.name} can't be read: {error}") from error


def _of_file(file: str, table: object) -> Iterator[tuple[str, str, object]]:
    if not isinstance(table, dict):
        raise BadConfig(f"{file}: tickwheel is to be a table of settings")
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in NAMES:
            raise BadConfig(f"{file} has no setting {key!r}{close_to(name, NAMES)}")
        yield file, name, value


# --- What a value may be


def _checked(source: str, name: str, value: object) -> Any:
    where = f"{source}: {name}" if source.endswith(".toml") else source
    try:
        if isinstance(value, str):
            value.encode()
        return _CHECKS.get(name, _text)(value)
    except UnicodeEncodeError:
        # Not shown: a URL may hold a password.
        raise BadConfig(f"{where}: the value is not valid UTF-8") from None
    except UsageError as error:
        raise BadConfig(f"{where}: {error}") from None


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise BadConfig(f"{value!r} is to be a text")
    return value


def _span(value: object) -> str:
    text = value if isinstance(value, str) else f"{value}s"
    span_ms(text)
    return text


def _count(value: object) -> int:
    try:
        count = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if count < 1:
        raise BadConfig(f"{value!r} is to be a whole number from 1")
    return count


def _names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
        raise BadConfig(f"{value!r} is to be a list of names, or names with commas")
    return tuple(each.strip() for each in names)


def _log_level(value: object) -> str:
    level = _text(value).lower()
    if level not in LOG_LEVELS:
        raise BadConfig(f"{value!r} is to be one of {', '.join(LOG_LEVELS)}")
    return level


_CHECKS: dict[str, Callable[[object], Any]] = {
    "queues": _names,
    "concurrency": _count,
    "processes": _count,
    "lease": _span,
    "grace": _span,
    "retention": _span,
    "dead_retention": _span,
    "log_level": _log_level,
}
