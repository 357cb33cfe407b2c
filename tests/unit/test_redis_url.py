"""What a Redis URL says, and what it may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tickwheel.errors import BadConfig
from tickwheel.store import open_store
from tickwheel.stores.redis.url import RedisOptions


def test_a_host_is_enough() -> None:
    options = RedisOptions.of("redis://localhost")
    assert (options.host, options.port, options.db, options.tls) == ("localhost", 6379, 0, False)
    assert (options.user, options.password, options.namespace) == (None, None, "default")
    assert (options.ahead_ms, options.timeout_s, options.cluster) == (1000, 10.0, False)


def test_everything_can_be_said() -> None:
    options = RedisOptions.of(
        "redis://ann:p%40ss%3Aword@cache.example:6380/3"
        "?namespace=shop&ahead=500ms&timeout=2s&eviction=allowed"
    )
    assert (options.host, options.port, options.db) == ("cache.example", 6380, 3)
    assert (options.user, options.password) == ("ann", "p@ss:word")
    assert (options.namespace, options.ahead_ms, options.timeout_s) == ("shop", 500, 2.0)
    assert options.eviction_allowed


@pytest.mark.parametrize(
    ("login", "user", "password"),
    [("", None, None), (":secret@", None, "secret"), ("ann:secret@", "ann", "secret"),
     ("ann@", "ann", None)],
)  # fmt: skip
def test_a_password_needs_no_user(login: str, user: str | None, password: str | None) -> None:
    options = RedisOptions.of(f"redis://{login}host")
    assert (options.user, options.password) == (user, password)


@pytest.mark.parametrize(
    ("scheme", "tls"),
    [("redis", False), ("rediss", True), ("valkey", False), ("valkeys", True)],
)
def test_an_s_at_the_end_means_tls(scheme: str, tls: bool) -> None:
    assert RedisOptions.of(f"{scheme}://host").tls is tls
    assert open_store(f"{scheme}://host").ahead_ms == 1000


def test_files_for_tls_are_named_in_the_url(tmp_path: Path) -> None:
    for name in ("ca.pem", "me.pem", "me.key"):
        (tmp_path / name).touch()
    query = f"ca={tmp_path}/ca.pem&cert={tmp_path}/me.pem&key={tmp_path}/me.key"
    assert set(RedisOptions.of(f"rediss://host?{query}").files) == {"ca", "cert", "key"}


def test_an_address_of_version_six_stands_in_brackets() -> None:
    options = RedisOptions.of("redis://[::1]:6380")
    assert (options.host, options.port, options.where) == ("::1", 6380, "[::1]:6380")
    assert RedisOptions.of("redis://[::1]").port == 6379


def test_the_database_may_be_an_option() -> None:
    assert RedisOptions.of("redis://host?db=2").db == 2


def test_all_keys_of_a_namespace_lie_in_one_slot() -> None:
    assert RedisOptions.of("redis://host?namespace=shop").root == "tw:{shop}:"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://", "must name a host"),
        ("redis://host:port", "must name a host"),
        ("redis://host:0", "a port from 1 to 65535"),
        ("redis://host:70000", "a port from 1 to 65535"),
        ("redis://one,two", "names one host"),
        ("redis://host/zero", "database 'zero'"),
        ("redis://host?db=-1", "db=-1"),
        ("redis://host?namespac=shop", "did you mean namespace"),
        ("redis://host?namespace=a{b}", "namespace=a{b} in the store URL: must be letters"),
        ("redis://host?namespace=", "namespace= in the store URL: must be letters"),
        ("redis://host?ahead=soon", "ahead"),
        ("redis://host?ahead=2m", "ahead=2m in the store URL: must be from 0ms to 1m"),
        ("redis://host?timeout=1ms", "timeout=1ms in the store URL: must be from 100ms to 5m"),
        ("redis://host?cluster=yes", "cluster=yes in the store URL: must be false or true"),
        ("redis://host/1?cluster=true", "only database 0"),
        ("redis://host?eviction=ok", "eviction=ok"),
        ("redis://host?ca=/no/such.pem", "write rediss://"),
        ("rediss://host?ca=/no/such.pem", "no such file"),
    ],
)
def test_what_cannot_be_used_is_said(url: str, words: str) -> None:
    with pytest.raises(BadConfig) as failure:
        open_store(url)
    assert words in str(failure.value)


@pytest.mark.parametrize("rest", ["host:port", "host/zero", "host?no=thing", "host?ahead=soon"])
def test_an_error_does_not_repeat_the_password(rest: str) -> None:
    with pytest.raises(BadConfig) as failure:
        open_store(f"redis://ann:s3cret@{rest}")
    assert "s3cret" not in str(failure.value)


def test_options_can_be_printed_without_the_password() -> None:
    assert "s3cret" not in repr(RedisOptions.of("redis://ann:s3cret@host"))
