"""Keys: how they are written, and what is done with them. The first one seals, all of them open.

No key appears in a repr, a message or a log; its id does.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Any

from tickwheel.errors import BadConfig, shown

KEY_BYTES = 32
_NONCE_BYTES = 12
_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}")


class KeyMissing(Exception):
    """A text was sealed with a key that is not here."""


class NotGenuine(Exception):
    """A text was not sealed with this key for this place, or was changed since."""


def new_key(id: str) -> str:
    """A new random key, to sign or to encrypt with: "2026-11:mZ0…". Keep it secret."""
    if not _ID.fullmatch(id):
        raise BadConfig(f"{shown(id)} can't be the id of a key: {_ID_WORDS}")
    return f"{id}:{base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}"


_ID_WORDS = "use up to 40 letters, digits, dots, dashes and underscores"


def read_keys(name: str, texts: Iterable[str]) -> dict[str, bytes]:
    """The keys by id, in this order. Raises BadConfig, without a word of a key."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise BadConfig(f"{name} must be a list of keys, each written id:base64")
    keys: dict[str, bytes] = {}
    for number, text in enumerate(texts, 1):
        id, colon, encoded = text.partition(":")
        if not colon or not _ID.fullmatch(id):
            raise BadConfig(f"{name}: key {number} must be written id:base64; in an id {_ID_WORDS}")
        if id in keys:
            raise BadConfig(f"{name}: two keys have the id {id!r}; give each key its own")
        keys[id] = _secret(f"{name}: the key {id!r}", encoded)
    return keys


def _secret(what: str, encoded: str) -> bytes:
    """As written by base64, openssl or Python: in either alphabet, with or without padding."""
    text = encoded.strip().rstrip("=").replace("-", "+").replace("_", "/")
    try:
        secret = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadConfig(f"{what} is not valid base64") from None
    if len(secret) != KEY_BYTES:
        raise BadConfig(f"{what} has {len(secret)} bytes; it must have {KEY_BYTES}")
    return secret


class Signer:
    """HMAC-SHA256."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._keys = keys
        self.id = next(iter(keys))
        self._first = keys[self.id]

    def sign(self, message: bytes) -> str:
        return _text(hmac.digest(self._first, message, "sha256"))

    def verify(self, id: str, message: bytes, mac: str) -> None:
        """Raises KeyMissing or NotGenuine."""
        key = self._keys.get(id)
        if key is None:
            raise KeyMissing
        expected = _text(hmac.digest(key, message, "sha256"))
        if not hmac.compare_digest(expected.encode(), mac.encode(errors="replace")):
            raise NotGenuine


class Cipher:
    """AES-256-GCM, with a random nonce in front of each text."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise BadConfig(
                f"encryption_keys need another package: pip install 'tickwheel[crypto]' ({error})"
            ) from None
        self._keys: dict[str, Any] = {id: AESGCM(key) for id, key in keys.items()}
        self._invalid: type[Exception] = InvalidTag
        self.id = next(iter(keys))
        self._first = self._keys[self.id]

    def encrypt(self, text: str, place: bytes) -> str:
        """`place` says where the text belongs; it can be decrypted for that place only."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _text(nonce + self._first.encrypt(nonce, text.encode(), place))

    def decrypt(self, id: str, text: str, place: bytes) -> str:
        """Raises KeyMissing or NotGenuine."""
        key = self._keys.get(id)
        if key is None:
            raise KeyMissing
        try:
            data = binascii.a2b_base64(text)
            plain: bytes = key.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place)
            return plain.decode()
        except (self._invalid, ValueError):
            raise NotGenuine from None


def _text(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()
