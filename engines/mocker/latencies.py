"""Latencies: how long the requests of one rank waited for their tokens, as an engine's own histograms count it.

Source: dynamo lib/llm/src/mocker/metrics.rs, NativeRequestTiming. Other than there, the times are those of the passes,
not of the reader, and each choice of a request counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable
from collections.abc import Sequence as Items

from .plan import Pass
from .sequence import Sequence


class Histogram:
    """How many values fell between which bounds; a bound belongs to the values below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Items[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Latencies:
    """Three histograms in seconds: to the first token, from token to token, and of whole requests.

    A request that ends early has the tokens it was told of and no whole; one for no tokens is not measured. The tokens
    of a burst share the time since the one before it.
    """

    def __init__(self, first_bounds: Items[float], gap_bounds: Items[float], whole_bounds: Items[float]) -> None:
        self.first_token = Histogram(first_bounds)
        self.token_gap = Histogram(gap_bounds)
        self.whole = Histogram(whole_bounds)
        self.finished = 0
        """Requests that came to their end."""

    def begin(self, sequences: Iterable[Sequence], now_s: float) -> None:
        """Requests have come, and wait from now on."""
        for sequence in sequences:
            sequence.begun_s = now_s

    def saw(self, done: Pass, live: Container[Sequence], now_s: float) -> None:
        """The time of a pass is over: what it gave to the sequences that are still waited for is told now."""
        gaps: dict[float, int] = {}
        for sequence in done.emitted:
            if sequence not in live:
                continue
            last_s, sequence.told_s = sequence.told_s, now_s
            if last_s is None:
                if sequence.begun_s is not None:
                    self.first_token.observe(now_s - sequence.begun_s)
            elif sequence.new_tokens == 1:  # nearly all of them, since the same pass
                gaps[last_s] = gaps.get(last_s, 0) + 1
            else:
                self.token_gap.observe((now_s - last_s) / sequence.new_tokens, sequence.new_tokens)
        for last_s, count in gaps.items():
            self.token_gap.observe(now_s - last_s, count)
        for sequence in done.finished:
            if sequence in live and sequence.begun_s is not None:
                self.finished += 1
                self.whole.observe(now_s - sequence.begun_s)
