"""What names, ids and times every store can keep; which options a call takes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Literal, ParamSpec, TypeVar

from tickwheel.changes import IfExists
from tickwheel.errors import BadArguments, BadConfig, did_you_mean, shown
from tickwheel.job import Job, Priority

P = ParamSpec("P")
R = TypeVar("R")

PriorityName = Literal["low", "normal", "high", "urgent"]
AnyPriority = PriorityName | Priority

NAME_LIMIT = 128
ID_LIMIT = 200
# How many entries a job's meta has at most, and how many characters their names and values.
META_LIMIT, META_NAME_LIMIT, META_VALUE_LIMIT = 16, 64, 256
# The end of the year 9999, where datetime's calendar ends.
LATEST_MS = 253_402_300_799_999
# The name under which stores keep a note of their own among the schedules: see `notes`.
NOTE = "tickwheel-transfer"
# How many bytes the text of a record has at most.
RECORD_BYTES = 64 * 1024
_KIND = re.compile("[a-z]{1,16}")
_NAME = re.compile("[A-Za-z0-9_.:-]+")


def checked_name(what: str, name: str) -> str:
    """Check that every store, URL and metric can carry the name."""
    a = "an" if what == "app" else "a"
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
        raise BadConfig(
            f"{a} {what} name must have 1 to {NAME_LIMIT} characters, not {shown(name)}"
        )
    if not _NAME.fullmatch(name):
        raise BadConfig(
            f"{a} {what} name may contain letters, digits and _ . : -; this is {shown(name)}"
        )
    if what == "schedule" and name == NOTE:
        raise BadConfig(f"{NOTE!r} is reserved by Tickwheel; give the schedule another name")
    return name


def checked_id(id: str) -> str:
    if not isinstance(id, str) or not 0 < len(id) <= ID_LIMIT or not id.isprintable():
        raise BadArguments(f"id={shown(id)}: must be 1 to {ID_LIMIT} printable characters")
    return id


AnyIfExists = IfExists | Literal["keep", "renew", "replace"]


def if_exists_of(value: AnyIfExists) -> IfExists:
    known = [str(each) for each in IfExists]
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise BadArguments(f"if_exists={shown(value)}: must be one of {', '.join(known)}{hint}")
    return IfExists(value)


# A task's `id` and `if_exists`.
Identity = tuple[Callable[..., str] | None, IfExists]
NO_IDENTITY: Identity = (None, IfExists.KEEP)


def checked_identity(id: Callable[..., str] | None, if_exists: AnyIfExists) -> Identity:
    """A task's `id` and `if_exists`."""
    if id is not None and (not callable(id) or inspect.iscoroutinefunction(id)):
        raise BadConfig(
            f"id={shown(id)}: a task's id is a plain function of its arguments, as "
            "lambda customer_id: f'sync-{customer_id}'; for one job, use using(id=…)"
        )
    return id, if_exists_of(if_exists)


def checked_meta(meta: Mapping[str, str] | None) -> dict[str, str] | None:
    """A job's meta, as every store can keep it; None if there is nothing in it."""
    if not meta and (meta is None or isinstance(meta, Mapping)):
        return None
    if not isinstance(meta, Mapping):
        raise BadArguments(
            f"meta={shown(meta)}: must be a dict of strings, as {{'customer': '42'}}"
        )
    if len(meta) > META_LIMIT:
        raise BadArguments(f"meta has {len(meta):,} entries, and may have {META_LIMIT}")
    for name, value in meta.items():
        if not isinstance(name, str) or not 0 < len(name) <= META_NAME_LIMIT:
            raise BadArguments(
                f"meta: a name must be a str of 1 to {META_NAME_LIMIT} characters, "
                f"not {shown(name)}"
            )
        if not name.isprintable():
            raise BadArguments(f"meta: a name may contain printable characters; not {shown(name)}")
        _check_meta_value(name, value)
    # Plain strings: a subclass is not always written as the text that it is.
    return {str.__str__(name): str.__str__(value) for name, value in meta.items()}


