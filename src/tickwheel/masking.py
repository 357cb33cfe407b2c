"""Masks passwords and tokens in URLs, drivers' messages and arguments, wherever they are shown.

Anything not known to be harmless is masked. An unquoted password may contain any character, so a
login extends to the last `@`, wherever that is.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"
# For a URL with an `@` in the wrong place.
QUOTE_LOGIN = "in a user name or a password write %40 for @, %2F for /, %3F for ? and %5B for ["

# Options whose values may be shown. All others are masked, names included: what looks like a name
# may be part of a password that contains an `&`.
_HARMLESS = {
    *("ahead", "cluster", "db", "durability", "eviction", "namespace", "pool", "replicas"),
    *("schema", "shards", "sync", "timeout"),
    *("application_name", "connect_timeout", "dbname", "host", "hostaddr", "passfile", "port"),
    *("sslmode", "target_session_attrs", "user"),
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# A file name or a word: it can't contain a password.
_PLAIN = re.compile(r"[\w./\\~ -]*")
_WORD = re.compile(r"[\w.%~-]*")
_HOST = re.compile(r"(\[[\w:.%]+\]|[\w.%~-]*)(:\d{0,5})?")
_VALUE = re.compile(r"[\w.,:/~-]*")
# What begins like the text of an API key, also if it is mistyped or broken by spaces: its id is no
# secret, and all after it may be.
_KEY = re.compile(r"(tw_[0-9a-f]+_)\S*\w(?:\s+[0-9a-f]{8,}\w*)*", re.I)
_IN_TEXT = re.compile(r"[^\s'\"(]*://\S+|\S+:\S*@\S+|\w*(?:pass|pwd|token)\w*=\S+", re.I)
# In other URLs, a user without a password may be a token or a password.
_USER_IS_NO_SECRET = ("postgresql", "postgres")


def masked(url: str) -> str:
    """A store URL, even a mistyped one, without its secrets."""
    found = _SCHEME.match(url)
    if found is None:
        return url if _PLAIN.fullmatch(url) else MASK
    scheme, rest = found[1].lower(), url[found.end() :]
    if scheme in ("sqlite", "nats+embedded") and rest.startswith("/"):
        location, mark, query = rest.partition("?")
    else:
        login, at, rest = rest.rpartition("@")
        server, mark, query = rest.partition("?")
        location = f"{_login(scheme, login)}{at}{_server(server)}"
    return f"{found[0]}{location}{mark}{_query(query)}"


def scrubbed(text: str, *secrets: str | None) -> str:
    """A message of a driver or a shell, without these secrets and without those of URLs and API
    keys in it."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for spelling in (secret, quote(secret), quote(secret, safe=""), repr(secret)[1:-1]):
            text = text.replace(spelling, MASK)
    text = without_keys(text)
    return _IN_TEXT.sub(lambda found: masked(found[0]), text)


def without_keys(text: str) -> str:
    """A text without the secrets of API keys in it."""
    return _KEY.sub(rf"\1{MASK}", text)


def _login(scheme: str, login: str) -> str:
    user, colon, password = login.partition(":")
    shown = bool(password) or scheme in _USER_IS_NO_SECRET
    user = user if shown and _WORD.fullmatch(user) else MASK if login else ""
    return f"{user}{colon}{MASK}" if password else user


def _server(text: str) -> str:
    """Hosts and path; anything else may be part of a password and is masked."""
    hosts, slash, path = text.partition("/")
    fit = all(map(_HOST.fullmatch, hosts.split(",")))
    return f"{hosts if fit else MASK}{slash}{path if _WORD.fullmatch(path) else MASK}"


def _query(query: str) -> str:
    return "&".join(part if _harmless(part) else MASK for part in query.split("&")) if query else ""


def _harmless(part: str) -> bool:
    name, _, value = part.partition("=")
    return unquote(name) in _HARMLESS and bool(_VALUE.fullmatch(unquote(value)))


# --- Arguments of jobs

_SECRET_NAME = re.compile(
    r"(?:^|[-_])(?:auth|authorization|cookie|key|apikey|passw(?:or)?d|secret|signature|token)s?$"
    r"|authorization|cookie|secret|password|token|signature|credential",
    re.I,
)
# The task whose body nobody but the receiver should see.
CALLBACK_TASK = "http.call"


def is_secret_name(name: str) -> bool:
    """Whether a header, or the like, of this name holds a secret: `authorization`, `x-api-key`."""
    return _SECRET_NAME.search(name) is not None


def shown_arguments(task: str, arguments: Any) -> Any:
    """A job's arguments, as JSON values, as people may see them: secrets under `headers` are
    masked, and of a callback also its body and the queries of its URLs."""
    if not isinstance(arguments, dict):
        return arguments
    shown = dict(arguments)
    if isinstance(shown.get("headers"), dict):
        shown["headers"] = {
            name: MASK if is_secret_name(name) else value
            for name, value in shown["headers"].items()
        }
    if task == CALLBACK_TASK:
        for name in ("url", "on_done", "on_dead"):
            if isinstance(shown.get(name), str):
                head, mark, _ = shown[name].partition("?")
                shown[name] = f"{head}{mark}{MASK}" if mark else head
        for name in ("body", "body_base64"):
            if shown.get(name) is not None:
                shown[name] = f"<{len(str(shown[name])):,} characters>"
    return shown
