"""Sign and verify HTTP requests by Standard Webhooks 1.0: `webhooks.verify(body, headers, key)`.

A key is a text. Its prefix says what it is for:

    whsec_…    a shared secret: signs and verifies (`v1`, HMAC-SHA256)
    whsk_…     a private key: signs and verifies (`v1a`, ed25519)
    whpk_…     the public key that belongs to it: only verifies

Wherever a key is taken, so is a list of keys: a request is signed with each of them, and one that
is signed with any of them is genuine. To replace a key, let both sides have both for a while.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tickwheel.clock import S_NS, SystemClock
from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import BadArguments, BadConfig, SignatureError, shown

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
TOLERANCE = "5m"
# Longer values of these headers are no signatures of anyone.
ID_LIMIT, SIGNATURE_LIMIT = 256, 8_192
# How many bytes a shared secret has, by the standard; ours have 32.
SECRET_BYTES = range(24, 65)

# Without a `.`, which separates an id from what follows it in the text that is signed.
_ID = re.compile(r"[!-\-/-~]+")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


def sign(
    body: bytes, *, id: str, keys: str | Sequence[str], timestamp: int | None = None
) -> dict[str, str]:
    """The three headers that sign this body, of a request with this id. `timestamp` is when it is
    sent, in seconds since the epoch; by default now."""
    if not isinstance(id, str) or len(id) > ID_LIMIT or not _ID.fullmatch(id):
        raise BadArguments(
            f"id={shown(id)}: must be 1 to {ID_LIMIT} visible ASCII characters, without a '.'"
        )
    signing = [key for key in _keys(keys) if key.sign is not None]
    if not signing:
        raise BadConfig("only public keys were given; to sign, use a whsec_… or whsk_… key")
    when = str(_now_s() if timestamp is None else int(timestamp))
    content = _content(id, when, body)
    signatures = (f"{key.version},{_text(key.sign(content))}" for key in signing if key.sign)
    return {ID: id, TIMESTAMP: when, SIGNATURE: " ".join(signatures)}


def verify(
    body: bytes,
    headers: Headers,
    keys: str | Sequence[str],
    *,
    tolerance: Duration = TOLERANCE,
    now: float | None = None,
) -> str:
    """Check that a request is genuine; returns its id, which is the same when it is sent again.

    `body` is what came over the wire: JSON that was decoded and encoded again differs. `headers`
    are those of the request, in any case of letters. A request that was sent more than `tolerance`
    before or after `now`, in seconds since the epoch, is refused. Raises SignatureError for
    everything that is wrong with the request, and nothing else.
    """
    known, within_s = _keys(keys), duration_ms(tolerance) / 1000
    id, when, given = _three(headers)
    if not _ID.fullmatch(id) or len(id) > ID_LIMIT:
        raise SignatureError(f"the header {ID} is malformed")
    if not _TIMESTAMP.fullmatch(when):
        raise SignatureError(f"the header {TIMESTAMP} is not a number of seconds")
    ahead_s = int(when) - (_now_s() if now is None else now)
    if not abs(ahead_s) <= within_s:
        way = "future" if ahead_s > 0 else "past"
        raise SignatureError(f"the request was sent too far in the {way}")
    content, signatures = _content(id, when, body), _signatures(given)
    if not any(
        key.version == version and key.fits(content, signature)
        for version, signature in signatures
        for key in known
    ):
        raise SignatureError("the request is not signed with a key that is known here")
    return id


class Headers(Protocol):
    """Headers of a request, as frameworks have them: a dict, or something like one."""

    def items(self) -> Iterable[tuple[str, str]]: ...


class RecentIds:
    """The ids of recent requests, in memory: recognises one that is sent, or replayed, again.

        if not recent.add(webhooks.verify(body, headers, key)):
            return 200  # it was handled already

    It knows the last `limit` ids of the last `window`, in this process. With several processes, or
    if a repeat after a restart does harm, keep the ids in your database.
    """

    def __init__(self, limit: int = 100_000, window: Duration = "1d") -> None:
        if not isinstance(limit, int) or limit < 1:
            raise BadConfig(f"limit={shown(limit)}: must be at least 1")
        self._limit = limit
        self._window_s = duration_ms(window) / 1000
        self._seen: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, id: str, *, now: float | None = None) -> bool:
        """Remember an id; False if it is known already."""
        now_s = _now_s() if now is None else now
        while self._seen and next(iter(self._seen.values())) <= now_s - self._window_s:
            self._seen.popitem(last=False)
        if id in self._seen:
            return False
        self._seen[id] = now_s
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
        return True

    def forget(self, id: str) -> None:
        """The request could not be handled: let it come again."""
        self._seen.pop(id, None)


def new_key() -> str:
    """A new shared secret, `whsec_…`."""
    return f"whsec_{_text(secrets.token_bytes(32))}"


def new_key_pair() -> tuple[str, str]:
    """A new private key, `whsk_…`, and the public key that belongs to it, `whpk_…`."""
    private = _ed25519().Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    return f"whsk_{_text(private.private_bytes_raw() + public)}", f"whpk_{_text(public)}"


def check_keys(keys: str | Sequence[str], *, to_sign: bool = False) -> list[str]:
    """The keys as a list, checked. Raises BadConfig, which shows none of them."""
    known = _keys(keys)
    if to_sign and any(key.sign is None for key in known):
        raise BadConfig("a whpk_… key only verifies; to sign, use a whsec_… or whsk_… key")
    return [keys] if isinstance(keys, str) else list(keys)


# --- Keys


@dataclass(frozen=True, slots=True, repr=False)
class _SigningKey:
    version: str
    # None: a public key.
    sign: Callable[[bytes], bytes] | None
    fits: Callable[[bytes, bytes], bool]


def _keys(keys: str | Sequence[str]) -> list[_SigningKey]:
    given = [keys] if isinstance(keys, str) else keys
    if not isinstance(given, Sequence) or not given or not all(isinstance(k, str) for k in given):
        raise BadConfig("keys: must be a key, whsec_…, or a list of keys")
    return [_key(each) for each in given]


@lru_cache(maxsize=1024)
def _key(text: str) -> _SigningKey:
    prefix, _, rest = text.partition("_")
    try:
        # Some write it without padding.
        raw = base64.b64decode(rest + "=" * (-len(rest) % 4), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if prefix == "whsec" and len(raw) in SECRET_BYTES:
        return _shared(raw)
    # A private key may be written with its public key behind it.
    if prefix == "whsk" and len(raw) in (32, 64):
        return _private(raw)
    if prefix == "whpk" and len(raw) == 32:
        return _public(raw)
    raise BadConfig(
        "a key must be whsec_ and 24 to 64 bytes as base64, or whsk_ or whpk_ and an ed25519 key; "
        "webhooks.new_key() makes one"
    )


def _shared(secret: bytes) -> _SigningKey:
    def sign(content: bytes) -> bytes:
        return hmac.digest(secret, content, hashlib.sha256)

    return _SigningKey("v1", sign, lambda content, given: hmac.compare_digest(sign(content), given))


def _private(raw: bytes) -> _SigningKey:
    private = _ed25519().Ed25519PrivateKey.from_private_bytes(raw[:32])
    public = private.public_key().public_bytes_raw()
    if raw[32:] not in (b"", public):
        raise BadConfig("a whsk_… key is damaged: its two halves don't belong together")
    return _SigningKey("v1a", private.sign, _public(public).fits)


def _public(raw: bytes) -> _SigningKey:
    public = _ed25519().Ed25519PublicKey.from_public_bytes(raw)

    def fits(content: bytes, given: bytes) -> bool:
        try:
            public.verify(given, content)
        except Exception:  # also what the library can't load as a signature
            return False
        return True

    return _SigningKey("v1a", None, fits)


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise BadConfig(
            "whsk_… and whpk_… keys need cryptography: pip install 'tickwheel[ed25519]'"
        ) from None
    return ed25519


# --- Parts of a request


def _three(headers: Headers) -> tuple[str, str, str]:
    """The values of the three headers."""
    if not callable(getattr(headers, "items", None)):
        raise BadArguments(
            f"headers: must be the headers of the request, a dict of strings, not "
            f"{type(headers).__name__}"
        )
    found: dict[str, str] = {}
    for name, value in headers.items():
        if isinstance(name, str) and isinstance(value, str) and name.lower().startswith("webhook-"):
            if name.lower() in found:
                raise SignatureError(f"the header {name.lower()} is there twice")
            found[name.lower()] = value.strip()
    for name in (ID, TIMESTAMP, SIGNATURE):
        if not found.get(name):
            raise SignatureError(f"the header {name} is missing")
    return found[ID], found[TIMESTAMP], found[SIGNATURE]


def _signatures(header: str) -> list[tuple[str, bytes]]:
    """Versions and signatures; those that nobody could have made are left out."""
    if len(header) > SIGNATURE_LIMIT:
        raise SignatureError(f"the header {SIGNATURE} is too long")
    found = []
    for part in header.split(" "):
        version, _, text = part.partition(",")
        try:
            found.append((version, base64.b64decode(text, validate=True)))
        except ValueError:
            continue
    return found


def _content(id: str, when: str, body: bytes) -> bytes:
    if not isinstance(body, bytes | bytearray | memoryview):
        raise BadArguments(
            f"body: must be bytes, as they came over the wire, not {type(body).__name__}"
        )
    return b"%s.%s.%s" % (id.encode(), when.encode(), body)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _now_s() -> int:
    return SystemClock.now_ns() // S_NS
