"""Channel: what a rank tells one request, until the request reads it."""

from __future__ import annotations

from collections import deque

from pipeline import PenstockError
from pipeline.loop import Bell

from .sequence import Sequence


class Channel:
    """Tokens and endings of a request's sequences, in the order they were made. One task reads.

    It never fills: a request's tokens are counted beforehand.
    """

    __slots__ = ("error", "is_rejected", "news", "passes")

    def __init__(self) -> None:
        self.passes: deque[tuple[Sequence, list[int], bool]] = deque()
        """For each pass that gave a sequence something: whose, its new tokens, and whether it is finished."""
        self.is_rejected = False
        self.error: PenstockError | None = None
        self.news = Bell()
        """Rung when there is something to look at; also for a request that was stopped."""

    def tell(self, sequence: Sequence, token_ids: list[int], is_finished: bool) -> None:
        self.passes.append((sequence, token_ids, is_finished))
        self.news.ring()

    def reject(self) -> None:
        """The request can never be served."""
        self.is_rejected = True
        self.news.ring()

    def fail(self, error: PenstockError) -> None:
        """The engine broke with the request in it."""
        self.error = error
        self.news.ring()
