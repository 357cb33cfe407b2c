"""The timing wheel: which keys fall due next, at O(1) to add and to cancel.

Time is cut into slots of `width_ms`. A key goes unsorted into the slot of its due time; slots are
kept in a dict, so that empty ones cost nothing, and a heap of slot *numbers* finds the next one.
Only when a slot becomes the next is it sorted, by C code, and then consumed from its front.

    width 100:   add(a, 230)  add(b, 1015)  add(c, 207)
    slots        2: [a, c]    10: [b]              heap [2, 10]
    advance(210) opens slot 2 as [c 207, a 230] and gives [c]; next_ms() is 230

Cascading levels, as in kernels, move each timer several times to keep every step constant. In
Python each move is a dict operation and a sort is a single call, so this shape drains about five
times faster (bench/wheel.py). A removed key leaves its slot entry behind until the slot is opened;
when there is one such leftover for two living keys, all slots are swept at once.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Hashable
from operator import itemgetter
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Leftovers below this number are not worth a sweep.
SWEEP_AT = 10_000


class TimingWheel(Generic[Key]):
    """Keys by due time. Knows no clock: time is what `advance` is told."""

    __slots__ = (
        "_at",
        "_due",
        "_left",
        "_numbers",
        "_open",
        "_open_number",
        "_slots",
        "_width",
    )

    def __init__(self, width_ms: int = 1024) -> None:
        if width_ms < 1:
            raise ValueError(f"a slot is at least 1 ms wide, not {width_ms}")
        self._width = width_ms
        # The truth: what is not in here, or stands at another time, is a leftover.
        self._due: dict[Key, int] = {}
        self._slots: dict[int, list[Key]] = {}
        self._numbers: list[int] = []
        # The next slot, sorted, consumed up to `_at`.
        self._open: list[tuple[int, Key]] = []
        self._at = 0
        self._open_number: int | None = None
        self._left = 0

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def add(self, key: Key, due_ms: int) -> None:
        """Let the key fall due at `due_ms`; a key that is here already is moved."""
        due = self._due
        if key in due:
            if due[key] == due_ms:
                return
            self.remove(key)
        due[key] = due_ms
        number = due_ms // self._width
        if self._open_number is not None and number <= self._open_number:
            if number == self._open_number:
                insort(self._open, (due_ms, key), lo=self._at, key=_TIME)
                return
            self._close()
        slot = self._slots.get(number)
        if slot is None:
            self._slots[number] = [key]
            heapq.heappush(self._numbers, number)
        else:
            slot.append(key)

    def remove(self, key: Key) -> bool:
        """Take the key out; False where it was not here."""
        if self._due.pop(key, None) is None:
            return False
        self._left += 1
        if self._left > SWEEP_AT and self._left > len(self._due) // 2:
            self._sweep()
        return True

    def advance(self, now_ms: int) -> list[Key]:
        """Take out every key that is due by `now_ms`: earliest first, equals as they were added."""
        fallen: list[Key] = []
        due = self._due
        while due:
            for at in range(self._at, len(self._open)):
                due_ms, key = self._open[at]
                if due_ms > now_ms:
                    self._at = at
                    return fallen
                if due.get(key) == due_ms:
                    del due[key]
                    fallen.append(key)
                else:
                    self._left -= 1
            self._at = len(self._open)
            if not self._numbers or self._numbers[0] * self._width > now_ms:
                break
            self._open_next()
        return fallen

    def next_ms(self) -> int | None:
        """When the earliest key falls due; None where there is none."""
        due = self._due
        while due:
            for at in range(self._at, len(self._open)):
                due_ms, key = self._open[at]
                if due.get(key) == due_ms:
                    self._at = at
                    return due_ms
                self._left -= 1
            self._open_next()
        return None

    def slots(self, from_ms: int, width_ms: int, count: int) -> list[int]:
        """How many keys fall due in each of `count` slots from `from_ms` on; the first slot also
        counts what is overdue. Looks at every key: for drawing, not for the hot path."""
        counts = [0] * count
        for due_ms in self._due.values():
            slot = max((due_ms - from_ms) // width_ms, 0)
            if slot < count:
                counts[slot] += 1
        return counts

    def _open_next(self) -> None:
        number = heapq.heappop(self._numbers)
        keys = self._slots.pop(number)
        # An entry whose key was removed, or moved to another slot, is a leftover.
        start_ms = number * self._width
        end_ms = start_ms + self._width
        living = [
            (due_ms, key)
            for due_ms, key in zip(map(self._due.get, keys), keys, strict=True)
            if due_ms is not None and start_ms <= due_ms < end_ms
        ]
        self._left -= len(keys) - len(living)
        living.sort(key=_TIME)
        self._open, self._at, self._open_number = living, 0, number

    def _close(self) -> None:
        """Put the open slot back: an earlier one has come."""
        assert self._open_number is not None
        if self._at < len(self._open):
            self._slots[self._open_number] = [key for _, key in self._open[self._at :]]
            heapq.heappush(self._numbers, self._open_number)
        self._open, self._at, self._open_number = [], 0, None

    def _sweep(self) -> None:
        """Drop every leftover, by filling all slots anew."""
        self._slots, self._open, self._at, self._open_number = {}, [], 0, None
        for key, due_ms in self._due.items():
            self._slots.setdefault(due_ms // self._width, []).append(key)
        self._numbers = sorted(self._slots)
        self._left = 0


_TIME = itemgetter(0)
