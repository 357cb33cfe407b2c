"""Search jobs by a text, in what the searcher may see of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from tickwheel.job import Job

# The arguments and the meta of a job, as the searcher may see them.
Shown = Callable[[Job], tuple[Any, dict[str, str]]]

_WORDS = re.compile(r"[a-z0-9]+")


class Search:
    """Whether a job has a text, whatever its case; arguments are searched as compact JSON."""

    def __init__(self, text: str, shown: Shown) -> None:
        self._text = text.lower()
        self._words = _WORDS.findall(self._text)
        self._shown = shown

    def __call__(self, job: Job) -> bool:
        text = self._text
        if text in job.id.lower() or text in job.task.lower() or text in (job.error or "").lower():
            return True
        if not self._may_have(job):
            return False
        arguments, meta = self._shown(job)
        return any(
            text in msgspec.json.encode(each).decode().lower() for each in (arguments, meta) if each
        )

    def _may_have(self, job: Job) -> bool:
        """Cheap, and true for nearly no job that has it not: what is shown is made of what is
        stored. Other programs may have written it with other spaces, or with escapes."""
        stored = job.payload.lower()
        if job.meta:
            stored += "\n".join(f"{name}\n{value}" for name, value in job.meta.items()).lower()
        return "\\" in stored or all(word in stored for word in self._words)
