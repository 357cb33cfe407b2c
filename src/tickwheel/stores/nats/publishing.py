"""Steps in the protocol's form: single, or as an atomic batch; and what fits into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tickwheel.stores.nats.steps import Step
from tickwheel.stores.nats.wire import publish_line

P = TypeVar("P")
# Plans by id, each with its messages, for one batch.
Portion = list[tuple[str, P, list[Step]]]


def size_of(message: Step) -> int:
    headers = message.headers
    return len(message.body) + (len(headers) if headers.isascii() else len(headers.encode()))


def as_json_bytes(subject: str) -> int:
    return len(subject.encode()) + 3


def as_batch(messages: Sequence[Step], batch: str, reply: str) -> bytes:
    """The lines of an atomic batch; the last message commits it and is answered."""
    lines = []
    for number, message in enumerate(messages, 1):
        headers = f"{message.headers}Nats-Batch-Id: {batch}\r\nNats-Batch-Sequence: {number}\r\n"
        if number < len(messages):
            lines.append(publish_line(message.subject, message.body, headers=headers))
        else:
            headers += "Nats-Batch-Commit: 1\r\n"
            lines.append(publish_line(message.subject, message.body, headers=headers, reply=reply))
    return b"".join(lines)


def as_singles(messages: Sequence[Step], reply: str) -> bytes:
    """The lines of single messages; each is answered, with its number."""
    return b"".join(
        publish_line(each.subject, each.body, headers=each.headers, reply=f"{reply}.{number}")
        for number, each in enumerate(messages)
    )


def portioned(
    plans: dict[str, P], write: Callable[[P], list[Step]], *, most: int, most_bytes: int
) -> Iterator[Portion[P]]:
    """Plans in batches that the server accepts. The note of a line is written once in each, before
    the first of its jobs."""
    portion: Portion[P] = []
    count = size = 0
    notes: set[str] = set()
    for id, plan in plans.items():
        group = write(plan)
        if len(group) > 1 and group[0].subject in notes:
            group = group[1:]
        weight = sum([len(step.body) for step in group])
        if portion and (count + len(group) > most or size + weight > most_bytes):
            yield portion
            portion, count, size = [], 0, 0
            if notes:
                notes, group = set(), write(plan)
        if len(group) > 1:
            notes.add(group[0].subject)
        portion.append((id, plan, group))
        count += len(group)
        size += weight
    if portion:
        yield portion
