"""Retry: how long to wait before what has failed is tried again."""

from __future__ import annotations

from attrs import frozen


@frozen
class Retry:
    """How long to wait before another try."""

    first_s: float = 0.5
    """Seconds after the first failure."""
    longest_s: float = 15.0
    """Seconds after later ones at most; each wait is twice as long as the one before."""
    steady_s: float = 30.0
    """What served so long makes the next wait the first one again."""

    def after(self, waited_s: float, served_s: float) -> float:
        """Return the wait after a try that failed, or after what has ended; `waited_s` is the wait before it.

        `served_s` is how long it has served; 0 for a try that failed, however long that took.
        """
        if waited_s == 0 or served_s >= self.steady_s:
            return self.first_s
        return min(2 * waited_s, self.longest_s)
