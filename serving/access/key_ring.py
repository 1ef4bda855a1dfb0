"""KeyRing: the valid keys, and how much of its rates each has used; Bucket: one such rate."""

from __future__ import annotations

from collections.abc import Sequence
from hmac import compare_digest
from math import ceil

from attrs import define, field

from pipeline.errors import ExceededLimit

from .keys import LONGEST_KEY, ApiKey, digest_of

RATES = ("requests_per_minute", "tokens_per_minute")
_MINUTE_S = 60.0


@define(eq=False)
class HeldKey:
    """A valid key with its rates; None is any rate."""

    key: ApiKey
    requests: Bucket | None
    tokens: Bucket | None

    def admit(self, now_s: float) -> TooFast | None:
        """Count a request. If the key has used up a rate, count nothing and return that rate.

        The tokens of a request are known when it is over, so a request is taken while any are left.
        """
        if self.requests is not None and (wait_s := self.requests.wait_s(now_s, 1.0)) > 0:
            return TooFast("requests_per_minute", self.requests.used(now_s) + 1, self.requests.per_minute, wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(now_s, 1.0)) > 0:
            return TooFast("tokens_per_minute", self.tokens.used(now_s) + 1, self.tokens.per_minute, wait_s)
        if self.requests is not None:
            self.requests.take(now_s, 1.0)
        return None

    def spend(self, now_s: float, tokens: int) -> None:
        """Count the tokens of a request that is over, prompt and answer."""
        if self.tokens is not None:
            self.tokens.take(now_s, tokens)


@define
class TooFast:
    """A rate that is used up."""

    name: str
    """Field of the key."""
    value: float
    """What the request would have used."""
    threshold: float
    wait_s: float
    """Seconds until there is room."""

    @property
    def exceeded(self) -> ExceededLimit:
        return ExceededLimit(self.name, round(self.value, 3), self.threshold)

    @property
    def retry_after_s(self) -> int:
        """`wait_s` rounded up to whole seconds."""
        return ceil(self.wait_s)


class KeyRing:
    """Finds the valid key that a client sent. Not thread-safe."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._held: dict[bytes, HeldKey] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Make these keys the only valid ones. A key that keeps its name keeps the used part of its rates.

        Running requests go on with the key they began with.
        """
        former = {held.key.name: held for held in self._held.values()}
        self._held = {key.digest: _held(key, former.get(key.name)) for key in keys}

    def find(self, sent: bytes) -> HeldKey | None:
        """Return the valid key that a client sent, None for a wrong one. `sent` is empty if it sent none.

        No key and a wrong one take the same steps. The look-up uses the hash, which a client cannot choose, so its
        duration reveals nothing about the valid keys.
        """
        digest = digest_of(sent[:LONGEST_KEY])
        held = self._held.get(digest)
        if not compare_digest(digest if held is None else held.key.digest, digest):
            return None
        return held if len(sent) <= LONGEST_KEY else None


def _held(key: ApiKey, former: HeldKey | None) -> HeldKey:
    requests, tokens = (None, None) if former is None else (former.requests, former.tokens)
    return HeldKey(key, _bucket(key.requests_per_minute, requests), _bucket(key.tokens_per_minute, tokens))


def _bucket(per_minute: float | None, former: Bucket | None) -> Bucket | None:
    if per_minute is None:
        return None
    if former is None:
        return Bucket(per_minute)
    former.set_rate(per_minute)  # the same bucket: running requests still spend from it
    return former


@define
class Bucket:
    """A token bucket, filled evenly. Times are of a monotonic clock; one before the last counts as the last."""

    per_minute: float
    """The rate, and what a full bucket holds."""
    _level: float = field(default=-1.0, init=False)
    _at_s: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self._level = self.per_minute

    def used(self, now_s: float) -> float:
        """Return the used part of a minute's worth; more than `per_minute` while the bucket is in debt."""
        passed_s = max(now_s - self._at_s, 0.0)
        self._level = min(self._level + passed_s * self.per_minute / _MINUTE_S, self.per_minute)
        self._at_s = max(now_s, self._at_s)
        return self.per_minute - self._level

    def wait_s(self, now_s: float, amount: float) -> float:
        """Return the seconds until the bucket holds `amount`, 0 if it does."""
        left = self.per_minute - self.used(now_s)
        return max(amount - left, 0.0) * _MINUTE_S / self.per_minute

    def take(self, now_s: float, amount: float) -> None:
        """Take `amount`, even more than the bucket holds: the debt is filled first."""
        self.used(now_s)
        self._level -= amount

    def set_rate(self, per_minute: float) -> None:
        """Change the rate. The used share of a minute stays the same."""
        self._level *= per_minute / self.per_minute
        self.per_minute = per_minute
