"""Pages of jobs from a SQL database: which rows to read next, and where the next page starts.

A page goes through one state after the other, each along the index that the state has anyway, so
paging never scans. The cursor is the state and the key of the last row that was looked at.

Jobs with some meta have an index of their own, with all states in it, the latest job first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from tickwheel.batch import BATCH_BYTES
from tickwheel.job import ENDED, State
from tickwheel.store import CURSOR_LIMIT, Query, not_a_cursor

# How many jobs one page reads if it is filtered by what its index doesn't have.
SCAN = 1000
# The state of parked jobs in a table where it is not that of waiting ones.
PARKED = "parked"

# What a cursor of jobs with some meta begins with.
_META = "meta"
# The columns of a cursor that are names; the others are numbers.
_NAMES = ("queue", "task")
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_parts = msgspec.json.Decoder(list[str | _Number])


class Timed(Protocol):
    """A statement that reads the jobs of a state (not running) in the order of their time: for all
    queues or for one, from the start or from a cursor on.

    Its rows are key, task, bytes, time and n. Its parameters are `from` and `until`, `limit`, and
    where needed `queue`, and `ms` and `n` of the cursor.
    """

    def __call__(self, state: str, *, queue: bool, after: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Table:
    """A table of jobs, and how its database writes a statement."""

    name: str
    # The column that `Pager.picked` collects.
    key: str
    # How many bytes a job has, as an expression.
    size: str
    # The column by which the index of running jobs is sorted.
    running: str
    # A named parameter, as in ":{}".
    mark: str
    # Reads the jobs of a state in the order of their time, whatever their queue: see `Timed`.
    timed: Timed
    # Whether parked jobs have an index, and in the table a state, of their own: `PARKED`.
    parked: bool = False

    def states(self, state: State | None) -> list[str]:
        """The table's states, for one of a job's or for all."""
        states: list[str] = list(State) if state is None else [state]
        if self.parked and State.WAITING in states:
            states.insert(1, PARKED)
        return states

    def order(self, state: str) -> tuple[str, ...]:
        """Waiting jobs: the next one first. Ended jobs: the last one first."""
        if state == PARKED:
            return "queue", "task", "priority", "due_ms", "n"
        if state == State.WAITING:
            return "queue", "priority", "due_ms", "n"
        return "queue", "ended_ms" if state in ENDED else self.running, "n"


class Pager:
    """One page: run what `next_read` returns and give `take` its rows, until it returns None."""

    def __init__(self, table: Table, query: Query, cursor: str | None, limit: int) -> None:
        self._table = table
        self._query = query
        self._limit = limit
        self._states = table.states(query.state)
        self._last: list[Any] | None = None
        if cursor is not None:
            at, *_ = self._last = self._parsed(cursor)
            self._states = self._states[self._states.index(at) :]
        self._looked = self._bytes = 0
        # The keys of the page's jobs, in their order, and where the next page starts.
        self.picked: list[Any] = []
        self.cursor: str | None = None

    def _in_time(self, state: str) -> bool:
        """Whether the jobs of this state are read in the order of their time. Running ones are few,
        and their index is by lease."""
        return self._query.timed and state != State.RUNNING

    def _order(self, state: str) -> tuple[str, ...]:
        return ("ms", "n") if self._in_time(state) else self._table.order(state)

    def _parsed(self, cursor: str) -> list[Any]:
        """The state and the key. A cursor comes from outside, so nothing else may get through."""
        try:
            at, *key = _parts.decode(cursor if len(cursor) <= CURSOR_LIMIT else "")
        except (msgspec.DecodeError, ValueError):
            raise not_a_cursor(cursor) from None
        columns = self._order(str(at))
        if (
            at not in self._states
            or [isinstance(value, str) for value in key] != [each in _NAMES for each in columns]
            or any(isinstance(value, str) and "\0" in value for value in key)
            or (columns[0] == "queue" and self._query.queue not in (None, key[0]))
        ):
            raise not_a_cursor(cursor)
        return [at, *key]

    def next_read(self) -> tuple[str, dict[str, Any]] | None:
        if not self._states:
            return None
        state, query, table = self._states[0], self._query, self._table
        left = self._limit - len(self.picked) if query.task is None else SCAN - self._looked
        values: dict[str, Any] = {"limit": left, "queue": query.queue, **range_of(query)}
        last = self._last[1:] if self._last is not None and self._last[0] == state else None
        if self._in_time(state):
            values |= {} if last is None else {"ms": last[0], "n": last[1]}
            sql = table.timed(state, queue=query.queue is not None, after=last is not None)
            return sql, values
        columns = table.order(state)
        beyond, order = ("<", "desc") if state in ENDED else (">", "asc")
        # The state is written out: a partial index is used only if its condition is in the query.
        conditions = [f"state = '{state}'"]
        if state in ENDED:
            conditions.append("ended_ms is not null")
        if query.queue is not None:
            conditions.append(f"queue = {table.mark.format('queue')}")
        if query.timed:
            conditions.append(
                f"due_ms >= {table.mark.format('from')} and due_ms < {table.mark.format('until')}"
            )
        if last is not None:
            after = {f"k{i}": value for i, value in enumerate(last)}
            marks = ", ".join(map(table.mark.format, after))
            conditions.append(f"({', '.join(columns)}) {beyond} ({marks})")
            values |= after
        sql = f"""
            select {table.key}, task, {table.size}, {", ".join(columns)} from {table.name}
            where {" and ".join(conditions)}
            order by {", ".join(f"{column} {order}" for column in columns)}
            limit {table.mark.format("limit")}"""
        return sql, values

    def take(self, rows: Sequence[Sequence[Any]]) -> None:
        state = self._states.pop(0)
        for found, task, size, *key in rows:
            if self._query.task in (None, task):
                self._bytes += size
                if self.picked and self._bytes > BATCH_BYTES:
                    return self._end()
                self.picked.append(found)
            self._last = [state, *key]
            self._looked += 1
            if len(self.picked) == self._limit or self._looked == SCAN:
                return self._end()

    def _end(self) -> None:
        self._states = []
        self.cursor = msgspec.json.encode(self._last).decode()

    @property
    def looked(self) -> int:
        return self._looked


def range_of(query: Query) -> dict[str, int]:
    """The time range, as parameters."""
    from_ms = -(2**53) if query.from_ms is None else query.from_ms
    return {"from": from_ms, "until": 2**53 if query.until_ms is None else query.until_ms}


class MetaPager:
    """One page of the jobs with some meta: used like a Pager.

    `sql` reads key, state, queue, task, time, bytes and number of those whose number is below a
    limit, the highest first. Its parameters are name, value, below and limit.
    """

    def __init__(
        self, table: Table, sql: str, query: Query, cursor: str | None, limit: int
    ) -> None:
        assert query.meta is not None
        self._sql = sql
        self._query = query
        self._states = table.states(query.state)
        self._limit = limit
        names = (query.state, query.queue, query.task)
        others = query.timed or any(each is not None for each in names)
        self._most = SCAN if others else limit
        self.looked = 0
        self._below = 2**63 - 1 if cursor is None else _number(cursor)
        self._read = False
        self.picked: list[Any] = []
        self.cursor: str | None = None

    def next_read(self) -> tuple[str, dict[str, Any]] | None:
        if self._read or self._query.meta is None:
            return None
        self._read = True
        name, value = self._query.meta
        where = {"name": name, "value": value, "below": self._below, "limit": self._most}
        return self._sql, where

    def take(self, rows: Sequence[Sequence[Any]]) -> None:
        total = 0
        least, beyond = range_of(self._query).values()
        for found, state, queue, task, ms, size, n in rows:
            self.looked += 1
            if (
                state in self._states
                and least <= ms < beyond
                and self._query.queue in (None, queue)
                and self._query.task in (None, task)
            ):
                total += size
                if self.picked and total > BATCH_BYTES:
                    return self._end()
                self.picked.append(found)
            self._below = n
            if len(self.picked) == self._limit:
                return self._end()
        if len(rows) == self._most:
            self._end()

    def _end(self) -> None:
        self.cursor = msgspec.json.encode([_META, self._below]).decode()


def _number(cursor: str) -> int:
    try:
        what, number = _parts.decode(cursor if len(cursor) <= CURSOR_LIMIT else "")
    except (msgspec.DecodeError, ValueError):
        raise not_a_cursor(cursor) from None
    if what != _META or not isinstance(number, int):
        raise not_a_cursor(cursor)
    return number
