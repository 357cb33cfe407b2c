"""Log lines on stderr: time in UTC, level, logger, message."""

from __future__ import annotations

import logging
import time
from enum import StrEnum


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Line(logging.Formatter):
    default_msec_format = "%s.%03dZ"

    def converter(self, seconds: float | None) -> time.struct_time:
        return time.gmtime(seconds)


def set_up_logs(level: LogLevel, *, with_pid: bool = False) -> None:
    """Log to stderr, unless the user's module has set up logging itself: then only our level.

    Call it after that module was imported.
    """
    root = logging.getLogger()
    if not root.handlers:
        pid = "[%(process)d] " if with_pid else ""
        handler = logging.StreamHandler()
        handler.setFormatter(_Line(f"%(asctime)s %(levelname)-7s {pid}%(name)s: %(message)s"))
        root.addHandler(handler)
        root.setLevel(level.upper())
    logging.getLogger("tickwheel").setLevel(level.upper())
