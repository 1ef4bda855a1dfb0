"""Channel: what a rank hands to the reader of one request."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TypeAlias

from pipeline import PenstockError
from pipeline.loop import Wakeup

from .scheduling import Sequence

ChannelOutput: TypeAlias = "tuple[Sequence, list[int], bool, array[float] | None]"
"""Of a step with output: the sequence, its new tokens, and whether it is finished; of several steps at once also the
time of each token."""


class Channel:
    """Tokens and endings of a request's sequences, in the order they were made, until one task reads them.

    It never fills: a request's tokens are counted beforehand.
    """

    __slots__ = ("error", "news", "outputs")

    def __init__(self) -> None:
        self.outputs: deque[ChannelOutput] = deque()
        self.error: PenstockError | None = None
        """What ended the request, other than its last token."""
        self.news = Wakeup()
        """Set when there is something to read; also when the request is stopped."""

    def deliver(
        self, sequence: Sequence, token_ids: list[int], is_finished: bool, times_s: array[float] | None = None
    ) -> None:
        self.outputs.append((sequence, token_ids, is_finished, times_s))
        self.news.wake()

    def fail(self, error: PenstockError) -> None:
        """The request can never be served, or the engine failed with it."""
        self.error = error
        self.news.wake()
