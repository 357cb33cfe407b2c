"""What a callback may ask for: URLs, hosts, methods, headers and bodies. Pure.

Checked when a job is made, and again when it runs. Messages show no secret: of a URL only its
host, of a header only its name, of a body only its size.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from tickwheel.callbacks.addresses import (
    Address,
    Network,
    allowed_by_name,
    network,
    refusal,
    unwrapped,
)
from tickwheel.errors import BadArguments, BadConfig, shown

URL_LIMIT = 2_048
BODY_LIMIT = 256 * 1024
HEADERS_LIMIT, HEADERS_BYTES = 64, 16 * 1024
METHODS = ("POST", "PUT", "PATCH", "DELETE", "GET", "HEAD")
PORTS = frozenset({80, 443, *range(8_000, 9_001)})
DEFAULT_PORTS = {"http": 80, "https": 443}

# Set by us, by the HTTP client, or for one connection only.
OURS = frozenset(
    {
        *("host", "content-length", "content-encoding", "transfer-encoding", "accept-encoding"),
        *("user-agent", "idempotency-key", "traceparent", "tracestate", "expect"),
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "upgrade", "http2-settings"),
    }
)
OUR_PREFIXES = ("webhook-", "tickwheel-")

_URL = re.compile(r"(?P<scheme>https?)://(?P<host>\[[^\]/?#]*\]|[^:/?#\[\]]*)(:(?P<port>[0-9]{1,5}))?"
                  r"(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?", re.I)  # fmt: skip
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"([0-9]+|0x[0-9a-f]*)")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# What may be written as it is in a path or a query.
_SAFE = "!$%&'()*+,-./:;=?@_~"
_OWN_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".intranet")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a callback goes."""

    scheme: str
    # In lower case; not ASCII names as punycode; IPv6 addresses without brackets.
    host: str
    port: int
    # Path and query, quoted.
    path: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    @property
    def place(self) -> str:
        """What messages and the breaker know it by."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def literal(self) -> Address | None:
        """The address, if the host is one."""
        found = network(self.host)
        return None if found is None else found.network_address


def parsed_target(url: str) -> Target:
    """The target of a URL. Raises BadArguments."""
    if not isinstance(url, str):
        raise BadArguments(f"url: must be a str, as 'https://…', not {type(url).__name__}")
    if len(url) > URL_LIMIT:
        raise BadArguments(f"url: has {len(url):,} characters, and may have {URL_LIMIT:,}")
    if not url.isprintable() or any(each in url for each in ' \\"<>^`{|}'):
        raise BadArguments('url: has a space, a control character or one of \\ " < > ^ ` { | }')
    if "#" in url:
        raise BadArguments("url: has a #fragment, which no server sees; leave it out")
    found = _URL.fullmatch(url)
    if found is None or "@" in found["host"]:
        raise BadArguments(f"url: {_what_is_wrong(url)}")
    scheme = found["scheme"].lower()
    port = int(found["port"] or DEFAULT_PORTS[scheme])
    if not 0 < port < 65_536:
        raise BadArguments(f"url: {port} is not a port")
    path = _quoted(found["path"] or "/")
    query = "" if found["query"] is None else f"?{_quoted(found['query'])}"
    target = Target(scheme, _host(found["host"]), port, f"{path}{query}")
    if len(target.url) > URL_LIMIT:
        raise BadArguments(f"url: has more than {URL_LIMIT:,} characters when it is quoted")
    return target


def _what_is_wrong(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    if not mark or scheme.lower() not in DEFAULT_PORTS:
        return "must start with https:// or http://"
    if "@" in re.split(r"[/?]", rest, maxsplit=1)[0]:
        return "has a user or a password before an @; use a header, as authorization"
    return "its host or port can't be read"


def _quoted(text: str) -> str:
    """As it is sent. What is quoted already stays; a `%` that quotes nothing is quoted."""
    text = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", text)
    try:
        return quote(text, safe=_SAFE)
    except UnicodeEncodeError:
        raise BadArguments("url: has a lone surrogate") from None


def _host(text: str) -> str:
    if text.startswith("["):
        found = network(text[1:-1])
        if found is None or found.version != 6 or "/" in text or "%" in text:
            raise BadArguments(f"url: {shown(text)} is not an IPv6 address")
        return str(found.network_address)
    try:
        # Also maps other forms of digits and dots to those of ASCII.
        name = text.lower() if text.isascii() else text.encode("idna").decode().lower()
    except UnicodeError:
        raise BadArguments(f"url: {shown(text)} is not the name of a host") from None
    labels = name.split(".")
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise BadArguments(f"url: {shown(text)} is not the name of a host")
    # Some programs read 127.1, 0x7f.1 and 2130706433 as addresses.
    if _NUMBER.fullmatch(labels[-1]):
        found = network(name)
        if found is None:
            raise BadArguments(f"url: {shown(text)} is not an address, as 192.0.2.1")
        return str(found.network_address)
    return name


# --- The hosts that are allowed


@dataclass(frozen=True, slots=True)
class _Listed:
    """One that is allowed."""

    scheme: str | None
    # A name, `*.` and a name, or a network.
    host: str | Network
    port: int | None

    def lists(self, target: Target) -> bool:
        return self._fits(target) and self._lists_host(target)

    def reaches(self, target: Target, ip: Address) -> bool:
        """Whether it lists this address, by itself or by its network, for such a target."""
        if isinstance(self.host, str) or self.host.version != ip.version:
            return False
        return ip in self.host and self._fits(target)

    def _fits(self, target: Target) -> bool:
        """Whether its scheme and port are those of the target."""
        if self.scheme not in (None, target.scheme):
            return False
        return target.port in PORTS if self.port is None else target.port == self.port

    def _lists_host(self, target: Target) -> bool:
        if not isinstance(self.host, str):
            literal = target.literal
            return literal is not None and unwrapped(literal) in self.host
        if self.host.startswith("*."):
            return target.host.endswith(self.host[1:])
        return target.host == self.host


class Allowed:
    """Which targets callbacks may have.

    Without a list: every public host, on the usual ports. With one: those that are listed, at their
    public addresses. An address that is not public must be listed too, by itself or by its network;
    or the name that stands for it must be one of one's own network: `localhost`, a name without a
    dot, or one that ends in .internal, .local or the like.
    """

    def __init__(self, allow: Sequence[str] | None = None) -> None:
        if isinstance(allow, str) or not (allow is None or isinstance(allow, Sequence)):
            raise BadConfig(f"allow={shown(allow)}: must be a list, as ['api.example.com']")
        self._entries = None if allow is None else [_entry(each) for each in allow]

    def check(self, target: Target) -> None:
        """Raises BadArguments if callbacks may not go there."""
        if self._entries is not None:
            if not any(entry.lists(target) for entry in self._entries):
                raise BadArguments(
                    f"url: {target.scheme}://{target.place} is not allowed; add it to "
                    "Callbacks(allow=[…])"
                )
        elif target.port not in PORTS:
            raise BadArguments(
                f"url: port {target.port} is not allowed, but 80, 443 and 8000 to 9000 are; list "
                "the host with its port in Callbacks(allow=[…])"
            )
        elif _is_own(target.host) and target.literal is None:
            raise BadArguments(f"url: {target.host} is a private name; {_LIST_IT}")
        if target.literal is not None and (why := self.refusal(target, target.literal)):
            raise BadArguments(f"url: {why}; {_LIST_IT}")

    def refusal(self, target: Target, address: str | Address) -> str | None:
        """Why a callback to this target may not connect to this address; None if it may."""
        why = refusal(address)
        if why is None:
            return None
        if "%" not in str(address) and why != "not an address":
            ip = unwrapped(address)
            if any(entry.reaches(target, ip) for entry in self._entries or ()):
                return None
            if self._entries is not None and _is_own(target.host) and allowed_by_name(ip):
                return None
        return f"{address} is {why}"


_LIST_IT = "to allow it, list it in Callbacks(allow=[…])"


def _is_own(host: str) -> bool:
    """Whether a name is one of one's own network: no public one can be like it."""
    return ("." not in host and ":" not in host) or host.endswith(_OWN_SUFFIXES)


