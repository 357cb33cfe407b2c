"""Notes that a store keeps among its schedules, though they are not schedules.

Every store can keep a schedule that never ticks, so a move of jobs between stores keeps its
progress in one. Only this module knows that: callers that ask it for schedules get schedules only.
"""

from __future__ import annotations

import msgspec

from tickwheel.checks import NOTE
from tickwheel.errors import StoreIncompatible, UsageError
from tickwheel.schedule import Schedule
from tickwheel.store import Store


class Note(msgspec.Struct):
    """What is needed to finish an interrupted move."""

    # Jobs in transit: those that are cancelled were cancelled by the move.
    ids: list[str] = msgspec.field(default_factory=list)
    # Queues that the move has paused.
    paused: list[str] = msgspec.field(default_factory=list)


async def schedules_of(store: Store) -> list[Schedule]:
    """The schedules of a store, by name."""
    return [each for each in await store.schedules() if each.name != NOTE]


async def note_of(store: Store) -> Note | None:
    """The note of an unfinished move; None if there is none."""
    for schedule in await store.schedules():
        if schedule.name == NOTE:
            try:
                return msgspec.json.decode(schedule.rule, type=Note)
            except msgspec.MsgspecError as error:
                raise StoreIncompatible(
                    f"the note of an unfinished `tickwheel migrate-jobs` can't be read ({error}); "
                    "finish the move with the release that started it"
                ) from None
    return None


def refuse_note(name: str) -> None:
    """Raise UsageError if the name is that of a note."""
    if name == NOTE:
        raise UsageError(
            f"{NOTE!r} is not a schedule: it notes which jobs an unfinished `tickwheel "
            "migrate-jobs` has in transit. Run the same command again to finish the move"
        )
