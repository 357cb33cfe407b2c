"""Tracebacks to keep and to log: the user's frames, bounded, safe whatever was raised. Pure.

The standard library's formatter calls what the exception's class defines, parses source code, and
has no limit of bytes; this one runs on the event loop for every failure.
"""

from __future__ import annotations

import functools
import linecache
import re
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, TracebackType
from typing import Any

from tickwheel.errors import GiveUp, Retry

# How many bytes of UTF-8 a store keeps, and how many cross from a child process for the log.
LIMIT = 8_000
CARRIED_LIMIT = 64_000
# How many exceptions of a chain or group are shown, and how many frames of each.
EXCEPTIONS = 10
FRAMES = 20
# Of a deep recursion, only so many frames at each end are looked at.
LOOKED_AT = 500
# How many characters of a source line are shown, of a message in a traceback, and of an error.
LINE_LIMIT = 200
MESSAGE_LIMIT = 2_000
ERROR_LIMIT = 4_000
# What the words for frames that are left out may take.
GAP_BYTES = 30

UNREADABLE = "(its message can't be read)"
CAUSED = "The above exception was the direct cause of the following exception:"
MEANWHILE = "During handling of the above exception, another exception occurred:"
CUT = "… cut here"

# A frame: where its code is, and the line that it had reached.
_Frame = tuple[CodeType, int, dict[str, Any]]


