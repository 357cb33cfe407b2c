"""Requests and their answers, repeated while that is safe and there is time."""

from __future__ import annotations

import logging
import random
from typing import Protocol

from tickwheel.clock import S_NS, Clock
from tickwheel.errors import StoreUnavailable, TickwheelError
from tickwheel.http_client.answers import ApiAnswer, error_of, nothing_was_done
from tickwheel.http_client.requests import ApiRequest
from tickwheel.http_client.wire import NoAnswer, NotSent
from tickwheel.masking import MASK

log = logging.getLogger("tickwheel.http_client")

# Before the first repeat, and at most, unless the server asks for longer.
PAUSE_FIRST_S, PAUSE_LONGEST_S = 0.1, 5.0


class Link(Protocol):
    """How requests reach the server, and how to wait: with an event loop, or without."""

    async def send(self, request: ApiRequest, until_ns: int) -> ApiAnswer: ...
    async def sleep(self, seconds: float) -> None: ...
    async def close(self) -> None: ...


class Exchange:
    """Asks, and asks again."""

    def __init__(
        self, link: Link, clock: Clock, *, timeout_s: float, retry_s: float, key: str | None
    ) -> None:
        self.link = link
        self.clock = clock
        self.timeout_s = timeout_s
        self._retry_s = retry_s
        self._key = key

    def now_s(self) -> float:
        return self.clock.monotonic_ns() / S_NS

    async def ask(self, request: ApiRequest, within_s: float | None = None) -> bytes:
        """The body of the answer. Raises what a refusal means, or StoreUnavailable if there is no
        answer in time: no repeat starts later than the client allows, and nothing takes longer than
        `within_s`."""
        started_s, tries = self.now_s(), 0
        until_s = float("inf") if within_s is None else started_s + within_s
        last_s = min(until_s, started_s + self._retry_s)
        while True:
            received, error, asked_s = await self._try(request, until_s)
            if received is not None:
                return received.body
            pause_s = pause_before(tries, asked_s, last_s - self.now_s(), random.random())
            if pause_s is None:
                raise error
            log.info("repeating a request in %.1f s: %s", pause_s, error)
            await self.link.sleep(pause_s)
            tries += 1

    async def _try(
        self, request: ApiRequest, until_s: float
    ) -> tuple[ApiAnswer | None, TickwheelError, float | None]:
        """The answer; or the error, and how long the server wants to be left alone, None if it must
        not be asked again."""
        try:
            until_s = min(until_s, self.now_s() + self.timeout_s)
            received = await self.link.send(request, int(until_s * S_NS))
        except NotSent as why:
            return None, StoreUnavailable(f"the server can't be reached: {why}"), 0.0
        except NoAnswer as why:
            words = f"the server did not answer: {why}; it is unknown whether it acted"
            return None, StoreUnavailable(words), 0.0 if request.repeatable else None
        if received.ok:
            return received, StoreUnavailable(), None
        error = self._without_key(error_of(request, received))
        return None, error, may_repeat(request, received)

    def _without_key(self, error: TickwheelError) -> TickwheelError:
        if self._key and self._key in str(error):
            return type(error)(str(error).replace(self._key, MASK))
        return error


def may_repeat(request: ApiRequest, received: ApiAnswer) -> float | None:
    """How long to wait before the request is repeated, at least; None if it must not be."""
    if nothing_was_done(received) or (received.status == 503 and request.repeatable):
        return received.retry_after_s or 0.0
    return None


def pause_before(tries: int, asked_s: float | None, left_s: float, chance: float) -> float | None:
    """How long to wait before the next try; None if there is to be none, or no time for it."""
    if asked_s is None:
        return None
    longest_s = min(PAUSE_FIRST_S * 2.0 ** min(tries, 16), PAUSE_LONGEST_S)
    pause_s = max(asked_s, longest_s * (0.5 + chance / 2))
    return pause_s if pause_s < left_s else None