def _entry(text: str) -> _Listed:
    if not isinstance(text, str):
        raise BadConfig(f"allow: {shown(text)} must be a str, as 'api.example.com'")
    if (found := network(text.strip("[]"))) is not None:
        return _Listed(None, found, None)
    scheme, mark, rest = text.rpartition("://")
    star = "*." if rest.startswith("*.") else ""
    try:
        target = parsed_target(f"{scheme or 'https'}://{rest.removeprefix('*.')}")
    except BadArguments as error:
        raise BadConfig(f"allow: {shown(text)}: {str(error).removeprefix('url: ')}") from None
    if target.path != "/" or rest.endswith("/"):
        raise BadConfig(f"allow: {shown(text)}: must be a host, without a path")
    named = re.search(r":([0-9]+)$", rest)
    host = target.host if target.literal is None else network(target.host)
    if host is None or (star and not isinstance(host, str)):
        raise BadConfig(f"allow: {shown(text)}: * stands for the first part of a name")
    if isinstance(host, str):
        host = f"{star}{host}"
    return _Listed(target.scheme if mark else None, host, target.port if named else None)


# --- Requests


def checked_method(method: str) -> str:
    known = method.upper() if isinstance(method, str) else ""
    if known not in METHODS:
        raise BadArguments(f"method={shown(method)}: must be one of {', '.join(METHODS)}")
    return known


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of the caller, names in lower case. Raises BadArguments, without their values."""
    if headers is not None and not isinstance(headers, Mapping):
        raise BadArguments("headers: must be a dict of strings")
    if len(headers or {}) > HEADERS_LIMIT:
        raise BadArguments(f"headers: {len(headers or {}):,} of them; at most {HEADERS_LIMIT}")
    checked: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise BadArguments(f"headers: {shown(name)} is not the name of a header")
        lower = name.lower()
        if lower in OURS or lower.startswith(OUR_PREFIXES):
            raise BadArguments(f"headers: {lower} can't be set: it is set for every callback")
        if lower in checked:
            raise BadArguments(f"headers: {lower} is there twice")
        checked[lower] = _header_value(lower, value)
    if sum(len(name) + len(value) for name, value in checked.items()) > HEADERS_BYTES:
        raise BadArguments(f"headers: have more than {HEADERS_BYTES:,} bytes")
    return checked


def _header_value(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadArguments(f"headers: the value of {name} must be a str")
    if not all(each == "\t" or " " <= each <= "~" for each in value):
        raise BadArguments(
            f"headers: the value of {name} has a line break, a control character or one that is "
            "not ASCII"
        )
    return str.__str__(value).strip(" \t")


@dataclass(frozen=True, slots=True)
class Body:
    """A body as a job keeps it: as text if it is text, or as base64."""

    text: str | None = None
    base64: str | None = None


def kept_body(body: Any, headers: dict[str, str]) -> Body:
    """The body of a call: bytes, text, or anything else as JSON, which sets the content type."""
    if body is None:
        return Body()
    if not isinstance(body, bytes | bytearray | memoryview | str):
        try:
            body = msgspec.json.encode(body)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
            raise BadArguments("body: must be bytes, a str or plain values for JSON") from None
        headers.setdefault("content-type", "application/json")
    try:
        raw = body.encode() if isinstance(body, str) else bytes(body)
    except UnicodeEncodeError:
        raise BadArguments("body: has a lone surrogate") from None
    if len(raw) > BODY_LIMIT:
        raise BadArguments(f"body: has {len(raw):,} bytes, and may have {BODY_LIMIT:,}")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return Body(base64=base64.b64encode(raw).decode())
    # Not every store keeps a NUL.
    return Body(base64=base64.b64encode(raw).decode()) if "\0" in text else Body(text=text)


def sent_body(body: Body) -> bytes:
    """What goes over the wire."""
    try:
        raw = base64.b64decode(body.base64, validate=True) if body.base64 is not None else b""
        raw = raw if body.text is None else body.text.encode()
    except ValueError:
        raise BadArguments("body: is damaged") from None
    if len(raw) > BODY_LIMIT:
        raise BadArguments(f"body: has {len(raw):,} bytes, and may have {BODY_LIMIT:,}")
    return raw
