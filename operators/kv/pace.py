"""Pace: how the workers of one router answer, as the router has observed it. What the delays read.

    booked ──► first token ──► end        each request, with the prompt tokens before it
       └────────────┴───────────┴───► PaceMeter: sums, added up once a second ──► Pace

Times are of the router's own clock and tokens of its own account, so it holds for every engine, and for workers of any
version. Before there are enough observations a figure has its default. What workers report comes before what is
observed of their speed, see `ReportedRates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, fsum, log
from types import MappingProxyType

from attrs import define, evolve, field, frozen

from .rates import MOST_SLOWNESS, PASS_TOKENS, USUAL, EngineCosts, ReportedRates, slowness
from .types import WorkerRank


@frozen
class Pace:
    """The figures of one moment."""

    pause_weight: float = 0.1
    """What a pause in an answer counts beside the same time before a first token: the mean time to the first token by
    the mean time from there to the end. So a delay counts by what it is of the whole that is delayed."""
    answer_tokens: float = 256.0
    """Mean length of an answer."""
    congestion: float = 1.0
    """The prompt tokens that are before a prompt and its own, by its own: what others wait for each token more."""
    slowness: Mapping[WorkerRank, float] = MappingProxyType({})
    """The ranks that differ from the others by more than chance: how many times as long they take."""
    returns: float = 0.0
    """How often a prompt token is needed again while it is cached: cached prompt tokens by those to compute."""
    costs: EngineCosts = USUAL
    """What engines take."""

    def multipliers(self, ranks: Sequence[WorkerRank]) -> list[float] | None:
        """Return the slowness of each of these ranks; None where no rank differs."""
        return [self.slowness.get(rank, 1.0) for rank in ranks] if self.slowness else None


UNOBSERVED = Pace()
UNOBSERVED_TOKENS = 1000.0
"""The tokens of a mean prompt to compute, before there are observations."""

EVERY_S = 1.0
"""How often the figures change, at most."""
RECENT = 512
"""The figures are of about so many last requests."""
RECENT_OF_RANK = 200
"""The same for the slowness of a rank."""
FORGOTTEN_AFTER_S = 300.0
"""A rank's slowness is forgotten over this time: one that is avoided as slow is tried again."""
LEAST = 32
"""Fewer observations than that count as none."""
ASSUMED = 8
"""A rank is taken to have been as fast as the others for so many requests: the first few that differ prove nothing."""
CHANCE = 0.2
"""Ranks that differ less than this, as a logarithm, count as equal; of others that much is taken off."""
PAUSE_WEIGHTS = 0.003, 0.3
MOST_CONGESTION = 5.0
MOST_RETURNS = 20.0
_NS = 1_000_000_000
_RATES = 125, 8000
"""Of a single request, in thousandths: so much slower or faster than predicted, at most."""


@define(eq=False)
class _Recent:
    """Sums over recent observations; the first is their number.

    Those since the last `fold` are whole numbers: in whatever order requests of one moment end, the sums are the same.
    """

    window: int
    sums: list[float]
    added: list[int] = field(factory=list)

    @classmethod
    def of(cls, window: int, numbers: int) -> _Recent:
        return cls(window, [0.0] * numbers, [0] * numbers)

    def add(self, *numbers: int) -> None:
        added = self.added
        for place, number in enumerate(numbers):
            added[place] += number

    def fold(self, keep: float = 1.0) -> None:
        keep *= max(0.0, 1.0 - self.added[0] / self.window)
        self.sums = [keep * total + number for total, number in zip(self.sums, self.added, strict=True)]
        self.added = [0] * len(self.added)


