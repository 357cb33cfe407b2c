"""An app's keys: from its code, or else from the environment, when they are first needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, TypeAlias

from tickwheel.config import from_environment, setting
from tickwheel.trust import Trust, trust_of

# Whether a job without a signature is refused, or run: for the time until all are signed.
SigningMode: TypeAlias = Literal["require", "prefer"]


class Sealing:
    """What the code says of keys; None leaves it to the environment. Raises BadConfig."""

    def __init__(
        self,
        signing_keys: Sequence[str] | None = None,
        encryption_keys: Sequence[str] | None = None,
        mode: SigningMode | None = None,
    ) -> None:
        trust_of(signing_keys or (), encryption_keys or (), mode or "require")
        self._signing_keys = signing_keys
        self._encryption_keys = encryption_keys
        self._mode = mode

    @cached_property
    def trust(self) -> Trust | None:
        """What the keys can do; None without any."""
        signing, encryption = self._signing_keys, self._encryption_keys
        if signing is None:
            signing = from_environment("signing_keys")
        if encryption is None:
            encryption = from_environment("encryption_keys")
        if not signing and not encryption:
            return None
        return trust_of(signing, encryption, self._mode or setting("signing"))
