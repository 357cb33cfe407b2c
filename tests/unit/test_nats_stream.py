"""Steps on their way to a stream, each with an answer of its own: what no server says on demand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_nats_wire import Script, hmsg, msg, reply_of, talking

from tickwheel.errors import StoreError, StoreUnavailable, UsageError
from tickwheel.stores.nats.answers import StoreFull, must
from tickwheel.stores.nats.steps import Layout, Step
from tickwheel.stores.nats.stream import Stream
from tickwheel.stores.nats.wire import Wire

REFUSED = b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 7"}}'
FULL = b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}}'


def stream_over(wire: Wire) -> Stream:
    return Stream(wire, Layout("ns", 0, 1000), replicas=None, shards=1, singly=True)


def steps(count: int) -> list[list[Step]]:
    return [[Step(f"tw.ns.0.t.s.q.{n}", "", b"{}")] for n in range(count)]


def stored(seq: int) -> bytes:
    return b'{"stream":"TICKWHEEL-ns-0","seq":%d}' % seq


async def test_answers_belong_to_their_steps_whatever_their_order() -> None:
    waiting: list[bytes] = []

    async def answer(script: Script, line: bytes) -> None:
        waiting.append(reply_of(line))
        if len(waiting) == 3:
            said = [stored(5), REFUSED, stored(6)]
            for n in (1, 2, 0):
                await script.say(msg(waiting[n], said[n]))

    async with talking() as (script, wire):
        script.answer = answer
        assert await stream_over(wire).put(steps(3)) == [5, None, 6]


async def test_a_group_of_several_steps_goes_as_one_batch() -> None:
    async def answer(script: Script, line: bytes) -> None:
        if b"Nats-Batch-Commit" in line:
            await script.say(msg(line.split()[2], stored(9)))

    async with talking() as (script, wire):
        script.answer = answer
        [one], [two], [three] = steps(3)
        assert await stream_over(wire).put([[one], [two, three]]) == [7, 9]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (lambda reply: msg(reply, FULL), StoreUnavailable),
        (lambda reply: hmsg(reply, b"NATS/1.0 503\r\n\r\n", b""), StoreUnavailable),
        (
            lambda reply: msg(reply, FULL.replace(b"503", b"400").replace(b"10077", b"1")),
            StoreError,
        ),
    ],
    ids=["full", "nobody there", "not allowed"],
)
async def test_an_answer_that_is_no_refusal_is_an_error(
    said: Callable[[bytes], bytes], error: type[StoreError]
) -> None:
    async def answer(script: Script, line: bytes) -> None:
        await script.say(said(reply_of(line)))

    async with talking() as (script, wire):
        script.answer = answer
        with pytest.raises(error):
            await stream_over(wire).put(steps(2))


@pytest.mark.parametrize(
    ("status", "number"),
    [(400, 10002), (503, 10023), (500, 10028), (500, 10047), (500, 10053), (503, 10077)],
)
async def test_a_server_that_is_full_is_one_that_may_take_more_later(
    status: int, number: int
) -> None:
    answer = {"error": {"code": status, "err_code": number, "description": "no room"}}
    with pytest.raises(StoreFull, match=f"no room \\({number}\\)"):
        must(answer)
    assert issubclass(StoreFull, StoreUnavailable)


def test_a_batch_of_which_a_part_was_refused_may_be_tried_again() -> None:
    with pytest.raises(StoreUnavailable, match="10176"):
        must({"error": {"code": 400, "err_code": 10176, "description": "incomplete"}})


async def test_each_of_many_steps_learns_whether_there_was_room_for_it() -> None:
    async def answer(script: Script, line: bytes) -> None:
        number = int(reply_of(line).rpartition(b".")[2])
        await script.say(msg(reply_of(line), [stored(5), FULL, REFUSED][number]))

    async with talking() as (script, wire):
        script.answer = answer
        found = await stream_over(wire).put_each([group[0] for group in steps(3)])
        assert [type(each) for each in found] == [int, StoreFull, type(None)]


async def test_a_step_that_is_too_large_is_refused_before_anything_is_sent() -> None:
    async with talking() as (script, wire):
        [small] = steps(1)
        large = [Step("tw.ns.0.t.s.q.x", "", b"x" * 1_048_576)]
        with pytest.raises(UsageError, match="max_payload"):
            await stream_over(wire).put([small, large])
        assert not any(line.startswith((b"PUB", b"HPUB")) for line in script.heard)
