"""What an answer means: done, retry or give up; and what is kept of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import takewhile
from typing import Literal

from tickwheel.masking import MASK, is_secret_name

# How much of an answer is kept.
KEPT_BYTES = 1_024
# An answer that asks for a longer wait than this gets this one.
LONGEST_WAIT_MS = 86_400_000

Verdict = Literal["done", "retry", "give up"]
# The server may answer otherwise if it is asked again; all of 5xx too.
RETRIED = frozenset({408, 425, 429})
# A secret that is shorter than this is not searched for: it would be found everywhere. A longer one
# is found by its start, and hidden as far as it comes.
_SHORTEST_SECRET, _SECRET_START = 4, 16
# So much more of an answer is read than kept: a secret at its end is found before it is cut.
READ_BYTES = KEPT_BYTES + 4 * _SECRET_START


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a callback: the status, how long it took, and the start of what came back."""

    status: int
    ms: int
    text: str = ""


def verdict(status: int) -> Verdict:
    """What to do after an answer with this status."""
    if 200 <= status < 300:
        return "done"
    return "retry" if status in RETRIED or 500 <= status < 600 else "give up"


def is_trouble(status: int) -> bool:
    """Whether such an answer counts against the host."""
    return status >= 500


def wait_ms(retry_after: str | None, now_ms: int) -> int | None:
    """How long a `Retry-After` asks to wait; None if it says nothing that can be understood."""
    text = (retry_after or "").strip()
    if re.fullmatch(r"[0-9]{1,12}", text):
        return min(int(text) * 1000, LONGEST_WAIT_MS)
    try:
        at = parsedate_to_datetime(text[:64])
        ms = int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000) - now_ms
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return min(max(ms, 0), LONGEST_WAIT_MS)


def kept_text(raw: bytes, secrets: Iterable[str] = ()) -> str:
    """The start of an answer as text that every store keeps, without these secrets: some servers
    send back what they were sent."""
    text = raw[:READ_BYTES].decode(errors="replace")
    for secret in sorted(secrets, key=len, reverse=True):
        text = _without(text, secret)
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for c in text[:KEPT_BYTES]
    )


def _without(text: str, secret: str) -> str:
    start, at = secret[:_SECRET_START], -1
    while (at := text.find(start, at + 1)) >= 0:
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(text[at:], secret, strict=False))
        text = f"{text[:at]}{MASK}{text[at + sum(1 for _ in alike) :]}"
        at += len(MASK) - 1
    return text


def secrets_in(headers: dict[str, str], path: str = "/", body: bytes = b"") -> list[str]:
    """What must not come back in an answer, an error or a log: secret headers, the query of the
    URL, and the body."""
    values = [value for name, value in headers.items() if is_secret_name(name)]
    query = path.partition("?")[2]
    # The token of `Bearer …`, too, and each value of the query.
    words = {part for value in values for part in (value, *value.split())}
    words |= {query, *(part.partition("=")[2] for part in query.split("&"))}
    words.add(body.decode(errors="replace"))
    return [each for each in words if len(each) >= _SHORTEST_SECRET]


def in_words(place: str, answer: Answer) -> str:
    """An answer as the history of a job tells it."""
    text = " ".join(answer.text.split())
    return f"{place} answered {answer.status} in {answer.ms}ms" + (f": {text}" if text else "")
