"""What answers mean, which hosts are left alone, and what is shown of a callback."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, strategies as st

from tickwheel.callbacks.answers import (
    KEPT_BYTES,
    LONGEST_WAIT_MS,
    Answer,
    in_words,
    kept_text,
    secrets_in,
    verdict,
    wait_ms,
)
from tickwheel.callbacks.hosts import (
    APART_MS,
    HOSTS_LIMIT,
    LONGEST_AWAY_MS,
    LONGEST_MS,
    Hosts,
    Share,
    Wait,
)
from tickwheel.callbacks.sending import Sender
from tickwheel.callbacks.targets import Allowed
from tickwheel.masking import is_secret_name, shown_arguments

NOW_MS = 1_445_412_480_000  # Wed, 21 Oct 2015 07:28:00 GMT


@pytest.mark.parametrize(
    "statuses, expected",
    [
        ((200, 201, 202, 204, 299), "done"),
        ((408, 425, 429, 500, 502, 503, 504, 599), "retry"),
        ((300, 301, 302, 303, 307, 308, 400, 401, 403, 404, 410, 422, 600, 100), "give up"),
    ],
)
def test_a_status_says_what_to_do(statuses: tuple[int, ...], expected: str) -> None:
    assert {status: verdict(status) for status in statuses} == dict.fromkeys(statuses, expected)


@pytest.mark.parametrize(
    "header, expected_ms",
    [
        ("0", 0),
        ("120", 120_000),
        ("999999999999", LONGEST_WAIT_MS),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30_000),
        ("Wed, 21 Oct 2015 07:28:30 -0000", 30_000),
        ("Wed, 21 Oct 2015 07:00:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_WAIT_MS),
        (None, None),
        ("", None),
        ("-1", None),
        ("soon", None),
        ("1.5", None),
        ("9" * 400, None),
        ("٣", None),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date_and_at_most_a_day(
    header: str | None, expected_ms: int | None
) -> None:
    assert wait_ms(header, NOW_MS) == expected_ms


@given(st.text())
def test_any_retry_after_can_be_read(header: str) -> None:
    assert (wait_ms(header, NOW_MS) or 0) in range(LONGEST_WAIT_MS + 1)


@given(st.binary(max_size=3_000))
def test_any_answer_can_be_kept(raw: bytes) -> None:
    text = kept_text(raw)
    assert len(text) <= 1_024 and "\0" not in text
    json.dumps(text).encode()
    assert in_words("x:80", Answer(500, 3, text)).isprintable()


def test_secrets_that_come_back_are_masked() -> None:
    secrets = secrets_in({"authorization": "Bearer hunter22", "x-api-key": "k3y!", "x-a": "shown"})
    assert kept_text(b"hunter22, Bearer hunter22, k3y! and shown", secrets) == (
        "***, ***, *** and shown"
    )


@pytest.mark.parametrize(
    "name, secret",
    [
        ("authorization", True),
        ("Cookie", True),
        ("set-cookie", True),
        ("x-api-key", True),
        ("apikey", True),
        ("x-auth-token", True),
        ("x_csrf_token", True),
        ("client-secret", True),
        ("x-hub-signature-256", True),
        ("x-auth", True),
        ("password", True),
        ("content-type", False),
        ("x-request-id", False),
        ("author", False),
        ("x-keyboard", False),
    ],
)
def test_names_of_secrets_are_known(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_arguments_are_shown_without_secrets() -> None:
    given = {
        "url": "https://example.com/a?token=1",
        "headers": {"authorization": "Bearer x", "accept": "text/plain"},
        "body": "hello",
        "on_done": "https://example.com/done",
    }
    assert shown_arguments("http.call", given) == {
        "url": "https://example.com/a?***",
        "headers": {"authorization": "***", "accept": "text/plain"},
        "body": "<5 characters>",
        "on_done": "https://example.com/done",
    }
    # The headers of other tasks too, but their bodies are their own.
    assert shown_arguments("mail", given)["body"] == "hello"
    assert shown_arguments("mail", given)["headers"]["authorization"] == "***"
    assert given["body"] == "hello" and shown_arguments("mail", "text") == "text"


# --- Hosts


def hosts(per_host: int | None = None, total: int = 100, break_after: int = 3) -> Hosts:
    return Hosts(
        total=total,
        per_host=per_host,
        break_after=break_after,
        break_ms=10_000,
        rand=lambda: 0.0,
    )


def fail(all: Hosts, place: str, now_ms: int, times: int = 1) -> None:
    for _ in range(times):
        assert all.enter(place, now_ms) is None
        all.leave(place, now_ms, began_ms=now_ms, trouble=True)


def fill(all: Hosts, place: str, now_ms: int = 0) -> int:
    """Begin as many calls as may go; returns how many."""
    count = 0
    while all.enter(place, now_ms) is None:
        count += 1
    return count


def end(all: Hosts, place: str, count: int, now_ms: int, took_ms: int) -> None:
    for _ in range(count):
        all.leave(place, now_ms, began_ms=now_ms - took_ms, trouble=False)


def test_a_host_can_have_a_limit_and_others_are_not_affected() -> None:
    all = hosts(per_host=2)
    assert all.enter("a", 0) is None and all.enter("a", 0) is None
    assert all.enter("a", 0) == Wait(50, broken=False)
    assert all.enter("b", 0) is None
    all.leave("a", 0, began_ms=0, trouble=False)
    assert all.enter("a", 0) is None


def test_each_host_that_does_not_answer_gets_half_of_what_the_others_leave() -> None:
    all = hosts()
    assert [fill(all, each) for each in ("a", "b", "c", "d", "e")] == [50, 25, 12, 6, 2]


def test_the_last_slots_are_for_hosts_that_have_answered() -> None:
    all = hosts()
    assert all.enter("known", 0) is None
    end(all, "known", 1, now_ms=0, took_ms=0)
    for n in range(1_000):
        fill(all, f"a:{n}", 100_000)
    assert all.active == 95
    assert all.enter("known", 100_000) is None
    assert all.enter("known", 100_000) is not None, "it does not answer any more"
    end(all, "known", 1, now_ms=100_001, took_ms=1)
    assert fill(all, "known", 100_001) == 4


def test_a_host_that_answers_quickly_gets_nearly_all_until_another_one_needs_room() -> None:
    all = hosts()
    assert fill(all, "a") == 50
    end(all, "a", 1, now_ms=1_000, took_ms=1_000)
    assert fill(all, "a", 1_000) == 41 and all.active == 90
    # What it gives back goes to the other one, until both have as many.
    active = {"a": 90, "b": 0}
    for now_ms in range(1_000, 1_100):
        for each in active:
            end(all, each, min(active[each], 1), now_ms, took_ms=1)
            active[each] += fill(all, each, now_ms) - min(active[each], 1)
    assert min(active.values()) >= 45 and all.active == 94


@pytest.mark.parametrize("took_ms, later_ms", [(1_001, 0), (1, 1_001)])
def test_a_host_that_is_slow_or_no_longer_answers_is_not_quick(took_ms: int, later_ms: int) -> None:
    all = hosts()
    assert fill(all, "a") == 50
    end(all, "a", 1, now_ms=2_000, took_ms=took_ms)
    assert fill(all, "a", 2_000 + later_ms) == 1 and all.active == 50


def test_calls_that_get_no_answer_do_not_make_a_host_quick() -> None:
    all = hosts()
    assert fill(all, "a") == 50
    all.leave("a", 500, began_ms=0, trouble=True)
    all.leave("a", 500, began_ms=0, trouble=None)
    assert fill(all, "a", 500) == 2 and all.active == 50


def test_a_worker_with_few_slots_leaves_one_to_other_hosts() -> None:
    all = hosts()
    for slots, slow, quick in [(1, 1, 1), (2, 1, 1), (3, 1, 2), (4, 2, 3), (10, 5, 9)]:
        all.share.slots = slots
        assert fill(all, "a") == slow
        end(all, "a", 1, now_ms=0, took_ms=0)
        assert fill(all, "a") == 1 + quick - slow
        end(all, "a", all.active, now_ms=0, took_ms=0)
        all = hosts()


def test_each_worker_shares_out_its_own_slots() -> None:
    all, small, large = hosts(total=500), Share(10), Share(100)

    def begin(share: Share) -> int:
        count = 0
        while all.enter("hangs", 0, share) is None:
            count += 1
        return count

    assert (begin(small), begin(large), begin(small)) == (5, 50, 0)
    all.leave("hangs", 0, small, began_ms=0, trouble=None)
    assert (begin(large), begin(small)) == (0, 1), "a slot goes to the worker that it is of"
    assert all.enter("other", 0, small) is None


def test_workers_with_more_slots_than_all_may_have_share_out_what_there_is() -> None:
    all, one, two = hosts(total=100), Share(100), Share(100)
    for share in (one, two):
        while all.enter("hangs", 0, share) is None:
            pass
    assert all.active == 50 and all.enter("other", 0, two) is None


def test_all_together_have_a_limit() -> None:
    all = hosts(total=1)
    assert all.enter("a", 0) is None
    assert all.enter("b", 0) == Wait(50, broken=False)
    all.leave("a", 0, began_ms=0, trouble=False)
    assert all.enter("b", 0) is None


def test_the_longer_a_host_is_busy_the_longer_calls_stay_away() -> None:
    all = Hosts(total=9, per_host=1, break_after=1, break_ms=1_000, rand=lambda: 1.0)
    assert all.enter("a", 0) is None

    def waits(*moments_ms: int) -> list[int]:
        return [wait.ms for wait in (all.enter("a", each) for each in moments_ms) if wait]

    assert waits(0, 10, 500, 1_000, 2_000) == [100, 100, 550, 1_050, 2_050]
    assert waits(*range(3_000, 100_001, 1_000))[-1] == LONGEST_MS + 50
    # Once it has been calm, that is forgotten.
    assert waits(102_000) == [100]


def test_the_more_calls_are_away_the_later_they_come_back() -> None:
    all = hosts(per_host=1)
    assert all.enter("hangs", 0) is None
    back = [wait.ms for _ in range(2_000) if (wait := all.enter("hangs", 0))]
    assert back == [50 + APART_MS * n for n in range(2_000)]
    assert all.enter("hangs", 10_000) == Wait(50 + 2_000 * APART_MS - 10_000, broken=False)
    for _ in range(10_000):
        wait = all.enter("hangs", 0)
        assert wait and wait.ms <= LONGEST_AWAY_MS + 50
    # Once it is quick, they come soon.
    all.leave("hangs", 10_000, began_ms=9_990, trouble=False)
    assert all.enter("hangs", 10_000) is None
    assert [all.enter("hangs", 10_000) for _ in range(9)] == [Wait(50, broken=False)] * 9


def test_a_call_may_wait_in_its_slot_for_a_host_that_is_quick() -> None:
    all = hosts()
    assert fill(all, "a") == 50

    def may(lingering: int, now_ms: int) -> bool:
        all.share.lingering = lingering
        return all.may_linger("a", now_ms)

    assert may(0, 10) and may(24, 10)
    assert not may(25, 10), "half of the slots that are free are taken so"
    assert not may(0, 25), "it does not move"
    end(all, "a", 1, now_ms=30, took_ms=30)
    assert may(50, 30) and not may(51, 30)


async def test_a_call_that_leaves_lets_the_next_one_in_before_any_newcomer() -> None:
    sender = Sender(Allowed(), all := hosts(per_host=1), None, 100)
    try:
        assert await sender.enter("a", lambda: 0) is None
        next_one = asyncio.create_task(sender.enter("a", lambda: 0))
        await asyncio.sleep(0)
        sender.leave("a", 0, began_ms=0, trouble=False)
        assert all.enter("a", 0) is not None, "its turn is taken"
        assert await next_one is None and all.active == 1
        # One that is cancelled in its turn gives it back.
        cancelled = asyncio.create_task(sender.enter("a", lambda: 0))
        await asyncio.sleep(0)
        sender.leave("a", 0, began_ms=0, trouble=False)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled() and all.active == 0
    finally:
        await sender.close()


def test_a_host_that_fails_in_a_row_is_left_alone_until_a_probe_succeeds() -> None:
    all = hosts(break_after=3)
    fail(all, "a", 0, times=3)
    assert all.is_open("a") and not all.is_open("b")
    assert all.enter("a", 1_000) == Wait(9_000, broken=True)
    # One call tries it; the others wait for what it finds.
    assert all.enter("a", 10_000) is None
    assert all.enter("a", 10_000) == Wait(50, broken=True)
    all.leave("a", 10_000, began_ms=10_000, trouble=True)
    assert all.enter("a", 10_000) == Wait(20_000, broken=True), "twice as long"
    assert all.enter("a", 30_000) is None
    all.leave("a", 30_000, began_ms=30_000, trouble=False)
    assert not all.is_open("a") and all.enter("a", 30_000) is None


def test_calls_that_get_no_answer_do_not_count_if_others_went_well_meanwhile() -> None:
    """They end together: those that begin within a moment time out within a moment."""
    all = hosts(break_after=3)
    for _ in range(10):
        assert all.enter("a", 1_000) is None
    all.leave("a", 1_010, began_ms=1_000, trouble=False)
    for _ in range(9):
        all.leave("a", 1_500, began_ms=1_000, trouble=True)
    assert not all.is_open("a")
    for _ in range(3):
        assert all.enter("a", 1_500) is None
        all.leave("a", 2_000, began_ms=1_500, trouble=True)
    assert all.is_open("a")


def test_failures_that_are_not_in_a_row_do_no_harm() -> None:
    all = hosts(break_after=2)
    for now_ms in range(10):
        fail(all, "a", 2 * now_ms + 1)
        assert all.enter("a", 2 * now_ms + 1) is None
        all.leave("a", 2 * now_ms + 1, began_ms=2 * now_ms + 1, trouble=False)
    assert not all.is_open("a")


def test_a_probe_that_is_cancelled_lets_the_next_one_try() -> None:
    all = hosts(break_after=1)
    fail(all, "a", 0)
    assert all.enter("a", 10_000) is None
    all.leave("a", 10_000, began_ms=10_000, trouble=None)
    assert all.is_open("a") and all.enter("a", 10_000) is None


def test_calls_that_began_earlier_do_not_prolong_the_wait() -> None:
    all = hosts(break_after=1)
    for _ in range(5):
        assert all.enter("a", 0) is None
    for _ in range(5):
        all.leave("a", 0, began_ms=0, trouble=True)
    assert all.enter("a", 0) == Wait(10_000, broken=True)


def test_a_bounded_number_of_hosts_is_remembered_and_busy_ones_always() -> None:
    all = hosts(total=10**9)
    assert all.enter("busy", 0) is None
    for n in range(HOSTS_LIMIT + 10):
        assert all.enter(f"{n}", 0) is None
        all.leave(f"{n}", 0, began_ms=0, trouble=False)
    assert len(all) == HOSTS_LIMIT
    all.leave("busy", 0, began_ms=0, trouble=False)
    assert all.active == 0


def test_jitter_only_makes_a_wait_longer() -> None:
    all = Hosts(total=9, per_host=1, break_after=1, break_ms=1_000, rand=lambda: 1.0)
    fail(all, "a", 0)
    assert all.enter("a", 0) == Wait(1_200, broken=True)


def test_what_a_server_sends_back_of_a_request_is_hidden_also_at_the_end() -> None:
    token = "sk_live_0123456789abcdefghij"
    secrets = secrets_in(
        {"authorization": f"Bearer {token}"}, "/hook?token=in-the-query&a=1", b'{"card": "4111"}'
    )
    assert kept_text(b"Cannot POST /hook?token=in-the-query&a=1", secrets) == (
        "Cannot POST /hook?***"
    )
    assert kept_text(b'bad body: {"card": "4111"}', secrets) == "bad body: ***"
    long = b"x" * (KEPT_BYTES - len(token) + 1) + token.encode()
    assert token[:4] not in kept_text(long, secrets)
    assert len(kept_text(b"y" * 5000, secrets)) == KEPT_BYTES
