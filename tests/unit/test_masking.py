"""What is shown of a URL, and of what others say about it: never a password, never a token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spellings import SECRET, SPELLINGS
from tickwheel import App, BadConfig, TickwheelError
from tickwheel.config import load
from tickwheel.masking import masked, scrubbed
from tickwheel.outbox import Outbox


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///jobs.db", "sqlite:///jobs.db"),
        ("sqlite:////home/me@work/jobs.db?sync=full", "sqlite:////home/me@work/jobs.db?sync=full"),
        ("memory://", "memory://"),
        ("nats+embedded:///jobs", "nats+embedded:///jobs"),
        ("nats://TOKEN@host", "nats://***@host"),
        ("nats://TOKEN:@host", "nats://***@host"),
        ("nats://ann:secret@a:4222,b:4222/shop", "nats://ann:***@a:4222,b:4222/shop"),
        ("nats://ann:secret@a,ann:secret@b", "nats://ann:***@b"),
        ("redis://:secret@host:6379/0?timeout=5s", "redis://:***@host:6379/0?timeout=5s"),
        ("redis://secret@host", "redis://***@host"),
        ("redis://[::1]:6379", "redis://[::1]:6379"),
        ("redis://host:secret", "redis://***"),
        ("redis://ann:se#c/r?et@host", "redis://ann:***@host"),
        ("redis://ann:s%40cret@host", "redis://ann:***@host"),
        ("postgresql://ann@host/shop", "postgresql://ann@host/shop"),
        ("postgresql://ann:sec@ret@host/shop", "postgresql://ann:***@host/shop"),
        ("postgresql:///shop?host=a&password=secret", "postgresql:///shop?host=a&***"),
        ("postgresql:///shop?password=se&cret&pool=4", "postgresql:///shop?***&***&pool=4"),
        ("postgresql:///shop?user=ann@host&password=secret", "postgresql://***@***"),
        ("nats://host?monitor=http://ann:secret@host:8222", "nats://***:***@host:8222"),
        ("ann:secret@host", "***"),
        ("host:secret", "***"),
        ("host=db password=secret", "***"),
        ("SECRET@nats://host", "***"),
        ("jobs.db", "jobs.db"),
        ("", ""),
    ],
)
def test_a_url_is_shown_as_far_as_it_is_harmless(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_no_spelling_shows_its_secret() -> None:
    for url in SPELLINGS:
        assert SECRET not in masked(url), url


def test_nor_does_a_text_that_quotes_it() -> None:
    for url in SPELLINGS:
        assert SECRET not in scrubbed(f"could not use '{url}' (is it there?)"), url


def test_what_others_say_is_shown_without_the_secrets_that_we_know() -> None:
    said = "no p@ss w0rd, no 'p%40ss%20w0rd', no postgresql://ann:x@db/shop, but db:5432"
    assert scrubbed(said, "p@ss w0rd", None, "") == (
        "no ***, no '***', no postgresql://ann:***@db/*** but db:5432"
    )


@pytest.mark.parametrize("make", [App, Outbox, lambda url: App("memory://", outbox=url)])
def test_no_app_and_no_outbox_says_the_secret(make: Callable[[str], object]) -> None:
    for url in SPELLINGS:
        try:
            made = make(url)
        except TickwheelError as error:
            made = error
        assert SECRET not in f"{made!r} {made}", url


def test_nor_does_the_repr_of_the_settings() -> None:
    for url in SPELLINGS:
        assert SECRET not in repr(load({"store": url, "outbox": url}, environ={})), url


def test_a_setting_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(BadConfig) as raised:
        load({"store": [f"redis://:{SECRET}@host"]}, environ={})
    assert SECRET not in str(raised.value)
    assert "must be a non-empty string" in str(raised.value)


def test_an_app_says_which_store_it_is_on() -> None:
    assert repr(App("redis://ann:secret@host:6379")) == "<app on redis://ann:***@host:6379>"
