"""The load of one rank, and that of many as columns.

PromptLoad: the prompt tokens one rank has still to compute.

Source: dynamo lib/kv-router/src/sequences/prefill_tracker.rs, PrefillLoadTracker. Other than there, removing a request
that is not the oldest moves the anchor on by its duration, so that no reported value jumps; and the sum of durations
is kept instead of computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from pipeline import PenstockError

from ..types import WorkerRank
from .blocks import ActiveBlocks

_NS = 1_000_000_000


class MissingDuration(PenstockError):
    """Some active prompt has no expected duration, so the time left is not known."""


@frozen
class _Prompt:
    tokens: int
    duration_ns: int | None


@define
class PromptLoad:
    """Active prompts in the order they came, and how far the work on them must be by now.

    A prompt counts in full until it is removed, unless it came with an expected duration: then the time since the
    oldest one (the anchor) began is taken off. While all have durations it is taken off their sum, otherwise off the
    anchor alone. Times are seconds of one clock that does not go back.
    """

    _prompts: dict[str, _Prompt] = field(factory=dict)
    tokens: int = 0
    """Those of all prompts, in full."""
    timed: int = 0
    """How many have an expected duration: with one of them `tokens_at` changes by itself."""
    _duration_ns: int = 0
    _anchored_ns: int = 0

    def add(self, request_id: str, tokens: int, duration_s: float | None, now_s: float) -> None:
        """Counts a prompt; an id that is counted already is the caller's mistake."""
        if not self._prompts:
            self._anchored_ns = _ns(now_s)
        prompt = self._prompts[request_id] = _Prompt(tokens, None if duration_s is None else _ns(duration_s))
        self.tokens += tokens
        self._duration_ns += prompt.duration_ns or 0
        self.timed += prompt.duration_ns is not None

    def remove(self, request_id: str, now_s: float) -> bool:
        """Stops counting a prompt; False if it is not counted."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return False
        is_anchor = next(iter(self._prompts)) == request_id
        del self._prompts[request_id]
        self.tokens -= prompt.tokens
        self._duration_ns -= prompt.duration_ns or 0
        self.timed -= prompt.duration_ns is not None
        if is_anchor:
            self._anchored_ns = _ns(now_s)
        elif prompt.duration_ns is not None:
            # What was taken off for it goes with it: the others are as far as they were.
            self._anchored_ns = min(self._anchored_ns + prompt.duration_ns, max(_ns(now_s), self._anchored_ns))
        return True

    def left(self, request_id: str, now_s: float) -> tuple[int, float | None]:
        """A prompt's tokens still to compute, and how long that should take; 0 and None if it is not counted."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return 0, None
        duration_ns, tokens = prompt.duration_ns, prompt.tokens
        if duration_ns and next(iter(self._prompts)) == request_id:
            left_ns = max(0, duration_ns - max(0, _ns(now_s) - self._anchored_ns))
            duration_ns, tokens = left_ns, -(-tokens * left_ns // duration_ns)
        return tokens, None if duration_ns is None else duration_ns / _NS

    def tokens_at(self, now_s: float) -> int:
        """The tokens still to compute."""
        anchor = next(iter(self._prompts.values()), None)
        if anchor is None:
            return 0
        if (duration_ns := anchor.duration_ns) is None:
            return self.tokens
        elapsed_ns = max(0, _ns(now_s) - self._anchored_ns)
        if duration_ns == 0:
            return self.tokens - anchor.tokens
        if self.timed < len(self._prompts):
            left = -(-anchor.tokens * max(0, duration_ns - elapsed_ns) // duration_ns)
            return self.tokens - anchor.tokens + left
        return max(0, self.tokens - anchor.tokens * elapsed_ns // duration_ns)

    def remaining_ms_at(self, now_s: float) -> int:
        """The modelled time until all of it is computed, in whole milliseconds; 0 without prompts.

        Raises MissingDuration if some prompt came without one.
        """
        if self.timed < len(self._prompts):
            raise MissingDuration("an active prompt has no expected duration")
        if not self._prompts:
            return 0
        return max(0, self._duration_ns - max(0, _ns(now_s) - self._anchored_ns)) // 1_000_000


def _ns(seconds: float) -> int:
    """Whole nanoseconds: fractions of tokens are then exact, and 0.3 s is three times 0.1 s."""
    return round(seconds * _NS)


Column = Sequence[int]


@define(eq=False)
class RankLoads:
    """The load of some ranks, a column each, in the order in which the ranks were given.

    `additional_blocks` is what the prompt in question would add on top of `decode_blocks`.
    """

    prefill_tokens: Column
    decode_blocks: Column
    requests: Column
    additional_blocks: Column
    blocks_lately: Column = ()
    """The mean of `decode_blocks` over the last seconds, for the rule that reads it; zeros where it is not shown."""

    @classmethod
    def idle(cls, ranks: int, additional_blocks: int = 0) -> RankLoads:
        """The load of so many ranks that do nothing."""
        zeros = [0] * ranks
        return cls(zeros, zeros, zeros, [additional_blocks] * ranks)


@frozen
class PotentialLoad:
    """What one rank would have to do with a prompt added; `additional` parts are included."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int = 0


@frozen
class RankLoad:
    """What is in flight on one rank."""

    rank: WorkerRank
    prefill_tokens: int
    decode_blocks: int


@define(eq=False)
class Slot:
    """The account of one rank. A `lazy` one came with a booking and goes with the last."""

    rank: WorkerRank
    number: int
    lazy: bool
    blocks: ActiveBlocks = field(factory=ActiveBlocks)
    prompts: PromptLoad = field(factory=PromptLoad)
    request_ids: dict[str, None] = field(factory=dict)
