"""Notes: what a store keeps among its schedules although it is none.

Every store can keep a schedule that never ticks, so a move of jobs between stores notes in one how
far it has come. Only this module knows: whoever asks here for schedules is given schedules.
"""

from __future__ import annotations

import msgspec

from tickwheel.errors import StoreIncompatible, UsageError
from tickwheel.schedule import Schedule
from tickwheel.store import Store

NOTE = "tickwheel-transfer"


class Note(msgspec.Struct):
    """What has to be known to finish a move that broke off."""

    # Jobs on their way: those that are cancelled were cancelled by the move.
    ids: list[str] = msgspec.field(default_factory=list)
    # Queues that the move has paused.
    paused: list[str] = msgspec.field(default_factory=list)


async def schedules_of(store: Store) -> list[Schedule]:
    """The schedules of a store, by name."""
    return [each for each in await store.schedules() if each.name != NOTE]


async def note_of(store: Store) -> Note | None:
    """The note of a move that has not finished; None where there is none."""
    for schedule in await store.schedules():
        if schedule.name == NOTE:
            try:
                return msgspec.json.decode(schedule.rule, type=Note)
            except msgspec.MsgspecError as error:
                raise StoreIncompatible(
                    f"the note of an unfinished `tickwheel migrate-jobs` can't be read ({error}): "
                    "finish the move with the release that began it"
                ) from None
    return None


def refuse_note(name: str) -> None:
    """UsageError where somebody takes a note for a schedule."""
    if name == NOTE:
        raise UsageError(
            f"{NOTE!r} is not a schedule: it says which jobs an unfinished `tickwheel "
            "migrate-jobs` has on their way. Run the same command again to finish the move"
        )