class RemoteTraceback(Exception):
    """The traceback of an exception that came from a child process, as that exception's cause."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text}"


def raised(error: BaseException) -> BaseException | None:
    """The exception whose traceback tells where a run failed. A task that raises Retry or GiveUp
    has decided, so what matters is the exception that it handled, if any."""
    if not isinstance(error, (Retry, GiveUp)):
        return error
    try:
        following = _before(error)
    except BaseException:
        return None
    return following[0] if following else None


def traceback_text(error: BaseException, *, limit: int = LIMIT) -> str | None:
    """The traceback of an exception and of its causes, as text of at most `limit` bytes that any
    store can keep; None if no code of the user was involved. Never raises.

    What doesn't fit is left out from the middle: of the causes first, then of the libraries, then
    of the user's own frames.
    """
    try:
        return _text(error, limit)
    except BaseException as problem:
        return f"(the traceback can't be read: {type(problem).__name__})"


def users_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The same traceback without our own frames."""
    theirs = list(_theirs(traceback))
    if len(theirs) > LOOKED_AT * 2:
        theirs = theirs[:LOOKED_AT] + theirs[-LOOKED_AT:]
    shorter: TracebackType | None = None
    for each in reversed(theirs):
        shorter = TracebackType(shorter, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shorter


def where(text: str) -> str | None:
    """Where an exception was raised, by its traceback as text: the last line of the user's code, as
    in 'shop.py:12'."""
    places = re.findall(r'^ *File "([^"\n]*)", line (\d+)', text, re.MULTILINE)
    if not places:
        return None
    own = [place for place in places if not _in_library(place[0])]
    file, line = (own or places)[-1]
    name = re.split(r"[/\\]", file)[-1]
    return f"{name}:{line}"


def shortened(text: str, limit: int) -> str:
    """At most `limit` bytes of a text. Its end is kept: a traceback ends with what was raised."""
    data = text.encode()
    if len(data) <= limit:
        return text
    room = limit - len(CUT.encode()) - 1
    return f"{CUT}\n{data[-room:].decode(errors='ignore')}"


# --- The exceptions


def _text(error: BaseException, limit: int) -> str | None:
    if (remote := _remote(error)) is not None:
        return shortened(_clean(remote.text), limit)
    parts: list[str] = []
    room = limit
    told = False
    for each, joint in _chain(error):
        frames, left_out = _frames(each.__traceback__)
        part = _part(each, frames, left_out, joint, room)
        if part is None:
            parts.append(f"{CUT}\n")
            break
        told = told or bool(frames)
        parts.append(part)
        room -= len(part.encode())
    return "".join(reversed(parts)).rstrip() if told else None


def _remote(error: BaseException) -> RemoteTraceback | None:
    cause = error if isinstance(error, RemoteTraceback) else error.__cause__
    return cause if isinstance(cause, RemoteTraceback) else None


def _chain(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    """The exception, and those that came before it, each with the words that lead to the next."""
    seen = {id(error)}
    waiting = deque([(error, "")])
    for _ in range(EXCEPTIONS):
        if not waiting:
            return
        each, joint = waiting.popleft()
        yield each, joint
        earlier = [] if (found := _before(each)) is None else [found]
        if isinstance(each, BaseExceptionGroup):
            inner = each.exceptions
            earlier += [
                (one, f"Exception {number} of the {len(inner)} in the following group:")
                for number, one in enumerate(inner[:EXCEPTIONS], 1)
            ]
        for one, words in earlier:
            if id(one) not in seen and isinstance(one, BaseException):
                seen.add(id(one))
                waiting.append((one, words))


def _before(error: BaseException) -> tuple[BaseException, str] | None:
    """What an exception was raised from, or while it was handled."""
    if error.__cause__ is not None:
        return error.__cause__, CAUSED
    if error.__context__ is not None and not error.__suppress_context__:
        return error.__context__, MEANWHILE
    return None


def _part(
    error: BaseException, frames: Sequence[_Frame], left_out: int, joint: str, limit: int
) -> str | None:
    """One exception with its frames; None if not even its message fits."""
    end = _headline(error)
    if joint:
        end += f"\n\n{joint}\n\n"
    head = "Traceback (most recent call last):\n"
    room = limit - len(head.encode()) - len(end.encode()) - len(CUT.encode()) - 1
    if room < 0:
        return None
    if not frames:
        return end
    return f"{head}{_stack(frames, left_out, room)}{end}"


def _headline(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    lines = [message(error)]
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        lines += [note for note in notes[:EXCEPTIONS] if isinstance(note, str)]
    words = _clean("\n".join(line[:MESSAGE_LIMIT] for line in lines).rstrip())[:MESSAGE_LIMIT]
    return f"{name}: {words}" if words else name


def message(error: BaseException) -> str:
    """What an exception says, cut; its class may not be able to tell."""
    try:
        # It may be of a class of its own, and it may be huge.
        return str.__getitem__(str(error), slice(ERROR_LIMIT))
    except BaseException:
        return UNREADABLE


def _clean(text: str) -> str:
    """Without what some store can't keep: NUL, lone surrogates and other control characters."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


# --- Their frames


def _frames(traceback: TracebackType | None) -> tuple[list[_Frame], int]:
    """The user's frames, outermost first, and how many were left out in the middle."""
    first: list[_Frame] = []
    last: deque[_Frame] = deque(maxlen=LOOKED_AT)
    count = 0
    for each in _theirs(traceback):
        count += 1
        frame = each.tb_frame.f_code, each.tb_lineno, each.tb_frame.f_globals
        (first if count <= LOOKED_AT else last).append(frame)
    frames = [*first, *last]
    return frames, count - len(frames)


def _theirs(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """All but our frames, and but those of the event loop or thread that our first ones are in."""
    inside = False
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__")
        if not _ours(module) and (inside or not _plumbing(module)):
            inside = True
            yield traceback
        traceback = traceback.tb_next


def _ours(module: object) -> bool:
    """The examples are written as a user would."""
    return (
        isinstance(module, str)
        and (module == "tickwheel" or module.startswith("tickwheel."))
        and not module.startswith("tickwheel.examples")
    )


def _plumbing(module: object) -> bool:
    return isinstance(module, str) and module.split(".")[0] in ("asyncio", "concurrent")


def _stack(frames: Sequence[_Frame], left_out: int, limit: int) -> str:
    """As many frames as fit: where it was raised, the task's own, other code of the user from the
    inside out, then libraries."""
    last = len(frames) - 1
    by_worth = sorted(
        range(len(frames)),
        key=lambda i: (i != last, i != 0, _in_library(frames[i][0].co_filename), -i),
    )
    shown: dict[int, str] = {}
    limit -= GAP_BYTES
    for i in by_worth[:FRAMES]:
        line = _line(frames[i])
        limit -= len(line.encode()) + GAP_BYTES
        if limit < 0:
            break
        shown[i] = line
    return "".join(_with_gaps(shown, len(frames), left_out)) if shown else ""


def _with_gaps(shown: dict[int, str], count: int, left_out: int) -> Iterator[str]:
    gap = 0
    for i in range(count):
        if i == LOOKED_AT:
            gap += left_out
        if i not in shown:
            gap += 1
            continue
        if gap:
            yield f"  … {gap:,} more frame{'' if gap == 1 else 's'}\n"
        gap = 0
        yield shown[i]
    if gap:
        yield f"  … {gap:,} more frame{'' if gap == 1 else 's'}\n"


def _line(frame: _Frame) -> str:
    code, number, names = frame
    file = _clean(code.co_filename)[-LINE_LIMIT:]
    name = _clean(code.co_qualname)[:LINE_LIMIT]
    text = f'  File "{file}", line {number}, in {name}\n'
    source = _clean(linecache.getline(code.co_filename, number, names).strip())[:LINE_LIMIT]
    return f"{text}    {source}\n" if source else text


_LIBRARIES = tuple(
    {
        path
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
)


@functools.lru_cache(maxsize=1000)
def _in_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<frozen ")) or "site-packages" in file
