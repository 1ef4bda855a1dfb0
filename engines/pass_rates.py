"""PassMeter: what the passes of an engine take, fitted to those that it computed lately.

    pass: time, prompt tokens, tokens in use ──► sums ──► PassRates, once they have changed ──► SnapshotPublisher

Two kinds of passes have a straight line each, by least squares:

    a step of answers alone     time = step + held_token * tokens in the blocks in use
    a pass with prompts         time - that of its step of answers, if it has one = pass + prompt_token * prompt tokens

Nothing is known of a kind whose passes are all nearly alike, or whose times differ for another reason: what a pass
takes and what its tokens take cannot be told apart. A worker that only computes prompts, or none, measures one kind.

All sums are of whole numbers, so they are the same in whatever order and however many at a time passes are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from operator import mul

from attrs import astuple, define, evolve, field

from pipeline.protocols.kv import PassRates

LEAST = 32
"""Fewer passes of a kind count as none."""
RECENT = 1024
"""The rates are of about so many last passes of a kind."""
EVERY_S = 1.0
"""How often rates are fitted, at most."""
CHANGE = 0.03
"""Rates that differ from those reported by less than this part are not reported."""
ERROR = 0.1
"""What the tokens of a mean pass take must be known to this part of its whole time; twice the standard error counts."""
SPREAD = 0.05
"""Passes whose numbers of tokens have a lower standard deviation, as a part of their mean, are alike."""
LONGEST = 4
"""A pass counts as at most so many times what was known before: one may have waited for something else."""
_PS = 1000
"""Picoseconds of a nanosecond."""


@define(eq=False)
class _Line:
    """Sums over passes of a kind, those that were added since the last fit apart, and the line found."""

    sums: list[float] = field(factory=lambda: [0.0] * 6)
    """Passes; x: their tokens; x²; y: their nanoseconds; xy; y²."""
    added: list[int] = field(factory=lambda: [0] * 6)
    found: tuple[int, int] | None = None
    """Picoseconds of a pass, and of each token."""
    expected: tuple[int, int] | None = None
    """The same, or the mean time and 0 where only that is known."""

    def add(self, time_ns: int, tokens: int) -> None:
        added = self.added
        if self.expected is not None:
            time_ns = min(time_ns, self.time_ns(tokens) * LONGEST + 1)
        added[0] += 1
        added[1] += tokens
        added[2] += tokens * tokens
        added[3] += time_ns
        added[4] += tokens * time_ns
        added[5] += time_ns * time_ns

    def add_all(self, times_ns: Sequence[int], tokens: int) -> None:
        """Add passes with as many tokens each."""
        if self.expected is not None and max(times_ns) > (most := self.time_ns(tokens) * LONGEST + 1):
            times_ns = [min(time_ns, most) for time_ns in times_ns]
        added, count, total = self.added, len(times_ns), sum(times_ns)
        added[0] += count
        added[1] += count * tokens
        added[2] += count * tokens * tokens
        added[3] += total
        added[4] += tokens * total
        added[5] += sum(map(mul, times_ns, times_ns))

    def time_ns(self, tokens: int) -> int:
        """Return the expected time of a pass with so many tokens; 0 where nothing is known."""
        whole, each = self.expected or (0, 0)
        return (whole + each * tokens) // _PS

    def fit(self) -> None:
        """Fit the line to the passes; the more were added, the fewer of the older ones count."""
        keep = max(0.0, 1.0 - self.added[0] / RECENT)
        self.sums = [keep * total + number for total, number in zip(self.sums, self.added, strict=True)]
        self.added = [0] * 6
        count, _, _, y, _, _ = self.sums
        if count < LEAST:
            self.found = None
            return
        self.found = _fitted(*self.sums)
        self.expected = self.found or (round(y / count * _PS), 0)


def _fitted(count: float, x: float, xx: float, y: float, xy: float, yy: float) -> tuple[int, int] | None:
    """Return the picoseconds of a pass and of each token; None where the line is not known."""
    mean_x, mean_y = x / count, y / count
    spread = xx - x * mean_x
    if mean_y <= 0 or spread <= count * (SPREAD * mean_x) ** 2:
        return None
    each = (xy - x * mean_y) / spread
    if each <= 0 or (whole := mean_y - each * mean_x) < 0:  # none of one of them, but for chance
        whole, each = (mean_y, 0.0) if each <= 0 else (0.0, y / x)
    left = max(0.0, yy - y * mean_y - each * each * spread)
    if 2 * sqrt(left / count / spread) * mean_x > ERROR * mean_y:
        return None
    return round(whole * _PS), round(each * _PS)


@define(eq=False)
class PassMeter:
    """Measures the passes of one rank. A pass costs some additions, and no memory."""

    _steps: _Line = field(factory=_Line, init=False)
    _prompts: _Line = field(factory=_Line, init=False)
    _reported: PassRates = field(factory=PassRates, init=False)
    _fitted_s: float | None = field(default=None, init=False)

    def passed(self, time_ns: int, prompt_tokens: int, held_tokens: int | None) -> None:
        """A pass took so long. `held_tokens` are those in the blocks in use where answers got a token, else None."""
        if time_ns <= 0:
            return
        if not prompt_tokens:
            if held_tokens is not None:
                self._steps.add(time_ns, held_tokens)
        elif held_tokens is None:
            self._prompts.add(time_ns, prompt_tokens)
        elif self._steps.expected is not None:
            self._prompts.add(max(1, time_ns - self._steps.time_ns(held_tokens)), prompt_tokens)

    def stepped(self, times_ns: Sequence[int], held_tokens: int) -> None:
        """Steps of answers alone took these times, all above 0, with the same blocks in use."""
        self._steps.add_all(times_ns, held_tokens)

    def news(self, now_s: float) -> PassRates | None:
        """Return the rates if they differ from those returned last; None if not, or if they were fitted just before."""
        if self._fitted_s is not None and now_s - self._fitted_s < EVERY_S:
            return None
        self._fitted_s = now_s
        rates = self._fit()
        if all(map(_is_same, astuple(self._reported), astuple(rates))):
            return None
        self._reported = rates
        return rates

    def _fit(self) -> PassRates:
        """Return the rates of now. What is no longer known stays as it was last."""
        rates = self._reported
        self._steps.fit()
        self._prompts.fit()
        if self._steps.found is not None:
            rates = evolve(rates, step_ps=self._steps.found[0], held_token_ps=self._steps.found[1])
        if self._prompts.found is not None and self._prompts.found[1]:
            rates = evolve(rates, pass_ps=self._prompts.found[0], prompt_token_ps=self._prompts.found[1])
        return rates


def _is_same(before: int | None, now: int | None) -> bool:
    if before is None or now is None:
        return before is now
    return abs(now - before) <= CHANGE * before
