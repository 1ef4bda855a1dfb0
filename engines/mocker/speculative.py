"""Speculative decoding: how many tokens one decode step yields."""

from __future__ import annotations

from math import isfinite
from random import Random

from pipeline import InvalidArgument

DRAFTS_MAX = 5
DEFAULT_ACCEPT_RATES = (0.85, 0.3)
"""Chance of each draft token, given that the ones before it were accepted; further ones are never."""


def accept_rates(drafts: int, text: str | None) -> tuple[float, ...]:
    """The rates of so many drafts, from a comma-separated text; missing ones are 0, further ones are left out.

    Raises InvalidArgument for a number of drafts outside 1 to 5, and for a rate that is no number from 0 to 1.
    """
    if not 1 <= drafts <= DRAFTS_MAX:
        raise InvalidArgument(f"must be from 1 to {DRAFTS_MAX}, got {drafts}", field="aic_nextn")
    rates = DEFAULT_ACCEPT_RATES if text is None or not text.strip() else tuple(map(_rate, text.split(",")))
    return (rates + (0.0,) * drafts)[:drafts]


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = float("nan")
    if not isfinite(rate) or not 0 <= rate <= 1:
        raise InvalidArgument(
            f"each rate is a number from 0 to 1, got {text.strip()!r}", field="aic_nextn_accept_rates"
        )
    return rate


class Burst:
    """Draws how many tokens a step yields: one, and one more for each draft accepted in a row.

    Source: dynamo lib/mocker/src/common/speculative.rs; there the random numbers are others.
    """

    __slots__ = ("_rates", "_rng")

    def __init__(self, rates: tuple[float, ...], rng: Random) -> None:
        self._rates = rates
        self._rng = rng

    def draw(self, remaining_tokens: int) -> int:
        """At most what remains of the output."""
        count = 1
        for rate in self._rates:
            if self._rng.random() >= rate:
                break
            count += 1
        return min(count, remaining_tokens)
