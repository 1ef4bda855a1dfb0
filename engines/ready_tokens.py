"""ReadyTokens: what an engine's scheduler has made for one request, until the task that reads it comes.

    scheduler ── put(choice, tokens) ──► waiting ── take() ──► reader: the tokens of a choice that wait, at once

All that is behind an engine costs as much for an item of many tokens as for one of a single token. A reader that comes
for each token finds it alone, and one that is late finds all that it has missed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pipeline import PenstockError
from pipeline.loop import Wakeup

BUNDLE_MAX_TOKENS = 64
"""Most tokens of an item that was joined of several."""

BUNDLE_MAX_CANDIDATES = 256
"""Most candidates with their log probabilities in such an item: some 32 KB for a client."""

C = TypeVar("C")
T = TypeVar("T")


def bundle_max_tokens(candidates: int = 0) -> int:
    """Return the most tokens of an item that is joined, for so many candidates at each token."""
    return max(1, min(BUNDLE_MAX_TOKENS, BUNDLE_MAX_CANDIDATES // max(1, candidates)))


class Bundle(Generic[C, T]):
    """Tokens of one choice in their order, and what ended the choice behind them."""

    __slots__ = ("choice", "end", "times_s", "tokens")

    def __init__(self, choice: C, tokens: list[T], end: Any, times_s: array[float] | None) -> None:
        self.choice = choice
        self.tokens = tokens
        self.end = end
        """None if the choice goes on."""
        self.times_s = times_s
        """The time of each token, where the scheduler knows it."""


class ReadyTokens(Generic[C, T]):
    """Tokens and endings of the choices of one request, in the order they were made for each choice.

    Tokens of a choice that wait are one bundle of at most `max_tokens`, but those with their times stay as they were
    put. It never fills: a request's tokens are limited, and the scheduler goes on whether or not the reader comes.
    """

    __slots__ = ("_growing", "_max_tokens", "error", "news", "take_lone", "taken", "waiting")

    def __init__(self, max_tokens: int = BUNDLE_MAX_TOKENS) -> None:
        self.waiting: deque[Bundle[C, T]] = deque()
        self.error: PenstockError | None = None
        """What ended the request, other than its last token; it comes behind all that waits."""
        self.news = Wakeup()
        """Set when there is something to read; also when the request is stopped."""
        self.take_lone: Callable[[T], bool] | None = None
        """Takes a token of the only choice; returns False for one that the reader gets: see `put`."""
        self.taken = 0
        """Tokens that were taken so."""
        self._max_tokens = max_tokens
        self._growing: dict[C, Bundle[C, T]] = {}

    def put(
        self,
        choice: C,
        tokens: list[T],
        end: Any = None,
        times_s: array[float] | None = None,
        *,
        offers: bool = False,
    ) -> None:
        """Add tokens, in a list that is not used elsewhere, unless the request has failed; `end` ends the choice.

        With `offers` a lone token that the reader waits for goes to `take_lone` first. Without it tokens of steps that
        take no time become one item.
        """
        if self.error is not None:
            return
        may_be_taken = offers and end is None and len(tokens) == 1 and self.news.is_awaited
        if may_be_taken and self.take_lone is not None and self.take_lone(tokens[0]):
            self.taken += 1
            return
        bundle = self._growing.get(choice)
        if bundle is not None and times_s is None and len(bundle.tokens) + len(tokens) <= self._max_tokens:
            bundle.tokens += tokens
            bundle.end = end
        else:
            bundle = Bundle(choice, tokens, end, times_s)
            self.waiting.append(bundle)
            if times_s is None:
                self._growing[choice] = bundle
            else:
                self._growing.pop(choice, None)
        self.news.wake()

    def take(self) -> Bundle[C, T]:
        """Remove and return the bundle that has waited longest."""
        bundle = self.waiting.popleft()
        if self._growing.get(bundle.choice) is bundle:
            del self._growing[bundle.choice]
        return bundle

    def fail(self, error: PenstockError) -> None:
        """End the request with this error, or with the one that came first."""
        if self.error is None:
            self.error = error
        self.news.wake()
