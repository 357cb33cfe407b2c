"""URLs, lists of allowed hosts, methods, headers and bodies of callbacks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from yarl import URL

from tickwheel import BadArguments, BadConfig
from tickwheel.callbacks.targets import (
    BODY_LIMIT,
    OURS,
    Allowed,
    checked_headers,
    checked_method,
    kept_body,
    parsed_target,
    sent_body,
)

LOOPBACK = "127.0.0.1"


@pytest.mark.parametrize(
    "url, sent",
    [
        ("https://example.com", "https://example.com/"),
        ("HTTPS://EXAMPLE.com:443/a/../b?x=%20", "https://example.com/a/../b?x=%20"),
        ("http://example.com:8080?x=1", "http://example.com:8080/?x=1"),
        ("https://bücher.example/ä?q=é", "https://xn--bcher-kva.example/%C3%A4?q=%C3%A9"),
        ("https://example.com/100%", "https://example.com/100%25"),
        ("https://[2606:4700::0001]:8443/", "https://[2606:4700::1]:8443/"),
        ("http://8.8.8.8/", "http://8.8.8.8/"),
        ("https://a_b.example.com/", "https://a_b.example.com/"),
    ],
)
def test_a_url_is_sent_in_one_form(url: str, sent: str) -> None:
    target = parsed_target(url)
    assert target.url == sent
    # The client reads it as we do.
    read = URL(target.url, encoded=True)
    assert (read.scheme, read.raw_host, read.port) == (target.scheme, target.host, target.port)


@pytest.mark.parametrize(
    "url, why",
    [
        (7, "must be a str"),
        ("", "must start with https://"),
        ("ftp://example.com/", "must start with https://"),
        ("file:///etc/passwd", "must start with https://"),
        ("gopher://example.com", "must start with https://"),
        ("//example.com/", "must start with https://"),
        ("javascript:alert(1)", "must start with https://"),
        ("https://", "not the name of a host"),
        ("https:///path", "not the name of a host"),
        ("https://user@example.com/", "user or a password"),
        ("https://user:hunter2@example.com/", "user or a password"),
        ("https://example.com@evil.example/", "user or a password"),
        ("https://example.com\\@evil.example/", "has a space"),
        ("https://example.com/\r\nx: y", "has a space"),
        ("https://exam ple.com/", "has a space"),
        ("https://example.com/\0", "has a space"),
        ("https://example.com/#top", "fragment"),
        ("https://example.com:0/", "not a port"),
        ("https://example.com:65536/", "not a port"),
        ("https://example.com:1e3/", "can't be read"),
        ("https://example.com:/", "can't be read"),
        ("https://example.com./", "not the name of a host"),
        ("https://.example.com/", "not the name of a host"),
        ("https://-a.example.com/", "not the name of a host"),
        (f"https://{'a' * 64}.com/", "not the name of a host"),
        ("https://ex%61mple.com/", "not the name of a host"),
        ("https://127.1/", "not an address"),
        ("https://127.0.1/", "not an address"),
        ("https://0177.0.0.1/", "not an address"),
        ("https://0x7f.0.0.1/", "not an address"),
        ("https://0x7f000001/", "not an address"),
        ("https://2130706433/", "not an address"),
        ("https://017700000001/", "not an address"),
        ("https://127.0.0.1.1/", "not an address"),
        ("https://example.1/", "not an address"),
        ("https://[::1/", "can't be read"),
        ("https://[::1%eth0]/", "not an IPv6 address"),
        ("https://[fe80::1%25eth0]/", "not an IPv6 address"),
        ("https://[127.0.0.1]/", "not an IPv6 address"),
        ("https://[::/96]/", "can't be read"),
        ("https://::1/", "can't be read"),
        (f"https://example.com/{'a' * 2048}", "2,048"),
        (f"https://example.com/{'é' * 1000}", "when it is quoted"),
        ("https://example.com/\ud800", "has a space"),
    ],
)
def test_a_url_that_is_wrong_is_refused_without_its_secrets(url: Any, why: str) -> None:
    with pytest.raises(BadArguments) as error:
        parsed_target(url)
    assert why in str(error.value) and "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/", "http://10.0.0.1/", "http://169.254.169.254/latest/meta-data/"),
        *("http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"),
        *("http://[64:ff9b::a9fe:a9fe]/", "http://[2002:7f00:1::]/", "http://[fd00:ec2::254]/"),
        *("http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/", "http://１２７.0.0.1/"),
        *("http://localhost/", "http://LOCALHOST/", "http://a.localhost/", "http://db.internal/"),
        *("http://printer.local/", "http://redis/", "http://ⓛocalhost/"),
    ],
)
def test_private_hosts_are_refused_unless_listed(url: str) -> None:
    with pytest.raises(BadArguments, match=r"list it in Callbacks\(allow="):
        Allowed().check(parsed_target(url))


@pytest.mark.parametrize("port", [22, 25, 81, 6379, 7999, 9001])
def test_only_the_usual_ports_are_allowed(port: int) -> None:
    with pytest.raises(BadArguments, match=f"port {port} is not allowed"):
        Allowed().check(parsed_target(f"http://example.com:{port}/"))
    Allowed([f"example.com:{port}"]).check(parsed_target(f"http://example.com:{port}/"))


@pytest.mark.parametrize(
    "entry, allowed, refused",
    [
        ("api.example.com", ["https://api.example.com/", "http://API.example.com:8000/"],
         ["https://example.com/", "https://x.api.example.com/", "https://api.example.com:9999/"]),
        ("*.example.com:8443", ["https://a.example.com:8443/", "https://a.b.example.com:8443/"],
         ["https://example.com:8443/", "https://a.example.com/", "https://evilexample.com:8443/"]),
        ("http://localhost:8000", ["http://localhost:8000/"],
         ["https://localhost:8000/", "http://localhost/", "http://127.0.0.1:8000/"]),
        ("127.0.0.1", ["http://127.0.0.1/", "http://[::ffff:127.0.0.1]/"], ["http://127.0.0.2/"]),
        ("http://127.0.0.1:9999", ["http://127.0.0.1:9999/"], ["http://127.0.0.1/"]),
        ("10.0.0.0/8", ["http://10.1.2.3/"], ["http://11.0.0.1/", "https://example.com/"]),
        ("[::1]:7777", ["http://[::1]:7777/"], ["http://[::1]/", "http://[::2]:7777/"]),
        ("bücher.example", ["https://bücher.example/", "https://xn--bcher-kva.example/"],
         ["https://bucher.example/"]),
    ],
)  # fmt: skip
def test_only_what_is_listed_is_allowed(entry: str, allowed: list[str], refused: list[str]) -> None:
    listed = Allowed([entry])
    for url in allowed:
        listed.check(parsed_target(url))
    for url in refused:
        with pytest.raises(BadArguments, match="not allowed"):
            listed.check(parsed_target(url))


def test_an_empty_list_allows_nothing() -> None:
    with pytest.raises(BadArguments, match="not allowed"):
        Allowed([]).check(parsed_target("https://example.com/"))


@pytest.mark.parametrize(
    "entry",
    ["", "https://", "example.com/path", "https://example.com/", "user@example.com", "ftp://x", "*",
     "*.", "a.*.com", "*.127.0.0.1", "10.0.0.1/8", "example.com:0", 7],
)  # fmt: skip
def test_an_entry_that_can_not_be_understood_is_refused(entry: Any) -> None:
    with pytest.raises(BadConfig, match="allow: "):
        Allowed([entry])
    with pytest.raises(BadConfig, match="must be a list"):
        Allowed("example.com")


def test_an_address_behind_a_name_is_judged_by_name_and_list() -> None:
    public, own = parsed_target("https://api.example.com/"), parsed_target("http://localhost/")
    assert Allowed().refusal(public, "8.8.8.8") is None
    assert Allowed(["api.example.com"]).refusal(public, "8.8.8.8") is None
    # A public name may not lead inside, even one that is listed: whoever owns its DNS could do it.
    assert Allowed().refusal(public, LOOPBACK)
    assert Allowed(["api.example.com"]).refusal(public, LOOPBACK)
    assert Allowed(["api.example.com", "127.0.0.0/8"]).refusal(public, LOOPBACK) is None
    assert Allowed(["api.example.com", "127.0.0.0/8"]).refusal(public, "::ffff:127.0.0.1") is None
    assert Allowed(["api.example.com", "10.0.0.0/8"]).refusal(public, LOOPBACK)
    # A private one may, but not to a metadata service.
    assert Allowed(["localhost"]).refusal(own, LOOPBACK) is None
    assert Allowed(["localhost"]).refusal(own, "::1") is None
    assert Allowed(["localhost"]).refusal(own, "169.254.169.254")
    assert Allowed(["localhost", "169.254.169.254"]).refusal(own, "169.254.169.254") is None
    assert Allowed(["localhost"]).refusal(own, "fe80::1%eth0")


def test_names_of_methods_are_checked() -> None:
    assert checked_method("put") == "PUT"
    for method in ("TRACE", "CONNECT", "OPTIONS", "", "PO ST", "GET\r\nx", 7):
        with pytest.raises(BadArguments, match="must be one of POST"):
            checked_method(method)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [*sorted(OURS), "Host", "Webhook-Id", "webhook-x", "Tickwheel-Attempt"]
)
def test_headers_of_ours_and_of_a_connection_can_not_be_set(name: str) -> None:
    with pytest.raises(BadArguments, match="can't be set"):
        checked_headers({name: "x"})


@pytest.mark.parametrize("name", ["", " ", "a b", "a:", "a\r\nb", "é", "a\0", "(a)", 7])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(BadArguments, match="not the name of a header"):
        checked_headers({name: "x"})


@pytest.mark.parametrize(
    "value", ["hunter2\r\nx: y", "hunter2\n", "hunter2\0", "hunter2é", 7, None]
)
def test_a_value_that_could_not_be_sent_is_refused_and_not_shown(value: Any) -> None:
    with pytest.raises(BadArguments, match="the value of x-a") as error:
        checked_headers({"X-A": value})
    assert "hunter2" not in str(error.value)


def test_headers_have_limits_and_lower_names() -> None:
    assert checked_headers({"X-A": " 1\t2 ", "Content-Type": "text/plain"}) == {
        "x-a": "1\t2",
        "content-type": "text/plain",
    }
    assert checked_headers(None) == {}
    for headers, why in [
        ({f"x-{i}": "" for i in range(65)}, "at most 64"),
        ({"x-a": "1", "X-A": "2"}, "twice"),
        ({"x-a": "v" * 16_384}, "more than 16,384 bytes"),
        ([("x-a", "1")], "must be a dict"),
    ]:
        with pytest.raises(BadArguments, match=why):
            checked_headers(headers)  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_bytes_are_sent_as_they_are(body: bytes) -> None:
    headers: dict[str, str] = {}
    assert sent_body(kept_body(body, headers)) == body
    assert headers == {}


@pytest.mark.parametrize(
    "body, sent, kind",
    [
        (None, b"", None),
        ("text é", "text é".encode(), None),
        ({"order": 42}, b'{"order":42}', "application/json"),
        ([1, None], b"[1,null]", "application/json"),
        (0, b"0", "application/json"),
        (bytearray(b"a"), b"a", None),
    ],
)
def test_text_is_sent_as_utf8_and_other_values_as_json(
    body: Any, sent: bytes, kind: str | None
) -> None:
    headers: dict[str, str] = {}
    assert sent_body(kept_body(body, headers)) == sent
    assert headers.get("content-type") == kind
    own = {"content-type": "application/vnd.shop+json"}
    kept_body(body, own)
    assert own == {"content-type": "application/vnd.shop+json"}


def test_a_body_that_is_too_large_or_no_data_is_refused() -> None:
    assert kept_body(b"x" * BODY_LIMIT, {}).text
    for body, why in [
        (b"x" * (BODY_LIMIT + 1), "262,145 bytes"),
        ({"a": object()}, "must be bytes"),
        ("\ud800", "surrogate"),
    ]:
        with pytest.raises(BadArguments, match=why):
            kept_body(body, {})


def test_a_listed_address_is_reached_by_its_own_scheme_and_port_only() -> None:
    """Whoever has the DNS of another listed name can point it at that address."""
    allowed = Allowed(["http://127.0.0.1:8000", "*.example.com"])
    assert allowed.refusal(parsed_target("http://127.0.0.1:8000/"), "127.0.0.1") is None
    for url in ("http://x.example.com:8500/", "https://x.example.com:8000/"):
        assert "loopback" in (allowed.refusal(parsed_target(url), "127.0.0.1") or "")
