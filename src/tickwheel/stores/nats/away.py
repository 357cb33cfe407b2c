"""Shards that don't answer: they are set aside, and the others continue without them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.stores.nats.shard import Shard

log = logging.getLogger("tickwheel")

# How often a shard that was set aside is asked whether it is back.
ASK_S = 1.0


class Away:
    """Which shards of a store are away, as one handle sees it."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._away: dict[Shard, asyncio.Task[None]] = {}
        # The queues of the last claim.
        self.served: Sequence[str] = ()

    async def close(self) -> None:
        ending = list(self._away.values())
        self.forget()
        await asyncio.gather(*ending, return_exceptions=True)

    def forget(self) -> None:
        """Assume that all shards are back."""
        for task in self._away.values():
            task.cancel()
        self._away.clear()

    def others(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """Those of these shards that are not away; all of them if all are."""
        return [each for each in shards if each not in self._away] or shards

    async def of_each(
        self, shards: Sequence[Shard], step: Callable[[Shard], Awaitable[None]]
    ) -> None:
        """Take a step on one shard after the other, and skip those that don't answer. Raises if
        none answers."""
        failures, present = 0, self.others(shards)
        for shard in present:
            try:
                await step(shard)
            except StoreUnavailable:
                failures += 1
                if failures == len(present):
                    raise
                self._set_aside(shard)

    async def of_all(
        self,
        split: Mapping[Shard, list[str]],
        step: Callable[[Shard, list[str]], Awaitable[None]],
    ) -> dict[Shard, StoreUnavailable]:
        """Take a step on these shards at the same time, independently of each other. Returns the
        errors of those that didn't answer, which may be all."""
        failed: dict[Shard, StoreUnavailable] = {}

        async def take(shard: Shard, mine: list[str]) -> None:
            try:
                if shard in self._away and len(self._away) < len(self._shards):
                    raise StoreUnavailable(f"stream {shard.layout.stream} does not answer")
                await step(shard, mine)
            except StoreUnavailable as error:
                failed[shard] = error
                self._set_aside(shard)

        if len(split) == 1:
            await take(*next(iter(split.items())))
            return failed
        taken = [take(*each) for each in split.items()]
        for answer in await asyncio.gather(*taken, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
        return failed

    def _set_aside(self, shard: Shard) -> None:
        if len(self._shards) > 1 and shard not in self._away:
            log.warning("stream %s does not answer; continuing without it", shard.layout.stream)
            self._away[shard] = asyncio.create_task(self._await_return(shard))

    async def _await_return(self, shard: Shard) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            try:
                await shard.stream.info()
                # Its consumers have to answer as well.
                shard.delivery.keep(await shard.delivery.take(self.served, 1))
            except StoreUnavailable:
                continue
            except StoreError as error:
                log.warning("stream %s: %s", shard.layout.stream, error)
            log.warning("stream %s answers again", shard.layout.stream)
            del self._away[shard]
            return
