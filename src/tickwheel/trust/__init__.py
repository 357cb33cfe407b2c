"""Trust in stored jobs, for stores that others can write to or read: signatures and encryption."""

from tickwheel.trust.keys import new_key
from tickwheel.trust.seals import Trust, trust_of
from tickwheel.trust.store import seal_all, sealed, unsealed

__all__ = ["Trust", "new_key", "seal_all", "sealed", "trust_of", "unsealed"]
