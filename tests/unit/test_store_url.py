"""What all store URLs have in common: how they are taken apart, and what an error may say."""

from __future__ import annotations

import re

import pytest

from tickwheel.errors import BadConfig
from tickwheel.store import open_store
from tickwheel.stores.nats.url import NatsOptions
from tickwheel.stores.redis.url import RedisOptions
from tickwheel.stores.sqlite.url import SqliteOptions
from tickwheel.stores.url import StoreUrl, UrlOptions

KNOWN = ("ahead", "pool", "sync", "name")


def options(query: str) -> UrlOptions:
    return UrlOptions(query, KNOWN)


def test_a_url_has_a_scheme_a_place_and_options() -> None:
    url = StoreUrl.of("Redis://ann:p%40ss@one:1,[::1]/shop?ahead=1s")
    assert (url.scheme, url.query) == ("redis", "ahead=1s")
    server = url.server(port=9, example="")
    assert server.hosts == [("one", 1), ("::1", 9)]
    assert (server.user, server.password, server.path) == ("ann", "p@ss", "shop")


@pytest.mark.parametrize(
    ("url", "file"),
    [("sqlite:///jobs.db", "jobs.db"), ("sqlite:////a%20b/jobs.db?x=1", "/a b/jobs.db")],
)
def test_a_file_is_relative_unless_there_are_four_slashes(url: str, file: str) -> None:
    assert StoreUrl.of(url).file == file


def test_options_have_types_and_defaults() -> None:
    given = options("ahead=500ms&pool=3&sync=normal&name=a%2Bb")
    assert given.duration_ms("ahead", "1s") == 500
    assert given.number("pool", 1, least=1, most=3) == 3
    assert given.one_of("sync", "full", "normal") == "normal"
    assert given.matching("name", "x", re.compile(r"\S+"), "a word") == "a+b"
    none = options("")
    assert none.duration_ms("ahead", "1s") == 1000
    assert none.number("pool", 1, least=1, most=3) == 1
    assert none.one_of("sync", "full", "normal") == "full"
    assert none.matching("name", "x", re.compile(r"\S+"), "a word") == "x"


def test_an_unknown_option_is_named_with_those_there_are_and_a_guess() -> None:
    with pytest.raises(BadConfig) as caught:
        options("pol=3")
    assert str(caught.value) == (
        "unknown option 'pol' in the store URL: the options are ahead, pool, sync, name; "
        "did you mean pool?"
    )


def test_options_for_others_are_passed_on_as_they_are_written() -> None:
    given = UrlOptions("pool=3&sslmode=a+b%20c&ahead=1s", KNOWN, others="those of libpq")
    assert given.others == ["sslmode=a+b%20c"]
    assert "sync, name, and those of libpq" in str(given.unknown("colour"))


@pytest.mark.parametrize(
    "url",
    [
        "redis://ann:p?ahead=hunter2@host",
        "redis://ann:12?ahead=hunter2@host",
        "rediss://ann:12?ca=hunter2@host",
        "redis://ann:12?namespace={hunter2@host",
        "redis://ann:12?db=hunter2@host",
        "redis://ann:se/hunter2@host",
        "nats://ann:12?shards=hunter2@host",
        "nats://ann:12/hunter2@host",
        "postgresql://ann:12?pool=hunter2@host",
        "postgresql://ann:12?ahead=hunter2@host",
    ],
)
def test_a_password_that_was_not_quoted_is_not_shown_as_something_else(url: str) -> None:
    with pytest.raises(BadConfig, match="%40 for @") as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_the_scheme_may_be_in_capitals() -> None:
    assert RedisOptions.of("REDISS://host").tls
    assert SqliteOptions.of("SQLite:///jobs.db").path.name == "jobs.db"
    assert NatsOptions.of("NATS+embedded:///jobs").embedded is not None
    for url in ("Memory://", "PostgreSQL://host/shop", "Nats://host"):
        open_store(url)
