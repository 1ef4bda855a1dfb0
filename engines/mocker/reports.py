"""RankReports: what a rank of the mock engine publishes besides its output: its load, and what its passes take.

steps, of a stretch or one by one ──► PassMeter ──► PassRates ──┐
blocks in use, hit rate ──────────► ComponentSnapshot ──────────┴─► SnapshotPublisher
"""

from __future__ import annotations

from collections import deque

from ..pass_rates import PassMeter
from ..publishing import ComponentSnapshot, SnapshotPublisher
from .horizon import Stretch
from .scheduling import Scheduler, StepResult

_HIT_RATE_ADMISSIONS = 1000
"""The hit rate is the mean over that many last admissions."""
_NS = 1e6
"""Nanoseconds of a millisecond."""


class RankReports:
    """The reports of one rank; of its load if there are `snapshots`, which are set from outside.

    Rates are published as a step admits requests, which no step of a stretch does: so they are the same, at the same
    time, whether a rank runs ahead or not.
    """

    def __init__(self, dp_rank: int, scheduler: Scheduler) -> None:
        self.snapshots: SnapshotPublisher | None = None
        self._meter: PassMeter | None = None
        self._rates: SnapshotPublisher | None = None
        self._dp_rank, self._scheduler = dp_rank, scheduler
        self._hit_rates: deque[float] = deque(maxlen=_HIT_RATE_ADMISSIONS)
        self._shown_blocks = -1

    @property
    def hit_rate(self) -> float | None:
        """Mean share of the prompt found in the cache over the last admissions; None before any."""
        return sum(self._hit_rates) / len(self._hit_rates) if self._hit_rates else None

    def measure(self, publisher: SnapshotPublisher) -> None:
        """Measure what steps take from now on, and publish that."""
        self._meter, self._rates = PassMeter(), publisher

    def step(self, done: StepResult, now_s: float) -> None:
        """Report a step that begins now."""
        for sequence in done.admitted:
            self._hit_rates.append((sequence.cached_tokens or 0) / sequence.prompt_tokens)
        if (meter := self._meter) is not None:
            held = None if done.read_blocks is None else done.read_blocks * self._scheduler.block_size
            meter.passed(int(done.duration_ms * _NS), done.paid_tokens, held)
            if done.admitted and self._rates is not None and (rates := meter.news(now_s)) is not None:
                self._rates.publish_rates(self._dp_rank, rates)
        self.show()

    def advance(self, stretch: Stretch, begun: int) -> None:
        """Do the steps of a stretch up to that many, and measure them."""
        meter, scheduler, at = self._meter, self._scheduler, stretch.done

        def measure(steps: int) -> None:
            nonlocal at
            times_ns = [int(ms * _NS) for ms in stretch.durations_ms[at : at + steps]]
            assert meter is not None
            meter.stepped(times_ns, scheduler.pool.active * scheduler.block_size)
            at += steps

        scheduler.advance(begun - stretch.done, None if meter is None else measure)
        stretch.done = begun

    def show(self) -> None:
        """Publish the load if it has changed."""
        pool = self._scheduler.pool
        if self.snapshots is None or pool.active == self._shown_blocks:
            return
        self._shown_blocks = pool.active
        usage = pool.active / pool.capacity
        snapshot = ComponentSnapshot(pool.active, pool.capacity, usage, self.hit_rate, self._dp_rank)
        self.snapshots.publish(self._dp_rank, snapshot)