@define(eq=False)
class PaceMeter:
    """Makes a Pace of what it is given. For one loop; `now_s` is always the same clock and does not go back."""

    _pace: Pace = field(default=UNOBSERVED, init=False)
    _folded_s: float | None = field(default=None, init=False)
    _booked: _Recent = field(factory=lambda: _Recent.of(RECENT, 4), init=False)
    """Requests, prompt tokens before them, those of their own to compute and a pass, their prompts."""
    _waits: _Recent = field(factory=lambda: _Recent.of(RECENT, 5), init=False)
    """Requests; x: tokens until the first token; x²; y: nanoseconds; xy."""
    _answers: _Recent = field(factory=lambda: _Recent.of(RECENT, 3), init=False)
    """Answers, their tokens, nanoseconds from the first."""
    _rates: dict[WorkerRank, _Recent] = field(factory=dict, init=False)
    """Requests of a rank, and how fast they were: the predicted time by the time, in thousandths."""
    _line: tuple[float, float] | None = field(default=None, init=False)
    """The predicted time: nanoseconds at 0 tokens, and by token."""
    reports: ReportedRates = field(factory=ReportedRates, init=False)

    def booked(self, before_tokens: int, new_tokens: int, prompt_tokens: int) -> None:
        """A request was booked on a rank that has so many prompt tokens to compute before its own new ones."""
        self._booked.add(1, before_tokens, new_tokens + PASS_TOKENS, prompt_tokens)

    def answered(self, rank: WorkerRank, tokens: int, wait_s: float) -> None:
        """The first token came, `wait_s` after the booking; its rank then had so many prompt tokens to compute."""
        x, y = tokens + PASS_TOKENS, max(1, round(wait_s * _NS))
        self._waits.add(1, x, x * x, y, x * y)
        if self._line is not None:
            # The mean of rates: a wait for something else, as for room, shows as a low rate and not as a huge time.
            at_0, by_token = self._line
            least, most = _RATES
            if (recent := self._rates.get(rank)) is None:
                recent = self._rates[rank] = _Recent.of(RECENT_OF_RANK, 2)
            recent.add(1, min(most, max(least, int(1000 * (at_0 + by_token * x) / y))))

    def ended(self, output_tokens: int, after_s: float) -> None:
        """An answer of so many tokens ended, `after_s` after its first token."""
        self._answers.add(1, output_tokens, max(0, round(after_s * _NS)))

    def forget(self, worker_id: int) -> None:
        """Forget the ranks of a worker: another one may come under its id."""
        self.reports.forget(worker_id)
        self._rates = {rank: recent for rank, recent in self._rates.items() if rank.worker_id != worker_id}
        slowness = {rank: slow for rank, slow in self._pace.slowness.items() if rank.worker_id != worker_id}
        self._pace = evolve(self._pace, slowness=slowness)

    def pace(self, now_s: float) -> Pace:
        """Return the figures. They stay the same for `EVERY_S`."""
        if self._folded_s is None or now_s - self._folded_s >= EVERY_S:
            passed_s = 0.0 if self._folded_s is None else now_s - self._folded_s
            self._folded_s = now_s
            self._fold(now_s, exp(-passed_s / FORGOTTEN_AFTER_S))
        return self._pace

    def _fold(self, now_s: float, keep: float) -> None:
        for recent in (self._booked, self._waits, self._answers):
            recent.fold()
        for recent in self._rates.values():
            recent.fold(keep)
        self._line = _line(self._waits.sums)
        pause, answer, congestion = self._pause_weight(), self._answer_tokens(), self._congestion()
        known = self.reports.known(now_s)
        slow = self._slowness()
        if known:
            slow = _with_reported(slow, slowness(known, self._new_tokens()), self._rates)
        self._pace = Pace(pause, answer, congestion, slow, self._returns(), self.reports.costs(known))

    def _pause_weight(self) -> float:
        (waits, _, _, wait_ns, _), (answers, _, answer_ns) = self._waits.sums, self._answers.sums
        if min(waits, answers) < LEAST:
            return UNOBSERVED.pause_weight
        if answer_ns <= 0:
            return 0.0  # answers of one token, as of prefill workers, do not pause
        least, most = PAUSE_WEIGHTS
        return min(most, max(least, (wait_ns / waits) / (answer_ns / answers)))

    def _answer_tokens(self) -> float:
        answers, tokens, _ = self._answers.sums
        return UNOBSERVED.answer_tokens if answers < LEAST else tokens / answers

    def _congestion(self) -> float:
        requests, before_tokens, own_tokens, _ = self._booked.sums
        return 1.0 if requests < LEAST else min(MOST_CONGESTION, 1.0 + before_tokens / own_tokens)

    def _new_tokens(self) -> float:
        """The tokens that a mean prompt has to compute."""
        requests, _, own_tokens, _ = self._booked.sums
        return UNOBSERVED_TOKENS if requests < LEAST else max(1.0, own_tokens / requests - PASS_TOKENS)

    def _returns(self) -> float:
        requests, _, own_tokens, prompt_tokens = self._booked.sums
        if requests < LEAST:
            return UNOBSERVED.returns
        new_tokens = max(1.0, own_tokens - PASS_TOKENS * requests)
        return min(MOST_RETURNS, max(0.0, prompt_tokens / new_tokens - 1.0))

    def _slowness(self) -> Mapping[WorkerRank, float]:
        found = {}
        for rank, recent in self._rates.items():
            requests, thousandths = recent.sums
            off = log((requests + ASSUMED) / (thousandths / 1000 + ASSUMED))
            if (beyond := abs(off) - CHANCE) > 0:
                found[rank] = exp(min(beyond, MOST_SLOWNESS) * (1 if off > 0 else -1))
        return found


def _with_reported(
    observed: Mapping[WorkerRank, float], reported: Mapping[WorkerRank, float], answering: Iterable[WorkerRank]
) -> Mapping[WorkerRank, float]:
    """The slowness of all ranks: of those that report what they report, beside the others as their mean is observed."""
    if not reported:
        return observed
    mean = 1.0
    if any(rank not in reported for rank in answering):
        mean = exp(fsum(log(observed.get(rank, 1.0)) for rank in reported) / len(reported))
    every = {**observed, **{rank: slow * mean for rank, slow in reported.items()}}
    return {rank: slow for rank, slow in every.items() if slow != 1.0}


def _line(sums: Sequence[float]) -> tuple[float, float] | None:
    """The straight line nearest to the observed times; through 0 where that is no time or falls; None of too few."""
    count, x, xx, y, xy = sums
    if count < LEAST:
        return None
    spread = xx - x * x / count
    by_token = (xy - x * y / count) / spread if spread > 1e-9 * xx else 0.0
    at_0 = (y - by_token * x) / count
    return (at_0, by_token) if by_token > 0 and at_0 >= 0 else (0.0, y / x)
