"""Records in one stream: one message each, in groups of names that begin alike.

A stream can't be read in the order of names. So a page asks for the names of the groups, and then
for the names and texts in the first groups that it needs, not for everything. The note of a group
is written in one batch with each of its records, so where there is a record there is a note.

A server that is killed forgets what it removed a moment before, and a revoked key must not come
back. So a delete stores an empty message in place of the record, which expires by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from urllib.parse import unquote

from tickwheel.batch import portions
from tickwheel.store import RECORDS_LIMIT
from tickwheel.stores.nats.answers import must
from tickwheel.stores.nats.room import Room
from tickwheel.stores.nats.steps import Layout, Step, subject_part
from tickwheel.stores.nats.stream import BATCH_BYTES, READ_FIRST, Stream
from tickwheel.stores.nats.wire import Denied

# Names that begin with the same characters are a group: in the audit log, those of three hours.
GROUP = 8
# For how long a deleted record leaves an empty message: longer than a server forgets.
GONE = "Nats-TTL: 300s\r\n"
# Before each text, so that no text is empty.
MARK = b"="


class Records:
    """The records of one stream."""

    def __init__(self, stream: Stream, layout: Layout, room: Room) -> None:
        self._stream = stream
        self._layout = layout
        self._room = room

    def _subject(self, kind: str, name: str) -> str:
        return f"{self._of_group(kind, name[:GROUP])}.{subject_part(name)}"

    def _of_group(self, kind: str, group: str) -> str:
        return f"{self._layout.prefix}.n.{kind}-{subject_part(group)}"

    def _note(self, kind: str, group: str) -> str:
        return f"{self._layout.prefix}.g.{kind}.{subject_part(group)}"

    async def put(self, kind: str, records: Mapping[str, str]) -> None:
        groups: defaultdict[str, list[Step]] = defaultdict(list)
        for name, text in records.items():
            body = MARK + text.encode()
            groups[name[:GROUP]].append(Step(self._subject(kind, name), "", body))
        for group, steps in groups.items():
            note = Step(self._note(kind, group), "", b"")
            most = max(self._stream.batch - 1, 1)
            for some in portions(steps, _bytes, most=most, most_bytes=BATCH_BYTES):
                await self._room.store(note, *some)

    async def page(self, kind: str, after: str, limit: int) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        async for names in self._names(kind, after):
            while names and len(found) < limit:
                # A few more: some may have been deleted.
                count = max(limit - len(found), READ_FIRST)
                some, names = names[:count], names[count:]
                texts = await self.get(kind, some)
                found += [(name, texts[name]) for name in some if name in texts]
            if len(found) >= limit:
                break
        return found[:limit]

    async def get(self, kind: str, names: Sequence[str]) -> dict[str, str]:
        """The texts of those that there are, by name."""
        messages: list[tuple[str, int, bytes]] = []
        for some in portions([self._subject(kind, name) for name in names], most=RECORDS_LIMIT):
            if self._stream.alone:
                messages += await self._stream.last_of(some)
            else:
                # Other replicas than the leader may be behind.
                messages += await self._leader_read(some)
        return {_name(subject): body[len(MARK) :].decode() for subject, _, body in messages if body}

    async def _leader_read(self, subjects: Sequence[str]) -> list[tuple[str, int, bytes]]:
        found: list[tuple[str, int, bytes] | None] = []
        for some in portions(subjects, most=READ_FIRST):
            found += await asyncio.gather(*map(self._stream.leader_last, some))
        return [message for message in found if message is not None]

    async def delete(self, kind: str, names: Sequence[str]) -> set[str]:
        """Returns the names of those that there were."""
        there = await self.get(kind, list(dict.fromkeys(names)))
        steps = [Step(self._subject(kind, name), GONE, b"") for name in there]
        for some in portions(steps, most=self._stream.batch):
            await self._room.store(*some)
        return set(there)

    # --- Names

    async def _names(self, kind: str, after: str) -> AsyncIterator[list[str]]:
        """The names that come after this one, in their order, group by group."""
        groups = await self._subjects(f"{self._layout.prefix}.g.{kind}.*")
        for group in sorted(map(_name, groups)):
            if group < after[:GROUP]:
                continue
            note = await self._stream.leader_last(self._note(kind, group))
            names = await self._subjects(f"{self._of_group(kind, group)}.*")
            if names:
                yield sorted(name for name in map(_name, names) if name > after)
            elif note is not None:
                # Only the note that was there before: a record that was put since has its own.
                with contextlib.suppress(Denied):
                    await self._stream.purge(note[0], before_seq=note[1] + 1)

    async def _subjects(self, wanted: str) -> list[str]:
        """All subjects like this one that have a message, from the leader."""
        found: list[str] = []
        while True:
            request = {"subjects_filter": wanted, "offset": len(found)}
            info = must(await self._stream.api(f"STREAM.INFO.{self._stream.name}", request))
            page = info["state"].get("subjects") or {}
            found += page
            if not page or len(found) >= info.get("total", 0):
                return found


def _name(subject: str) -> str:
    """The last part of a subject, as it was before `subject_part`."""
    return unquote(subject.rpartition(".")[2])


def _bytes(step: Step) -> int:
    return len(step.body)
