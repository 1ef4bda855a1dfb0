"""StepTimes: what the steps of a torch engine take, measured and published.

plan ──► compute thread, timed ──► PassMeter ──► SnapshotPublisher
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeVar

from ..pass_rates import PassMeter
from ..publishing import SnapshotPublisher
from .planning import StepPlan

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, int]:
    """Return what a function returns, and the nanoseconds that it took."""
    begun_ns = perf_counter_ns()
    return work(), perf_counter_ns() - begun_ns


class StepTimes:
    """The steps of one engine, in the order in which they are computed."""

    def __init__(self) -> None:
        self._meter = PassMeter()
        self._was_awaited = True

    def step(self, plan: StepPlan, time_ns: int, held_tokens: int) -> None:
        """A step took so long, and `held_tokens` were in the blocks in use.

        One that draws nothing is not awaited: a device may compute it while the next one is timed, so neither counts.
        """
        is_awaited = any(chunk.draws for chunk in plan.chunks)
        if is_awaited and self._was_awaited and not plan.loads:
            prompt_tokens, has_answers = 0, False
            for chunk in plan.chunks:
                if chunk.start < len(chunk.choice.order.prompt) or chunk.count > 1:
                    prompt_tokens += chunk.count
                else:
                    has_answers = True
            self._meter.passed(time_ns, prompt_tokens, held_tokens if has_answers else None)
        self._was_awaited = is_awaited

    def publish(self, publisher: SnapshotPublisher, now_s: float) -> None:
        """Publish the rates if they have changed."""
        if (rates := self._meter.news(now_s)) is not None:
            publisher.publish_rates(0, rates)
