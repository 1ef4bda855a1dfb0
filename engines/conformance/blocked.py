"""Whether an engine blocks the loop (L11): turns that are too long whenever they are looked at.

A turn may be long because the machine was busy, the collector ran or a module was loaded. So a first long turn is only
the reason to look again, and the shortest of several tries counts.
"""

from __future__ import annotations

from attrs import frozen

from .answer import Trial
from .checks import answered
from .failure import failed
from .turns import LONG_S, Turns

_AT_ONCE_S = 0.25
"""A turn that long is a block by itself."""
_SURELY_S = 1.0
"""A turn that long need not be looked at more than twice: each look takes as long."""
_TRIES = 5
_SHARE = 0.75
"""Of the tokens, how many a long turn must come with."""


@frozen
class Look:
    """One answer: its tokens and the long turns beside it."""

    tokens: int
    long: tuple[float, ...]

    @classmethod
    def now(cls, turns: Turns, tokens: int) -> Look:
        """What was seen since the last look."""
        look = cls(tokens, tuple(turns.long))
        turns.clear()
        return look

    @property
    def longest_s(self) -> float:
        return max(self.long, default=0.0)

    @property
    def is_blocked(self) -> bool:
        return self.longest_s >= _AT_ONCE_S or len(self.long) >= max(1.0, _SHARE * self.tokens)


async def check_loop(trial: Trial, tokens: int) -> None:
    """Behind a first answer of so many tokens. Raises LoopBlocked."""
    looks = [Look.now(trial.turns, tokens)]
    while looks[-1].is_blocked:
        shortest = min(look.longest_s for look in looks)
        if len(looks) == (2 if shortest >= _SURELY_S else _TRIES):
            turns = min(len(look.long) for look in looks)
            detail = (
                f"{turns} turns of {LONG_S * 1000:g} ms or more at {tokens} tokens, the longest of {shortest:.3f} s"
            )
            raise failed("LoopBlocked", detail)
        answer = await answered(trial)
        looks.append(Look.now(trial.turns, answer.tokens))


async def check_loop_since(trial: Trial) -> None:
    """The turns since then, of requests that were disturbed. Raises LoopBlocked."""
    blocks = [seconds for seconds in trial.turns.long if seconds >= _AT_ONCE_S]
    if len(blocks) >= _TRIES:
        raise failed(
            "LoopBlocked", f"{len(blocks)} turns of {_AT_ONCE_S:g} s or more, the longest of {max(blocks):.3f} s"
        )
