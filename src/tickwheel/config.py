"""Settings: their values, and where each comes from.

A flag overrides the environment (`TICKWHEEL_LEASE`), which overrides `tickwheel.toml`, which
overrides `[tool.tickwheel]` in `pyproject.toml`, both in the current folder, setting by setting. An
argument in code, as in `App("sqlite:///jobs.db")`, counts as a flag.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tickwheel.address import http_address
from tickwheel.duration import duration_ms
from tickwheel.errors import BadConfig, UsageError, did_you_mean, shown
from tickwheel.objective import parse_objective
from tickwheel.pools import usual_processes, usual_threads

PREFIX = "TICKWHEEL_"
FILE = "tickwheel.toml"
SECTION = "[tool.tickwheel]"
DEFAULT = "default"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
SIGNING_MODES = ("require", "prefer")
# Of an environment, besides those as in #b45309; browsers know them by these names.
COLOURS = ("red", "orange", "gold", "green", "teal", "blue", "purple", "deeppink", "gray")
_HEX = re.compile(r"#([0-9a-fA-F]{3}|[0-9a-fA-F]{6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings with their defaults. Durations are kept as written: "15s"."""

    # Not in the repr: they may hold passwords.
    store: str = field(default="sqlite:///jobs.db", repr=False)
    outbox: str = field(default="", repr=False)
    # Not in the repr, and never shown: they are secrets.
    signing_keys: tuple[str, ...] = field(default=(), repr=False)
    encryption_keys: tuple[str, ...] = field(default=(), repr=False)
    signing: str = "require"
    app: str = ""
    queues: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    concurrency: int = 100
    threads: int = field(default_factory=usual_threads)
    # Child processes for tasks with pool="process"; `processes` are those of the worker itself.
    task_processes: int = field(default_factory=usual_processes)
    lease: str = "15s"
    grace: str = "30s"
    processes: int = 1
    # Where a worker serves its metrics, HOST:PORT, and how punctual runs should be.
    http: str = ""
    # Whether `tickwheel worker` counts without it, and tells the store.
    metrics: bool = True
    objective: str = ""
    log_level: str = "info"
    log_format: str = "text"
    retention: str = "7d"
    dead_retention: str = "90d"
    audit_retention: str = "90d"
    # Of the dashboard: how long a sign-in lasts, and its badge, as in "staging:#b45309".
    session_lifetime: str = "12h"
    environment: str = ""
    # For callbacks of `tickwheel serve` without an app: what signs them, and where they may go.
    callback_keys: tuple[str, ...] = field(default=(), repr=False)
    callback_allow: tuple[str, ...] = ()
    # Names whose values the HTTP API does not show; `*` stands for others.
    redact: tuple[str, ...] = (
        *("password", "passwd", "*_password", "secret", "*_secret", "token", "*_token"),
        *("authorization", "cookie", "set_cookie", "api_key", "*_api_key", "apikey"),
        *("private_key", "access_key", "credentials", "card_number", "cvv"),
    )


# Only from the environment: files are copied and committed.
SECRETS = ("signing_keys", "encryption_keys", "callback_keys")
NAMES = tuple(field.name for field in fields(Settings))


@dataclass(frozen=True, slots=True)
class Config:
    """Settings in effect, with the source of each: a flag, a variable, a file, or the default."""

    settings: Settings
    sources: Mapping[str, str]

    def chosen(self, name: str) -> bool:
        """Whether this setting was set, rather than left at its default."""
        return self.sources[name] != DEFAULT


