"""Store URLs, parsed alike for every store. No error shows a password.

    scheme://user:password@host:port,host:port/path?option=value&option=value

Special characters in a password must be quoted (%40 for @). If they are not, a part of the password
ends up as a port, a path or an option: such a URL is refused, and no part of it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from tickwheel.duration import FARTHEST_MS, duration_ms, duration_text
from tickwheel.errors import BadConfig, BadTime, did_you_mean
from tickwheel.masking import QUOTE_LOGIN

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The three parts of a URL, still quoted. The scheme is in lower case."""

    scheme: str
    # Between the `://` and the question mark: login, hosts and path.
    location: str = field(repr=False)
    query: str = field(repr=False)

    @classmethod
    def of(cls, url: str) -> StoreUrl:
        scheme, _, rest = url.partition("://")
        location, _, query = rest.partition("?")
        return cls(scheme.lower(), location, query)

    @property
    def file(self) -> str:
        """The path in a URL without a host: three slashes for a relative one, four for an absolute
        one."""
        return unquote(self.location.removeprefix("/"))

    def server(self, *, port: int, example: str) -> ServerAddress:
        """Where to connect, as whom, and the path. `port` is the default."""
        authority, _, path = self.location.partition("/")
        login, _, hosts = authority.rpartition("@")
        user, _, password = login.partition(":")
        found = [_host(each, port) for each in hosts.split(",")]
        known = [each for each in found if each is not None]
        good = len(known) == len(found)
        if "@" in path or (not good and "@" in self.query):
            raise unreadable()
        if not good:
            raise BadConfig(
                "the store URL must name a host, and a port from 1 to 65535 if any: "
                f"write {example}"
            )
        return ServerAddress(known, unquote(user), unquote(password), unquote(path))


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The location in the URL of a server. Missing parts are empty."""

    hosts: list[Host]
    # A user without a password may be a token.
    user: str = field(repr=False)
    password: str = field(repr=False)
    path: str


class UrlOptions:
    """The options after the question mark. Each is checked when it is read."""

    def __init__(self, query: str, known: Sequence[str], *, others: str = "") -> None:
        """`others` describes options that are allowed but not ours, for error messages."""
        self._query = query
        self._known = known
        self._others = others
        self.given: Mapping[str, str] = dict(parse_qsl(query, keep_blank_values=True))
        for name in self.given:
            if name not in known and not others:
                raise self.unknown(name)

    @property
    def others(self) -> list[str]:
        """The options that are not ours, as `name=value`, still quoted."""
        parts = [part for part in self._query.split("&") if part]
        return [part for part in parts if unquote(part.partition("=")[0]) not in self._known]

    def one_of(self, name: str, default: str, *further: str) -> str:
        value = self.given.get(name, default)
        if value not in (default, *further):
            known = " or ".join(filter(None, (default, *further)))
            raise self.wrong(name, f"must be {known}")
        return value

    def number(self, name: str, default: int, *, least: int, most: int) -> int:
        text = self.given.get(name, str(default))
        if not text.isdecimal() or not least <= int(text) <= most:
            raise self.wrong(name, f"must be a number from {least} to {most}")
        return int(text)

    def duration_ms(
        self, name: str, default: str, *, least_ms: int = 0, most_ms: int = FARTHEST_MS
    ) -> int:
        text = self.given.get(name, default)
        try:
            ms = duration_ms(text)
        except BadTime as error:
            raise self.wrong(name, str(error)) from None
        if not least_ms <= ms <= most_ms:
            least, most = duration_text(least_ms), duration_text(most_ms)
            raise self.wrong(name, f"must be from {least} to {most}")
        return ms

    def matching(self, name: str, default: str, pattern: re.Pattern[str], rule: str) -> str:
        text = self.given.get(name, default)
        if not pattern.fullmatch(text):
            raise self.wrong(name, f"must be {rule}")
        return text

    def wrong(self, name: str, problem: str) -> BadConfig:
        if self._cut_off:
            return unreadable()
        return BadConfig(f"{name}={self.given.get(name, '')} in the store URL: {problem}")

    def unknown(self, name: str) -> BadConfig:
        if self._cut_off:
            return unreadable()
        known = ", ".join(self._known) + (f", and {self._others}" if self._others else "")
        return BadConfig(
            f"unknown option {name!r} in the store URL: the options are {known}"
            f"{did_you_mean(name, self._known)}"
        )

    @property
    def _cut_off(self) -> bool:
        """Whether the question mark may be part of a password, because an @ comes after it."""
        return "@" in self._query


def unreadable(example: str = "") -> BadConfig:
    """For a URL that was probably split in the middle of its password."""
    write = f"write {example}; " if example else ""
    return BadConfig(f"the store URL can't be read: {write}{QUOTE_LOGIN}")


def _host(text: str, default_port: int) -> Host | None:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        return None
    return host.strip("[]"), int(port)
