"""TextCuts: where a text may be cut so that the tokens of its pieces, joined, are those of the whole. Pure.

A tokenizer first splits a text into words, and no token is part of two. Between a letter or digit and certain
characters behind it most tokenizers split whatever else the text holds: there it may be cut. Which characters these
are follows from the tokenizer's file; for a tokenizer whose file is not understood a text has one piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from unicodedata import category, normalize, ucd_3_2_0

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit

from .split_pattern import UnknownPattern, passes, separates

PIECE_CHARACTERS = 32_768
"""Characters of a piece where it can be chosen: its tokens become a list of Python's in less than 2 ms."""

_WINDOW_CHARACTERS = 512
_BEHIND = " \n!-/:-@\\[-`{-~\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f\uff08\uff09\u300a-\u300f"
_PLACES = re.compile(rf"[^\W_](?=[{_BEHIND}])|[^\W\d_](?=[0-9])")
"""Characters that are looked at: a letter or digit with a space or a mark behind it, a letter with a digit behind it.
What stands behind composes with nothing before it, so the normal form C of the pieces is that of the whole."""

_LIKE = {"Lu": "\u00c0", "Ll": "\u00e0", "Lt": "\u01c5", "Lm": "\u02b0", "Lo": "\u65e5", "Nd": "\u0660"}
"""Category -> one of its characters, in the place of all that are not ASCII: expressions name categories."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of the pre-tokenizer ByteLevel."""


class TextCuts:
    """The cuts of one tokenizer, given what its `tokenizer.json` holds. Used by several threads at once."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        normalizer, pre_tokenizer = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
        self._stages = _stages(pre_tokenizer) if _keeps_characters(normalizer) else ()
        self._knows_categories = all(pattern.isascii() for pattern in map(_pattern, self._stages))
        self._inside, self._last, self._first = _added(tokenizer.get("added_tokens") or ())
        self._is_split = lru_cache(maxsize=None)(self._splits)
        self.are_known = bool(self._stages) and self._is_safe("a", " ")

    def pieces(self, text: str, unbroken_max: int = 0) -> Iterator[str]:
        """The text in pieces of about `PIECE_CHARACTERS`, longer where there is no place to cut.

        Raise InvalidArgument if a piece would be longer than `unbroken_max` characters, where that is not 0 and the
        tokenizer's cuts are known.
        """
        start, most = 0, unbroken_max or len(text)
        while self.are_known and len(text) - start > PIECE_CHARACTERS:
            end = self._last_place(text, start, start + min(PIECE_CHARACTERS, most))
            if end is None:
                end = self._first_place(text, start + PIECE_CHARACTERS, min(start + most, len(text)))
            if end is None and len(text) - start > most:
                raise _unbroken(start, most)
            if end is None:
                break
            yield text[start:end]
            start = end
        yield text[start:]

    def _last_place(self, text: str, low: int, high: int) -> int | None:
        """The last place to cut in (low, high]."""
        while high > low:
            begin = max(low, high - _WINDOW_CHARACTERS)
            for found in reversed(list(_PLACES.finditer(text, begin, high + 1))):
                if self._is_safe(text[found.start()], text[found.end()]):
                    return found.end()
            high = begin
        return None

    def _first_place(self, text: str, low: int, high: int) -> int | None:
        """The first place to cut in (low, high]."""
        for begin in range(low, high, _WINDOW_CHARACTERS):
            for found in _PLACES.finditer(text, begin, min(begin + _WINDOW_CHARACTERS, high) + 1):
                if self._is_safe(text[found.start()], text[found.end()]):
                    return found.end()
        return None

    def _is_safe(self, x: str, y: str) -> bool:
        if x + y in self._inside or x in self._last or y in self._first:
            return False
        if not x.isascii():
            kind = category(x)
            # One that is new may be unknown to the tokenizer's library, and some are letters of ASCII in other case.
            if not self._knows_categories or kind != ucd_3_2_0.category(x) or x.casefold().isascii():
                return False
            x = _LIKE.get(kind, "")
        return bool(x) and self._is_split(x, y)

    def _splits(self, x: str, y: str) -> bool:
        """Whether one stage splits between the two and the others leave both sides as they are."""
        is_split = False
        for stage in self._stages:
            if stage["type"] == "ByteLevel" and stage.get("add_prefix_space") and y != " ":
                return False  # a space would come before the second piece
            pattern = _pattern(stage)
            try:
                if pattern and separates(pattern, x, y):
                    is_split = True
                elif pattern and not passes(pattern, x, y):
                    return False
            except UnknownPattern:
                return False
        return is_split


def _unbroken(start: int, most: int) -> InvalidArgument:
    text = f"the prompt has more than {most} characters in a row, from character {start}, that cannot be taken apart"
    return InvalidArgument(text, exceeded=ExceededLimit("max_unbroken_characters", most + 1, most))


def _added(tokens: Sequence[Mapping[str, Any]]) -> tuple[set[str], set[str], set[str]]:
    """What added tokens, which are found in a text before it is split, forbid: pairs inside one, and characters before
    and behind a cut that one may end or begin with."""
    inside, last, first = set(), set(), set()
    for token in tokens:
        for content in {token["content"], normalize("NFC", token["content"])}:
            inside |= {content[at : at + 2] for at in range(len(content) - 1)}
            if token.get("rstrip"):
                last.add(content[-1:])
            if token.get("single_word"):
                first.add(content[:1])
    return inside, last, first


def _keeps_characters(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether what the tokenizer does to a text first is the same for its pieces."""
    if normalizer is None or normalizer["type"] == "NFC":
        return True
    return normalizer["type"] == "Sequence" and all(map(_keeps_characters, normalizer["normalizers"]))


def _stages(pre_tokenizer: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], ...]:
    """The pre-tokenizers in order; none at all if one of them is not understood."""
    if pre_tokenizer is None:
        return ()
    found = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    splits = found[:-1] if found and found[-1]["type"] == "ByteLevel" else found  # behind it other characters are split
    return tuple(found) if all(map(_is_split, splits)) else ()


def _is_split(stage: Mapping[str, Any]) -> bool:
    return stage["type"] == "Split" and "Regex" in stage["pattern"] and stage["behavior"] in ("Isolated", "Removed")


def _pattern(stage: Mapping[str, Any]) -> str:
    """The expression it splits by, empty if it splits nothing."""
    if stage["type"] == "ByteLevel":
        return _GPT2 if stage.get("use_regex", True) else ""
    pattern: str = stage["pattern"]["Regex"]
    return pattern
