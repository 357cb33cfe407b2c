"""How large a store is, on each store."""

from __future__ import annotations

from stores import Harness


async def test_a_store_tells_how_large_it_is(h: Harness) -> None:
    await h.add(*h.jobs(50))
    found = await h.store.sizes()
    assert found and len({each.name for each in found}) == len(found)
    assert all(each.name and each.unit and each.value >= 0 for each in found)
    # Of something there is some.
    assert any(each.value > 0 for each in found)