def _check_meta_value(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise BadArguments(f"meta[{name!r}]={shown(value)}: must be a str")
    if len(value) > META_VALUE_LIMIT:
        raise BadArguments(
            f"meta[{name!r}] has {len(value):,} characters, and may have {META_VALUE_LIMIT}"
        )
    if "\0" in value or any("\ud800" <= each <= "\udfff" for each in value):
        raise BadArguments(
            f"meta[{name!r}]={shown(value)} has a NUL or a lone surrogate, "
            "which not every store can keep"
        )


def checked_records(kind: str, records: Mapping[str, str]) -> dict[str, str]:
    """Check that every store can keep these records."""
    if not _KIND.fullmatch(kind):
        raise BadArguments(f"the kind of a record is 1 to 16 letters a to z, not {shown(kind)}")
    for name, text in records.items():
        checked_name("record", name)
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise BadArguments(f"the record {name} has a lone surrogate") from None
        if size > RECORD_BYTES:
            raise BadArguments(
                f"the record {name} has {size:,} bytes, and may have {RECORD_BYTES:,}: store less"
            )
        if "\0" in text:
            raise BadArguments(f"the record {name} has a NUL, which not every store can keep")
    return dict(records)


def checked_job(job: Job) -> Job:
    """Check that every store can keep a job that was created elsewhere."""
    checked_id(job.id)
    checked_name("task", job.task)
    checked_name("queue", job.queue)
    if not Priority.LOW <= job.priority <= Priority.URGENT:
        raise BadArguments(f"priority={shown(job.priority)}: must be from 0 (low) to 3 (urgent)")
    for name, ms in (("due_ms", job.due_ms), ("created_ms", job.created_ms)):
        if not 0 <= ms <= LATEST_MS:
            raise BadArguments(f"{name}={shown(ms)}: must be in the years 1970 to 9999")
    if job.expires_ms is not None and not 0 <= job.expires_ms <= LATEST_MS:
        raise BadArguments(f"expires_ms={shown(job.expires_ms)}: must be in the years 1970 to 9999")
    if job.meta is not None:
        checked_meta(job.meta)
    return job


def priority_of(name: AnyPriority) -> Priority:
    if isinstance(name, Priority):
        return name
    try:
        return Priority[name.upper()]
    except (KeyError, AttributeError):
        raise BadConfig(
            f"priority={shown(name)}: must be one of {', '.join(p.name.lower() for p in Priority)}"
        ) from None


def checked_options(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse an option that the function doesn't have with a guess and those that it has."""
    parameters = inspect.signature(function).parameters.values()
    options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    known = {each.name for each in parameters}
    # A class is known by its own name.
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= known:
            unknown = next(each for each in kwargs if each not in known)
            hint = did_you_mean(unknown, options)
            raise BadArguments(
                f"{name}() has no option {shown(unknown)}{hint or '; it has ' + ', '.join(options)}"
            )
        return function(*args, **kwargs)

    return call


def check_list(name: str, values: object) -> None:
    if isinstance(values, str):
        raise BadConfig(f"{name}={shown(values)}: must be a list; write [{shown(values)}]")
    if not isinstance(values, Collection):
        raise BadConfig(f"{name}={shown(values)}: must be a list of names")


def module_name(frame: FrameType) -> str:
    """The name of the module that creates an app: `shop`, whether it is imported or run."""
    known = frame.f_globals
    module = str(known.get("__name__", ""))
    if module == "__main__":
        # `python -m proj.shop` says its name; of `python shop.py`, the file does.
        spec = known.get("__spec__")
        module = spec.name if spec is not None else Path(known.get("__file__") or "").stem
    module = module.removesuffix(".__main__")
    return re.sub(r"[^A-Za-z0-9_.:-]", "_", module)[-NAME_LIMIT:] or "app"
