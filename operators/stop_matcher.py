"""StopMatcher: finds the first stop string in a text that comes in pieces. Pure."""

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

    __slots__ = ("_include", "_stops", "held", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self.held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown after this piece; nothing is fed after a match."""
        return self._cut(self.held + text, more_may_come=True)

    def flush(self) -> str:
        """What may be shown of the held text if nothing follows; it may hold a match that waited for an earlier one."""
        return self._cut(self.held, more_may_come=False)

    def _cut(self, text: str, more_may_come: bool) -> str:
        first, found, is_whole = len(text), "", False
        for stop in self._stops:
            at = text.find(stop)
            whole = at >= 0
            if not whole and more_may_come:
                at = _beginning(stop, text)
            if 0 <= at < first:
                first, found, is_whole = at, stop, whole
        self.held = "" if is_whole else text[first:]
        if is_whole:
            self.matched = found
            return text[: first + len(found)] if self._include else text[:first]
        return text[:first]


def _beginning(stop: str, text: str) -> int:
    """Where the text ends with the longest beginning of the stop string; -1 if it does not."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0 and not stop.startswith(text[at:]):
        at += 1
    return at
