"""Latencies: what a rank measures of its requests, as histograms that engines show under names of their own."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Container, Iterable
from collections.abc import Sequence as Items
from operator import sub

from .scheduling import Sequence, StepResult


class Histogram:
    """Counts of values by bounds; a bound is counted with the values below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Items[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Iterable[float], times: int) -> None:
        """Observe each of the values that often."""
        bounds, counts, total = self.bounds, self.counts, self.sum
        for value in values:
            counts[bisect_left(bounds, value)] += times
            total += value * times
        self.sum = total


class Latencies:
    """Three histograms in seconds, as engines have them: to the first token, token to token, and of whole requests.

    A request that ends early counts with the tokens it has read, and not as a whole; one for no tokens is not measured.
    The tokens of a burst share the time since the token before it. Source: dynamo lib/llm/src/mocker/metrics.rs,
    NativeRequestTiming. Other than there, the times are those of the steps, not of the reader, and each choice counts.
    """

    def __init__(self, first_bounds: Items[float], gap_bounds: Items[float], whole_bounds: Items[float]) -> None:
        self.first_token = Histogram(first_bounds)
        self.token_gap = Histogram(gap_bounds)
        self.whole = Histogram(whole_bounds)
        self.finished = 0
        """Requests that finished."""

    def begin(self, sequences: Iterable[Sequence], now_s: float) -> None:
        """Measure these requests from now on."""
        for sequence in sequences:
            sequence.begun_s = now_s

    def observe_step(self, done: StepResult, live: Container[Sequence], now_s: float) -> None:
        """Measure the output of a step, delivered now, to sequences with a reader."""
        gaps: dict[float, int] = {}
        for sequence in done.emitted:
            if sequence not in live:
                continue
            last_s, sequence.last_token_s = sequence.last_token_s, now_s
            if last_s is None:
                if sequence.begun_s is not None:
                    self.first_token.observe(now_s - sequence.begun_s)
            elif sequence.new_tokens == 1:  # nearly all of them, since the same step
                gaps[last_s] = gaps.get(last_s, 0) + 1
            else:
                self.token_gap.observe((now_s - last_s) / sequence.new_tokens, sequence.new_tokens)
        for last_s, count in gaps.items():
            self.token_gap.observe(now_s - last_s, count)
        self._observe_ends(done, live, now_s)

    def observe_steps(self, sequences: Items[Sequence], times_s: array[float]) -> None:
        """Measure one token a step of each of these sequences, which all have a token from before."""
        for sequence in sequences:
            if sequence.last_token_s is not None:
                self.token_gap.observe(times_s[0] - sequence.last_token_s)
            sequence.last_token_s = times_s[-1]
        self.token_gap.observe_all(map(sub, times_s[1:], times_s), len(sequences))

    def _observe_ends(self, done: StepResult, live: Container[Sequence], now_s: float) -> None:
        for sequence in done.finished:
            if sequence in live and sequence.begun_s is not None:
                self.finished += 1
                self.whole.observe(now_s - sequence.begun_s)
