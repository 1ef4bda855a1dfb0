"""PromptLoad: the prompt tokens one rank has still to compute.

Source: dynamo lib/kv-router/src/sequences/prefill_tracker.rs, PrefillLoadTracker. Other than there, removing a request
that is not the oldest moves the anchor on by its duration, so that no reported value jumps; and the sum of durations
is kept instead of computed.
"""

from __future__ import annotations

from attrs import define, field, frozen

from pipeline import PenstockError

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
    _tokens: int = 0
    _duration_ns: int = 0
    _unmodelled: int = 0
    _anchored_ns: int = 0

    def add(self, request_id: str, tokens: int, duration_s: float | None, now_s: float) -> None:
        """Counts a prompt; an id that is counted already is the caller's mistake."""
        if not self._prompts:
            self._anchored_ns = _ns(now_s)
        prompt = self._prompts[request_id] = _Prompt(tokens, None if duration_s is None else _ns(duration_s))
        self._tokens += tokens
        self._duration_ns += prompt.duration_ns or 0
        self._unmodelled += prompt.duration_ns is None

    def remove(self, request_id: str, now_s: float) -> bool:
        """Stops counting a prompt; False if it is not counted."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return False
        is_anchor = next(iter(self._prompts)) == request_id
        del self._prompts[request_id]
        self._tokens -= prompt.tokens
        self._duration_ns -= prompt.duration_ns or 0
        self._unmodelled -= prompt.duration_ns is None
        if is_anchor:
            self._anchored_ns = _ns(now_s)
        elif prompt.duration_ns is not None:
            # What was taken off for it goes with it: the others are as far as they were.
            self._anchored_ns = min(self._anchored_ns + prompt.duration_ns, max(_ns(now_s), self._anchored_ns))
        return True

    @property
    def is_timed(self) -> bool:
        """Whether `tokens_at` changes by itself."""
        return self._unmodelled < len(self._prompts)

    def tokens_at(self, now_s: float) -> int:
        """The tokens still to compute."""
        anchor = next(iter(self._prompts.values()), None)
        if anchor is None:
            return 0
        if (duration_ns := anchor.duration_ns) is None:
            return self._tokens
        elapsed_ns = max(0, _ns(now_s) - self._anchored_ns)
        if duration_ns == 0:
            return self._tokens - anchor.tokens
        if self._unmodelled:
            left = -(-anchor.tokens * max(0, duration_ns - elapsed_ns) // duration_ns)
            return self._tokens - anchor.tokens + left
        return max(0, self._tokens - anchor.tokens * elapsed_ns // duration_ns)

    def remaining_ms_at(self, now_s: float) -> int:
        """The modelled time until all of it is computed, in whole milliseconds; 0 without prompts.

        Raises MissingDuration if some prompt came without one.
        """
        if self._unmodelled:
            raise MissingDuration("an active prompt has no expected duration")
        if not self._prompts:
            return 0
        return max(0, self._duration_ns - max(0, _ns(now_s) - self._anchored_ns)) // 1_000_000


def _ns(seconds: float) -> int:
    """Whole nanoseconds: fractions of tokens are then exact, and 0.3 s is three times 0.1 s."""
    return round(seconds * _NS)
