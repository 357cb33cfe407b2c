"""Quantiles and shares of what was counted in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest


def quantile(bounds: Sequence[int], buckets: Sequence[int], share: float) -> float | None:
    """The value that this share of all is not above; None if there is nothing.

    An estimate: within a bucket, values are taken as evenly spread between its bounds (the first
    begins at 0), so the true one is in the same bucket. What is above the last bound counts as
    that bound.
    """
    wanted = share * sum(buckets)
    below, lower = 0, 0
    for bound, count in zip(bounds, buckets, strict=False):
        if count and below + count >= wanted:
            return round(lower + (bound - lower) * (wanted - below) / count, 3)
        below, lower = below + count, bound
    return float(bounds[-1]) if sum(buckets) else None


def share_within(bounds: Sequence[int], buckets: Sequence[int], limit: int) -> float | None:
    """Which share is not above the limit; None if there is nothing.

    Exact if the limit is one of the bounds; an estimate otherwise, as for `quantile`. Of what is
    above the last bound, nothing is.
    """
    within, lower = 0.0, 0
    for bound, count in zip_longest(bounds, buckets[: len(bounds)], fillvalue=0):
        if limit < bound:
            within += count * (limit - lower) / (bound - lower)
            break
        within, lower = within + count, bound
    total = sum(buckets)
    return within / total if total else None
