"""What a pass is given to do, and what it did."""

from __future__ import annotations

from attrs import define, field

from .sequence import Sequence


@define(eq=False)
class Pass:
    """What one pass did, and how long it takes.

    `emitted` handed on `new_tokens` tokens each. Each sequence comes once in its life in one of: `finished` (said its
    last token in this pass), `rejected` (could never be served; without chunks also, and even after some tokens, one
    that got in by a cached prefix, was pre-empted, and is too long now without it), `completed_empty` (has no token to
    say). `admitted` began, also once in their lives; `preempted` were sent back. `scheduled_tokens` were computed.
    """

    duration_ms: float = 0.0
    emitted: list[Sequence] = field(factory=list)
    finished: list[Sequence] = field(factory=list)
    rejected: list[Sequence] = field(factory=list)
    completed_empty: list[Sequence] = field(factory=list)
    admitted: list[Sequence] = field(factory=list)
    preempted: list[Sequence] = field(factory=list)
    scheduled_tokens: int = 0

    @property
    def did_nothing(self) -> bool:
        """Whether the next pass would do nothing either, unless the scheduler is asked for something in between."""
        return not (
            self.scheduled_tokens
            or self.emitted
            or self.admitted
            or self.preempted
            or self.rejected
            or self.finished
            or self.completed_empty
        )


class Plan:
    """The tokens a pass may still compute, and the prompts it computes already."""

    __slots__ = ("batch", "budget", "cached_tokens", "parts", "paying", "prefill_left", "prompt_tokens")

    def __init__(self, budget: int, prefill_tokens: int) -> None:
        self.budget = budget
        self.prefill_left = prefill_tokens
        self.batch = 0
        """Sequences with prompt tokens in this pass."""
        self.paying = 0
        """Those of them whose prompts take time, and sum up to the two figures below."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.parts: dict[Sequence, tuple[int, int, int]] = {}
        """Tokens, prompt tokens, and prompt tokens computed before, where it is more than one token of output."""

    def add(self, sequence: Sequence, before: int, tokens: int) -> None:
        """The sequence gets so many tokens, after so many computed before."""
        prompt_before = min(before, sequence.prompt_tokens)
        prompt_now = min(before + tokens, sequence.prompt_tokens) - prompt_before
        self.parts[sequence] = tokens, prompt_now, prompt_before
        self._count(1, sequence, tokens, prompt_now, prompt_before)

    def take_back(self, sequence: Sequence) -> None:
        """The sequence gets nothing after all."""
        part = self.parts.pop(sequence, None)
        if part is not None:
            self._count(-1, sequence, *part)
        elif sequence.computed == sequence.length:
            # Single tokens of output are not written down; a sequence that has got its own lacks nothing.
            self.budget += 1

    def _count(self, sign: int, sequence: Sequence, tokens: int, prompt_now: int, prompt_before: int) -> None:
        self.budget -= sign * tokens
        if not prompt_now:
            return
        self.prefill_left -= sign * prompt_now
        self.batch += sign
        if sequence.pays_prompt:
            self.paying += sign
            self.prompt_tokens += sign * (prompt_before + prompt_now)
            self.cached_tokens += sign * prompt_before
