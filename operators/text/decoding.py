"""Token ids to text, one token at a time, never giving half a character.

    token id ──► step ──► the text that became complete
    the end  ──► flush ─► what is left; bytes that never became a character are U+FFFD

`PieceDecoder` is for tokenizers whose text is the joined bytes of their tokens, `WindowDecoder` for all others. The
texts of all steps and of the flush, joined, are the text of all ids decoded at once, as long as that is valid UTF-8.

StopMatcher: finds the first stop string in a text that comes in pieces. Pure.

Each character is looked at a bounded number of times for each stop string, by the method of Knuth, Morris and Pratt:
text that begins as a stop string and goes on otherwise is not searched again.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Protocol

from pipeline.errors import CodecError

REPLACEMENT = "\ufffd"
_CHARACTER_BYTES_MAX = 4
"""UTF-8 bytes, and so at most tokens, of one character."""
_CONTEXT_TOKENS = 6
"""Prompt tokens a decoder looks back on: they decide about a leading space, and may end inside a character."""

_utf8_decoder = getincrementaldecoder("utf-8")


class TextDecoder(Protocol):
    """The state of one text: fed with each token id once, in order."""

    def step(self, token_id: int) -> str:
        """The text this token completes, often empty. Raises CodecError for an id that is no token."""
        ...

    def flush(self) -> str:
        """The text of what is still held; the decoder then starts anew."""
        ...


class Pieces(dict[int, "str | bytes"]):
    """Token id to text, or to bytes where a token begins or ends inside a character; filled as ids are looked up.

    `lookup` gives a token's bytes and raises CodecError for an id that is no token.
    """

    def __init__(self, lookup: Callable[[int], bytes]) -> None:
        super().__init__()
        self._lookup = lookup

    def __missing__(self, token_id: int) -> str | bytes:
        data = self._lookup(token_id)
        try:
            self[token_id] = piece = data.decode()
        except UnicodeDecodeError:
            self[token_id] = data
            return data
        return piece


class PieceDecoder:
    """Joins the bytes of tokens. `prompt` is what the text continues; only its unfinished last character counts."""

    __slots__ = ("_inside_character", "_pieces", "_utf8")

    def __init__(self, pieces: Pieces, prompt: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._utf8 = _utf8_decoder("replace")
        self._inside_character = False
        for token_id in prompt[1 - _CHARACTER_BYTES_MAX :]:
            try:
                piece = pieces[token_id]
            except CodecError:  # a prompt in ids may hold any number; what follows it is text nevertheless
                continue
            if type(piece) is not str or self._inside_character:
                self._join(piece)

    def step(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if type(piece) is str and not self._inside_character:
            return piece
        return self._join(piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _join(self, piece: str | bytes) -> str:
        text = self._utf8.decode(piece.encode() if isinstance(piece, str) else piece)
        self._inside_character = bool(self._utf8.getstate()[0])
        return text


class WindowDecoder:
    """Decodes a short window of tokens again for each new one and gives the difference.

    Needed where a token's text depends on its neighbours: a leading space that is dropped, bytes written as tokens.
    `decode` turns ids into text, with U+FFFD where bytes are not a character; `check` raises CodecError for an id that
    is no token.
    """

    __slots__ = ("_check", "_context", "_decode", "_held")

    def __init__(
        self, decode: Callable[[list[int]], str], check: Callable[[int], object], prompt: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._check = check
        self._context, self._held = _behind(prompt, decode)

    def step(self, token_id: int) -> str:
        self._check(token_id)
        self._held.append(token_id)
        text = self._text()
        if not text:  # tokens without a text count as context, but a run of them only so far
            self._context += self._held[: _CONTEXT_TOKENS - len(self._context)]
            self._held = []
            return ""
        # As many tokens as a character has bytes: what is unfinished then, never will be.
        if text.endswith(REPLACEMENT) and len(self._held) < _CHARACTER_BYTES_MAX:
            return ""
        self._context, self._held = [] if text.endswith(REPLACEMENT) else self._held, []
        return text

    def flush(self) -> str:
        text = self._text()
        self._context, self._held = [], []
        return text

    def _text(self) -> str:
        """The text of the held tokens, behind that of their context."""
        before = self._decode(self._context)
        both = self._decode(self._context + self._held)
        # Unfinished bytes may spoil the context's own text: the held tokens then speak for themselves.
        return both[len(before) :] if both.startswith(before) else self._decode(self._held)


def _behind(prompt: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[list[int], list[int]]:
    """The last whole characters of the prompt as context, and the tokens of an unfinished one after them."""
    for unfinished in range(min(_CHARACTER_BYTES_MAX, len(prompt))):
        end = len(prompt) - unfinished
        for start in range(max(0, end - _CONTEXT_TOKENS), end):
            context = list(prompt[start:end])
            if REPLACEMENT not in decode(context):
                return context, list(prompt[end:])
    return [], []


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
