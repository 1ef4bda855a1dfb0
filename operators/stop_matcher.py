"""StopMatcher: finds the first stop string in a text that comes in pieces. Pure.

Each character is looked at a bounded number of times for each stop string, by the method of Knuth, Morris and Pratt:
text that begins as a stop string and goes on otherwise is not searched again.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at its first stop string, whatever pieces it comes in.

        "ok Use", "r: hi"  ──►  "ok ", ""      with the stop string "User:"

    The first is the one that starts earliest, among those that start together the one that stands first in `stops`.
    Text that may still become a stop string is held back, and nothing else: never more than the longest one without its
    last character. `include` shows the stop string itself. `matched` is the one that was found.

    Source: dynamo lib/llm/src/backend.rs, Decoder. Other than there, the beginning of a stop string is not shown before
    its end comes, and the earliest match counts instead of the first in the list.
    """

    __slots__ = ("_beginnings", "_include", "_read", "_searches", "held", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._searches = [_Search(stop) for stop in stops if stop]
        self._beginnings = frozenset(search.stop[0] for search in self._searches)
        self._include = include
        self._read = 0
        """Characters that came so far."""
        self.held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown after this piece; nothing is fed after a match."""
        if not self.held and self._beginnings.isdisjoint(text):
            self._read += len(text)
            return text
        self.resume(text)
        return self._shown(more_may_come=True)

    def resume(self, held: str) -> None:
        """Takes in text of which nothing is shown before the next piece or the end: what another matcher held back."""
        for search in self._searches:
            if search.found_at is None:
                search.read(held, self._read)
        self._read += len(held)
        self.held += held

    def flush(self) -> str:
        """What may be shown of the held text if nothing follows; it may hold a match that waited for an earlier one."""
        return self._shown(more_may_come=False)

    def _shown(self, more_may_come: bool) -> str:
        first, found, is_whole = self._read, "", False
        for search in self._searches:
            at = search.found_at
            whole = at is not None
            if at is None:
                if not more_may_come:
                    continue
                at = self._read - search.begun
            if at < first:
                first, found, is_whole = at, search.stop, whole
        text, cut = self.held, first - self._read + len(self.held)
        self.held = "" if is_whole else text[cut:]
        if is_whole:
            self.matched = found
            return text[: cut + len(found)] if self._include else text[:cut]
        return text[:cut]


class _Search:
    """One stop string in the text. `begun` characters of it end the text so far, the most there are; `found_at` is the
    place where it was first found, after which it is searched for no longer."""

    __slots__ = ("_borders", "begun", "found_at", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.begun = 0
        self.found_at: int | None = None
        self._borders = [0, 0]
        """For so many first characters of the stop string, how many of its first ones they end with; not all of them,
        made as far as needed."""

    def read(self, text: str, before: int) -> None:
        """Searches the next piece, `before` which so many characters came."""
        stop, begun, at, end = self.stop, self.begun, 0, len(text)
        while at < end:
            if not begun:
                at = text.find(stop[0], at)
                if at < 0:
                    break
                begun = 1
            else:
                character = text[at]
                while begun and stop[begun] != character:
                    begun = self._border(begun)
                if stop[begun] == character:
                    begun += 1
            at += 1
            if begun == len(stop):
                self.found_at = before + at - begun
                return
        self.begun = begun

    def _border(self, length: int) -> int:
        stop, borders = self.stop, self._borders
        for known in range(len(borders), length + 1):
            border, character = borders[-1], stop[known - 1]
            while border and stop[border] != character:
                border = borders[border]
            borders.append(border + 1 if stop[border] == character else 0)
        return borders[length]
