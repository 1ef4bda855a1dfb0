"""Running ahead: in virtual time a rank computes many steps at once where they concern none but their own requests.

    step ─ step ─ [ stretch: every running sequence gets a token a step, and blocks for them ] ─ step
                        └── one timer                                              first token ──► at its time
                                                                all others, as a TimedOutput ──► with the last

A stretch ends before the step in which a sequence finishes, or lacks a block. Any call to the rank meanwhile (a new
request, a cancellation, a reservation) cuts it: the rank is then in the very state it would be in step by step. Blocks
are taken and filled, with their events, as each step begins if anybody is told, else with the end of the stretch.
The tokens after a request's first are kept back until its last, a stop, or a time at which its worker may end. So the
times of all tokens, and all that others see of the rank, are the same.

Not for real time, and not where a stage acts on each token as it comes, or on silence between tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import accumulate, repeat
from math import inf
from operator import truediv
from typing import Protocol

from attrs import define, field

from pipeline.protocols import LLMEngineOutput

from .scheduling import Sequence

LEAST_STEPS = 2
"""Fewer are not worth a stretch."""

_LEAST_STEP_MS = 2e-4
"""Shorter steps are taken one by one: they could end in the same moment."""

_MARGIN_S = 1e-6
"""A stretch ends at least this long before a cut, so that all is done step by step around it."""


@define(slots=True)
class TimedOutput(LLMEngineOutput):
    """Tokens of several steps in one chunk, with the time of each on the loop's clock in seconds."""

    token_times_s: array[float] = field(factory=lambda: array("d"))


class Follower(Protocol):
    """A rank that may have run ahead."""

    def catch_up(self) -> None:
        """Come to the state of this moment; later steps are not computed."""

    def flush(self) -> None:
        """Deliver all output that is due."""


class Horizon:
    """Lets the ranks that share it run ahead, but not beyond known times at which one may end abruptly.

    `cuts_s` are these times on the loop's clock; more may be added while they are still to come.
    """

    def __init__(self, cuts_s: Iterable[float] = ()) -> None:
        self._cuts_s = sorted(cuts_s)
        self._followers: dict[Follower, None] = {}

    def add_cut(self, time_s: float) -> None:
        insort(self._cuts_s, time_s)

    def join(self, follower: Follower) -> None:
        self._followers[follower] = None

    def leave(self, follower: Follower) -> None:
        self._followers.pop(follower, None)

    def catch_up(self) -> None:
        """Let all ranks come to the state of this moment; then their readers need a turn each to read the tokens."""
        for follower in list(self._followers):
            follower.catch_up()
            follower.flush()

    def end_s(self, now_s: float) -> float:
        """Return the time before which steps may end that begin now."""
        at = bisect_left(self._cuts_s, now_s)
        return self._cuts_s[at] - _MARGIN_S if at < len(self._cuts_s) else inf


class Stretch:
    """The steps that a rank has run ahead, from their beginning until they end or are cut."""

    __slots__ = (
        "begin_s",
        "done",
        "durations_ms",
        "end_s",
        "is_cut",
        "is_in_step",
        "is_spread",
        "sequences",
        "times_s",
    )

    def __init__(self, sequences: Items[Sequence], begin_s: float, durations_ms: Iterable[float], until_s: float):
        durations_ms = list(durations_ms)
        times_s = array("d", accumulate(map(truediv, durations_ms, repeat(1000)), initial=begin_s))
        del times_s[0]
        del times_s[bisect_left(times_s, until_s) :]
        self.sequences = sequences
        self.durations_ms = durations_ms
        """What each step takes, also of some that come after the last."""
        self.begin_s = begin_s
        self.times_s = times_s
        """The end of each step."""
        self.end_s = times_s[-1] if times_s else begin_s
        """When its last step ends; of a stretch that was cut, the step that ran then."""
        self.done = 0
        """Steps that the scheduler has done."""
        self.is_cut = False
        self.is_in_step = False
        """Whether a step ran when the stretch was cut, whose output is still to come."""
        self.is_spread = min(durations_ms, default=0.0) > _LEAST_STEP_MS
        """Whether no two steps end in the same moment."""

    def __len__(self) -> int:
        return len(self.times_s)

    @property
    def settles_since_s(self) -> float | None:
        """When the moment began in which it was cut, if that was before the next step of that moment began."""
        return self.end_s if self.is_cut and not self.is_in_step else None

    def begin_of(self, step: int) -> float | None:
        """Return when that step begins, counted from 0; None if it is not one of these."""
        if step >= len(self.times_s):
            return None
        return self.times_s[step - 1] if step else self.begin_s

    def due(self, now_s: float) -> int:
        """Return how many steps have ended by now."""
        return bisect_right(self.times_s, now_s)

    def cut(self, due: int, has_begun: bool) -> int:
        """End it after `due` steps, and the one after them if that has begun; return the number of steps."""
        self.is_cut, self.is_in_step = True, has_begun and due < len(self)
        begun = due + self.is_in_step
        self.end_s = self.times_s[begun - 1]
        return begun
