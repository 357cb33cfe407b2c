"""API keys and the audit log on every store."""

from __future__ import annotations

from stores import Harness
from tickwheel.client import Client
from tickwheel.clock import SystemClock
from tickwheel.operate.audit import Audit, Entry
from tickwheel.operate.keys import Keys, Scope

HOUR_MS = 3_600_000


async def test_a_key_works_from_its_creation_until_it_is_revoked(h: Harness) -> None:
    here = Keys(Client(h.store, SystemClock()))
    there = Client(await h.new_handle(), SystemClock())
    assert not await here.any()
    made, text = await here.create("ci", [Scope.ENQUEUE], queues=["mail"], expires="1h")
    assert await Keys(there).check(text) == made
    assert await Keys(there).list() == [made]
    assert await here.revoke(made.id)
    # One that has not seen it: others remember it for a moment.
    assert await Keys(there).check(text) is None
    assert not await Keys(there).any()


async def test_the_audit_log_has_the_newest_first_and_is_pruned(h: Harness) -> None:
    audit = Audit(Client(h.store, SystemClock()), retention="3650d")
    # Several hours, and some in the same millisecond.
    times = [h.now - n * HOUR_MS // 2 for n in range(24)] + [h.now] * 3
    for n, at_ms in enumerate(times):
        entry = Entry(
            at_ms=at_ms, who="k", action="job.cancel", target=f"{n}", source="::1", outcome="ok"
        )
        await audit.write([entry])
    found: list[Entry] = []
    page, cursor = await audit.list(limit=5)
    while cursor is not None:
        found += page
        page, cursor = await audit.list(limit=5, cursor=cursor)
    found += page
    assert [each.at_ms for each in found] == sorted(times, reverse=True)
    assert len({each.target for each in found}) == len(times)
    page, cursor = await audit.list(after_ms=times[3], before_ms=times[1])
    assert ([each.target for each in page], cursor) == (["2", "3"], None)
    assert await audit.prune(times[10]) == 13
    page, _ = await audit.list()
    assert min(each.at_ms for each in page) == times[10]
    assert len(page) == len(times) - 13
