"""A worker's log on stderr, as lines for people or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from tickwheel.cli.output import clean
from tickwheel.config import Settings
from tickwheel.duration import iso

# What every record has; the rest is what the caller added with `extra`.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def set_up_logs(settings: Settings, *, with_pid: bool = False) -> None:
    """Log to stderr; if the user's module has set up logging, set only our level.

    Call this after that module is imported.
    """
    level = settings.log_level.upper()
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLine() if settings.log_format == "json" else Line(with_pid))
        root.addHandler(handler)
        root.setLevel(level)
        # asyncio logs which selector it uses; nobody needs that.
        logging.getLogger("asyncio").setLevel(max(root.level, logging.INFO))
    logging.getLogger("tickwheel").setLevel(level)


class Line(logging.Formatter):
    """Time in UTC, level, logger, message."""

    default_msec_format = "%s.%03dZ"

    def __init__(self, with_pid: bool = False) -> None:
        pid = "[%(process)d] " if with_pid else ""
        super().__init__(f"%(asctime)s %(levelname)-7s {pid}%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        # An error may quote anyone's data, which must not control the terminal.
        return "\t".join(map(clean, super().format(record).split("\t")))

    def converter(self, seconds: float | None) -> time.struct_time:
        return time.gmtime(seconds)


class JsonLine(logging.Formatter):
    """One JSON object: the same, the process, the exception as text, and what else the record
    knows, such as `job_id` and `task`."""

    def format(self, record: logging.LogRecord) -> str:
        known: dict[str, Any] = {
            "time": iso(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                known.setdefault(name, value)
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            known["exception"] = record.exc_text
        if record.stack_info:
            known["stack"] = self.formatStack(record.stack_info)
        try:
            return msgspec.json.encode(known, enc_hook=repr).decode()
        except Exception:
            # A lone surrogate, or a value that contains itself.
            return json.dumps({name: _plain(value) for name, value in known.items()})


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, bool)) else repr(value)
