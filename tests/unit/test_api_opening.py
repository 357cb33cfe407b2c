"""When an app's store is opened and closed, in blocks that may be nested."""

from __future__ import annotations

import asyncio

import pytest
from an_app import add, app, is_open, on_disk, waiting

from tickwheel import (
    App,
    StoreUnavailable,
)

__all__ = ["app", "on_disk"]


async def test_a_closed_app_opens_again_when_it_is_used(app: App) -> None:
    task = app.task(add)
    async with app:
        await task.enqueue(1)
    async with app as same:
        assert same is app
    await task.enqueue(2)
    assert await waiting(app) == 2


async def test_a_nested_block_does_not_close_the_store_of_the_one_around_it(on_disk: App) -> None:
    app, task = on_disk, on_disk.task(add)
    async with app:
        client = await app.client()
        async with app:
            await task.enqueue(1)
        assert await app.client() is client
        assert sum(queue.waiting for queue in await client.queues()) == 1
    assert not is_open(app)


async def test_a_nested_block_does_not_close_the_store_of_a_worker(
    on_disk: App, caplog: pytest.LogCaptureFixture
) -> None:
    app, task = on_disk, on_disk.task(add)
    async with app.worker():
        async with app:
            assert await (await task.enqueue(1)).result(timeout=10) == 1
        assert await (await task.enqueue(2)).result(timeout=10) == 2
    # Somebody wanted it closed, and the worker was the last to use it.
    assert not is_open(app)
    ours = [record for record in caplog.records if record.name == "tickwheel"]
    assert [record.message for record in ours if record.levelname != "INFO"] == []


async def test_the_last_of_several_tasks_closes_the_store(on_disk: App) -> None:
    app, task = on_disk, on_disk.task(add)
    first_left = asyncio.Event()

    async def short() -> None:
        async with app:
            await task.enqueue(1)
        first_left.set()

    async def long() -> None:
        async with app:
            client = await app.client()
            await first_left.wait()
            assert await client.queues() != []
            await task.enqueue(2)
            assert await app.client() is client

    await asyncio.gather(long(), short())
    assert not is_open(app)
    assert await waiting(app) == 2
    async with app:
        pass
    assert not is_open(app)


async def test_a_block_closes_what_was_opened_before_it_on_first_use(on_disk: App) -> None:
    await on_disk.queues()
    async with on_disk:
        assert is_open(on_disk)
    assert not is_open(on_disk)


async def test_a_worker_leaves_open_what_nobody_wants_closed(on_disk: App) -> None:
    async with on_disk.worker():
        client = await on_disk.client()
    assert await on_disk.client() is client
    assert await client.queues() == []
    async with on_disk:
        pass


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_block_that_could_not_open_the_store_does_not_count(
    on_disk: App, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    error = StoreUnavailable("not now") if how == "fails" else asyncio.CancelledError()

    async def fail() -> None:
        raise error

    client = on_disk._access._client()
    with monkeypatch.context() as broken:
        broken.setattr(client.store, "open", fail)
        with pytest.raises(type(error)):
            async with on_disk:
                pass
        with pytest.raises(type(error)):
            async with on_disk.worker():
                pass
    async with on_disk:
        assert await client.queues() == []
    assert not is_open(on_disk)


async def test_a_block_that_is_cancelled_while_it_closes_closes_all_the_same(on_disk: App) -> None:
    entered, closed = asyncio.Event(), asyncio.Event()
    client = on_disk._access._client()
    own_close = client.store.close

    async def drained() -> None:
        entered.set()
        await asyncio.sleep(60)

    async def close() -> None:
        await own_close()
        closed.set()

    async def block() -> None:
        async with on_disk:
            client._adding.drained = drained  # type: ignore[method-assign]
            client.store.close = close  # type: ignore[method-assign]

    task = asyncio.create_task(block())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set() and not is_open(on_disk)


def test_a_nested_block_on_another_loop_has_a_store_of_its_own(on_disk: App) -> None:
    async def block() -> None:
        async with on_disk:
            await on_disk.queues()

    async def outer() -> None:
        async with on_disk:
            client = await on_disk.client()
            await asyncio.to_thread(asyncio.run, block())
            assert await client.queues() == []

    asyncio.run(outer())