def load(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Config:
    """The settings in effect; a flag of None was not given. Raises BadConfig."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(NAMES, DEFAULT)
    for source, name, value in _given(flags or {}, environ, folder or Path()):
        values[name] = _checked(source, name, value)
        sources[name] = source
    return Config(Settings(**values), sources)


def setting(
    name: str, *, environ: Mapping[str, str] = os.environ, folder: Path | None = None
) -> Any:
    """One setting; what is wrong with the others doesn't matter. Raises BadConfig."""
    value, source = getattr(Settings(), name), DEFAULT
    for each, key, found in _given({}, environ, folder or Path(), only=name):
        if key == name:
            value, source = found, each
    return value if source == DEFAULT else _checked(source, name, value)


def from_environment(name: str, *, environ: Mapping[str, str] = os.environ) -> Any:
    """A setting that no file can have. Raises BadConfig."""
    variable = PREFIX + name.upper()
    value = environ.get(variable)
    return _checked(variable, name, value) if value else getattr(Settings(), name)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that look like settings but are not: most likely typos."""
    known = {PREFIX + name.upper() for name in NAMES}
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


# --- From the weakest source to the strongest


def _given(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    folder: Path,
    *,
    only: str | None = None,
) -> Iterator[tuple[str, str, object]]:
    section = _read(folder / "pyproject.toml").get("tool", {}).get("tickwheel", {})
    yield from _of_file("pyproject.toml", section, only)
    yield from _of_file(FILE, _read(folder / FILE), only)
    for name in NAMES:
        if environ.get(PREFIX + name.upper()):
            yield PREFIX + name.upper(), name, environ[PREFIX + name.upper()]
    for name, value in flags.items():
        if value is not None and value != ():
            yield "--" + name.replace("_", "-"), name, value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadConfig(f"{path.name} can't be read: {error}") from error


def _of_file(file: str, table: object, only: str | None) -> Iterator[tuple[str, str, object]]:
    if not isinstance(table, dict):
        raise BadConfig(f"{file}: tickwheel must be a table of settings")
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in NAMES and only is None:
            raise BadConfig(f"{file} has no setting {key!r}{did_you_mean(name, NAMES)}")
        if name in SECRETS and only in (None, name):
            raise BadConfig(
                f"{file} has {key}: keys don't belong in a file that is copied and committed; "
                f"set {PREFIX}{name.upper()}, or give them to the App"
            )
        yield file, name, value


# --- Checking values


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
        # Not shown: a URL may hold a password.
        raise BadConfig(f"must be a non-empty string; this is of type {type(value).__name__}")
    return value


def _duration(value: object) -> str:
    text = value if isinstance(value, str) else f"{value}s"
    duration_ms(text)
    return text


def _count(value: object) -> int:
    try:
        count = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if count < 1:
        raise BadConfig(f"must be a whole number of at least 1, not {shown(value)}")
    return count


def _switch(value: object) -> bool:
    switch = _SWITCHES.get(value.lower() if isinstance(value, str) else str(value).lower())
    if switch is None:
        raise BadConfig(f"must be true or false, not {shown(value)}")
    return switch


_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def _names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
        raise BadConfig(
            f"must be a list of names, or names separated by commas, not {shown(value)}"
        )
    return tuple(each.strip() for each in names)


def _keys(value: object) -> tuple[str, ...]:
    keys = value.split(",") if isinstance(value, str) else value
    if not isinstance(keys, (list, tuple)) or not all(isinstance(each, str) for each in keys):
        # Not shown: they are secrets.
        raise BadConfig("must be a list of keys, or keys separated by commas, each id:base64")
    return tuple(each.strip() for each in keys)


def _objective(value: object) -> str:
    return str(parse_objective(value))


def _environment(value: object) -> str:
    text = _text(value)
    name, _, colour = text.partition(":")
    if not 0 < len(name) <= 40 or not name.isprintable():
        raise BadConfig(f"a name of 1 to 40 printable characters comes first, not {shown(name)}")
    if ":" in text and not _HEX.fullmatch(colour) and colour not in COLOURS:
        raise BadConfig(
            f"{shown(colour)} is not a colour; write for example 'staging:#b45309', or one of "
            f"{', '.join(COLOURS)}"
        )
    return text


def _address(value: object) -> str:
    text = str(value) if isinstance(value, int) else _text(value)
    http_address(text)
    return text


def _one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    def checked(value: object) -> str:
        choice = _text(value).lower()
        if choice not in choices:
            raise BadConfig(f"must be one of {', '.join(choices)}, not {shown(value)}")
        return choice

    return checked


_CHECKS: dict[str, Callable[[object], Any]] = {
    "queues": _names,
    "imports": _names,
    "redact": _names,
    "concurrency": _count,
    "threads": _count,
    "task_processes": _count,
    "processes": _count,
    "lease": _duration,
    "grace": _duration,
    "retention": _duration,
    "dead_retention": _duration,
    "audit_retention": _duration,
    "session_lifetime": _duration,
    "environment": _environment,
    "callback_keys": _names,
    "callback_allow": _names,
    "signing_keys": _keys,
    "encryption_keys": _keys,
    "signing": _one_of(SIGNING_MODES),
    "http": _address,
    "metrics": _switch,
    "objective": _objective,
    "log_level": _one_of(LOG_LEVELS),
    "log_format": _one_of(LOG_FORMATS),
}
