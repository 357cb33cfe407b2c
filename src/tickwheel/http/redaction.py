"""Hide secrets in answers: values whose names match are shown as "[redacted]"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from typing import Any

import msgspec

from tickwheel.http.access import Caller
from tickwheel.http.idempotency import FINGERPRINT
from tickwheel.job import Job
from tickwheel.operate.documents import (
    JobDocument,
    ScheduleDocument,
    job_document,
    schedule_document,
)
from tickwheel.schedules import ScheduleInfo

REDACTED = "[redacted]"


class Redaction:
    """Which names are secret; `*` and `?` stand for others, and case doesn't matter."""

    def __init__(self, names: Sequence[str]) -> None:
        pattern = "|".join(translate(name.lower().replace("-", "_")) for name in names)
        self._secret = re.compile(pattern) if names else None

    def document(self, job: Job, caller: Caller) -> JobDocument:
        """The job as this caller may see it."""
        document = job_document(job)
        if FINGERPRINT in document.meta:
            meta = {name: value for name, value in document.meta.items() if name != FINGERPRINT}
            document = msgspec.structs.replace(document, meta=meta)
        if self._secret is None or caller.admin:
            return document
        return msgspec.structs.replace(
            document,
            arguments=self.hidden(document.arguments),
            result=self.hidden(document.result),
            meta=self.hidden(document.meta),
        )

    def schedule(self, schedule: ScheduleInfo, caller: Caller) -> ScheduleDocument:
        """The schedule as this caller may see it."""
        document = schedule_document(schedule)
        if self._secret is None or caller.admin or document.arguments is msgspec.UNSET:
            return document
        hidden = self.hidden(document.arguments)
        if hidden == document.arguments:
            return document
        return msgspec.structs.replace(document, arguments=hidden, arguments_hidden=True)

    def searchable(self, job: Job, caller: Caller) -> tuple[Any, dict[str, str]]:
        """The arguments and the meta, without the values that this caller may not see."""
        document = self.document(job, caller)
        return document.arguments, document.meta

    def hides(self, name: str, caller: Caller) -> bool:
        """Whether this caller may not see values of this name."""
        return name == FINGERPRINT or (not caller.admin and self._hides(name))

    def hidden(self, value: Any) -> Any:
        """The value, with the secrets in it hidden."""
        if isinstance(value, dict):
            return {
                name: REDACTED if self._hides(name) else self.hidden(inside)
                for name, inside in value.items()
            }
        if isinstance(value, list):
            return [self.hidden(inside) for inside in value]
        return value

    def _hides(self, name: str) -> bool:
        return (
            self._secret is not None
            and self._secret.fullmatch(name.lower().replace("-", "_")) is not None
        )
