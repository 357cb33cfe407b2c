"""What a `sqlite://` URL says: which file, and how the store uses it.

sqlite:///jobs.db?ahead=500ms             in the current folder
sqlite:////var/lib/jobs.db?sync=normal    an absolute path
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tickwheel.errors import BadConfig
from tickwheel.masking import masked
from tickwheel.stores.url import StoreUrl, UrlOptions

OPTIONS = ("ahead", "sync")


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """Everything that a URL says."""

    path: Path
    ahead_ms: int = 1000
    # SQLite's `synchronous`: with `normal` a power loss may cost the last commits.
    sync: str = "full"

    @classmethod
    def of(cls, url: str) -> SqliteOptions:
        parts = StoreUrl.of(url)
        if not parts.location.startswith("/") or not parts.file:
            raise BadConfig(
                f"{masked(url)!r} names no file: write sqlite:///jobs.db (in this folder) "
                "or sqlite:////var/lib/jobs.db (an absolute path)"
            )
        options = UrlOptions(parts.query, OPTIONS)
        return cls(
            Path(parts.file),
            ahead_ms=options.duration_ms("ahead", "1s"),
            sync=options.one_of("sync", "full", "normal"),
        )
