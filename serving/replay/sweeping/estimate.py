"""What a sweep will take: the head of its load is replayed before it begins, once with each router.

CPU of 250 requests - CPU of 50  ──►  a factor for what each run would cost on a quiet machine  ──►  the end of the last
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapreplace
from time import process_time

from attrs import evolve, frozen

from ..traces import Trace
from .grid import SweepRun

WORTH_REQUESTS = 5_000
"""Fewer requests in all take about as long as the estimate."""
_HEADS = 50, 250
_REQUEST_US, _INPUT_TOKEN_US, _OUTPUT_TOKEN_US = 600.0, 0.06, 1.2
"""What a request costs, as far as its lengths tell."""

_KV_FACTOR = 2.0
"""How much longer a request takes with the router kv, about."""
_LATER_FACTOR = 1.2
"""How much longer a request takes than one of the head: once caches are full, each block evicts another."""
_START_S = 1.5
"""Until processes have begun."""

Replay = Callable[[SweepRun, Trace], object]
"""Replays a load as a run; what it raises ends the estimate."""


@frozen
class SweepPlan:
    """What a sweep is about to do."""

    runs: int
    requests: int
    """Of all these runs."""
    jobs: int
    """Runs at a time."""
    cpu_s: float | None
    """CPU time of the runs, roughly; None for few requests, and where a run of its head fails."""
    wall_s: float | None
    """Time until the last run ends, if each has a core; None as `cpu_s`."""

    @classmethod
    def of(cls, requests: int, jobs: int, runs: int, runs_s: Sequence[float] | None) -> SweepPlan:
        """Return the plan of that many runs, with the CPU time of each, if it is known, in the order they begin."""
        if runs_s is None:
            return cls(runs, requests, jobs, None, None)
        return cls(runs, requests, jobs, sum(runs_s), _last_end(runs_s, jobs) + (_START_S if jobs > 1 else 0.0))

    @property
    def text(self) -> str:
        """The plan in one line."""
        many = f"{self.runs:,} runs of {self.requests:,} requests in all, {self.jobs:,} at a time"
        return many if self.wall_s is None else f"{many}: about {_duration(self.wall_s)}"


def relative_cost(run: SweepRun, load: Trace) -> float:
    """Return how long a run takes beside others, roughly, without a look at it."""
    return _nominal_s(load) * (_KV_FACTOR if run.config.router == "kv" else 1.0)


def estimate_cpu_s(loads: Iterable[tuple[SweepRun, Trace]], replay: Replay) -> list[float] | None:
    """Return the CPU time of each run with its load, in seconds.

    None for too little load, if a head of it fails, and for engines that need more than CPU: none but mock engines are
    started for it.
    """
    factors: dict[str, float] = {}
    runs_s = []
    loads = list(loads)
    if any(run.config.engine != "mocker" for run, _ in loads):
        return None
    if sum(load.requests for _, load in loads) < WORTH_REQUESTS:
        return None
    for run, load in loads:
        router = run.config.router
        if router not in factors:
            try:
                factors[router] = _factor(run, load, replay)
            except Exception:  # the run itself will show it
                return None
        runs_s.append(factors[router] * _nominal_s(load))
    return runs_s


def _factor(run: SweepRun, load: Trace, replay: Replay) -> float:
    """Return how much longer a run takes than is usual, its later requests included."""
    costs, nominal = [], []
    for sessions in _HEADS:
        head = evolve(load, sessions=load.sessions[:sessions])
        began_s = process_time()
        replay(run, head)
        costs.append(process_time() - began_s)
        nominal.append(_nominal_s(head))
    more = nominal[1] - nominal[0]
    return _LATER_FACTOR * (max(0.0, costs[1] - costs[0]) / more if more > 0 else costs[1] / max(nominal[1], 1e-9))


def _last_end(runs_s: Iterable[float], jobs: int) -> float:
    """Return when the last of the runs ends, begun in this order, that many at a time."""
    ends_s = [0.0] * jobs
    for run_s in runs_s:
        heapreplace(ends_s, ends_s[0] + run_s)
    return max(ends_s)


def _nominal_s(load: Trace) -> float:
    parts = load.requests * _REQUEST_US + load.input_tokens * _INPUT_TOKEN_US + load.output_tokens * _OUTPUT_TOKEN_US
    return parts / 1e6


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{round(seconds / 60)} min"
