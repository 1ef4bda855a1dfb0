"""TextCuts: where a text may be cut so that the tokens of its pieces, joined, are those of the whole. Pure.

A tokenizer first splits a text into words, and no token is part of two. Between a letter or digit and certain
characters behind it most tokenizers split whatever else the text holds: there it may be cut. Which characters these
are follows from the tokenizer's file; for a tokenizer whose file is not understood a text has one piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import or_
from typing import Any, NamedTuple
from unicodedata import category, normalize, ucd_3_2_0

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit

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
            if end is None:
                if len(text) - start > most:
                    many = f"more than {most} characters in a row, from character {start}, that cannot be taken apart"
                    exceeded = ExceededLimit("max_unbroken_characters", most + 1, most)
                    raise InvalidArgument(f"the prompt has {many}", exceeded=exceeded)
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


# -- what an expression does between two characters

_CATEGORY = re.compile(r"[LMNPSZ][a-z]?")
_COUNTS = re.compile(r"\{(\d*)(,?)(\d*)\}")
_IGNORES_CASE = "(?i:"
_GROUPS = ("(?:", _IGNORES_CASE)
_LOOKS_FOR_A_SPACE = r"(?!\S)"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class UnknownPattern(Exception):
    """The expression has a construct that is not understood here."""


class _Part(NamedTuple):
    """What a part of the expression may do at the pair, of which x is the first and y the second character."""

    nullable: bool = False
    """It may match nothing."""
    takes_x_last: bool = False
    """It may end by taking x, whatever came before."""
    takes_y_first: bool = False
    """It may begin by taking y, or look at it."""
    spans: bool = False
    """It may take x and go on to y."""
    takes_y: bool = False
    """It can match y alone, whatever follows."""
    looks: bool = False
    """It looks at what it does not take."""
    keeps: bool = False
    """It does not give back what it took."""


def separates(pattern: str, x: str, y: str) -> bool:
    """Whether a match begins at y and none goes from x to y, wherever y follows x in a text.

    The matches before y are then those of the text that ends there, those behind are those of the text that begins
    there. Raises UnknownPattern.
    """
    whole = _Reader(pattern, x, y).read()
    if whole.nullable:
        raise UnknownPattern("it matches nothing at all")
    return whole.takes_y and not whole.spans


def passes(pattern: str, x: str, y: str) -> bool:
    """Whether no match goes from x to y; there may be none at y. Raises UnknownPattern."""
    whole = _Reader(pattern, x, y).read()
    return not whole.nullable and not whole.spans


class _Reader:
    """Reads one expression, left to right."""

    def __init__(self, pattern: str, x: str, y: str) -> None:
        self._pattern, self._x, self._y = pattern, x, y
        self._at = 0
        self._ignores_case = False

    def read(self) -> _Part:
        whole = self._choice()
        if self._at != len(self._pattern):
            raise UnknownPattern(f"character {self._at}")
        return whole

    def _choice(self) -> _Part:
        found = self._sequence()
        while self._skip("|"):
            found = _either(found, self._sequence())
        return found

    def _sequence(self) -> _Part:
        found = _NOTHING
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            found = _joined(found, self._repeated())
        return found

    def _repeated(self) -> _Part:
        part = self._single()
        low, high = 1, 1
        if self._skip("?"):
            low = 0
        elif self._skip("*"):
            low, high = 0, 2
        elif self._skip("+"):
            high = 2
        elif (found := _COUNTS.match(self._pattern, self._at)) and (found[1] or found[3]):
            self._at = found.end()
            low = int(found[1] or 0)
            high = (int(found[3]) if found[3] else 2) if found[2] else low
        else:
            return part
        if part.looks:
            raise UnknownPattern("a repeated look")
        keeps = self._skip("+")  # possessive
        if not keeps:
            self._skip("?")  # lazy
        many = high > 1
        spans = part.spans or (many and part.takes_x_last and part.takes_y_first)
        takes_y = part.takes_y and low <= 1
        nullable, keeps = part.nullable or low == 0, part.keeps or keeps
        return part._replace(nullable=nullable, spans=spans, takes_y=takes_y, keeps=keeps)

    def _single(self) -> _Part:
        for opening in _GROUPS:
            if self._skip(opening):
                return self._group(opening == _IGNORES_CASE)
        if self._skip(_LOOKS_FOR_A_SPACE):
            # As if it took y: whatever takes x and then looks must not be cut there.
            return _Part(nullable=True, takes_y_first=True, looks=True)
        if self._skip("["):
            return self._taking(self._class())
        if self._pattern[self._at] in r"().^$*+?{}":
            raise UnknownPattern(f"character {self._at}")
        return self._taking(self._character())

    def _group(self, ignores_case: bool) -> _Part:
        before, self._ignores_case = self._ignores_case, ignores_case or self._ignores_case
        found = self._choice()
        if not self._skip(")"):
            raise UnknownPattern("a group without its end")
        self._ignores_case = before
        return found

    def _taking(self, takes: Callable[[str], bool]) -> _Part:
        takes_y = takes(self._y)
        return _Part(takes_x_last=takes(self._x), takes_y_first=takes_y, takes_y=takes_y)

    def _class(self) -> Callable[[str], bool]:
        is_negated = self._skip("^")
        members: list[Callable[[str], bool]] = []
        while not self._skip("]"):
            if self._at >= len(self._pattern) or self._pattern[self._at] == "[" or self._starts("&&"):
                raise UnknownPattern("a class in a class")
            begin = self._at
            member = self._character()
            if self._pattern[self._at : self._at + 1] == "-" and not self._starts("-]"):
                low = self._literal(begin)
                self._at += 1
                begin = self._at
                self._character()
                members.append(_between(low, self._literal(begin)))
            else:
                members.append(member)
        return lambda character: any(member(character) for member in members) != is_negated

    def _literal(self, begin: int) -> str:
        """The one character written from there to here; raises UnknownPattern for a kind of character."""
        written = self._pattern[begin : self._at].removeprefix("\\")
        if self._ignores_case or len(written) != 1 or (written.isalnum() and self._at - begin > 1):
            raise UnknownPattern("a range of kinds of characters")
        return written

    def _character(self) -> Callable[[str], bool]:
        """One character, or a kind of characters."""
        if not self._skip("\\"):
            return self._same(self._next())
        escaped = self._next()
        if escaped in "pP":
            if not self._skip("{"):
                raise UnknownPattern("a property without braces")
            name, brace, _ = self._pattern[self._at :].partition("}")
            if not brace or not _CATEGORY.fullmatch(name):
                raise UnknownPattern(f"property {name}")
            self._at += len(name) + 1
            return lambda character: category(character).startswith(name) == (escaped == "p")
        if escaped in "sS":
            return lambda character: character.isspace() == (escaped == "s")
        if escaped in _CONTROLS:
            return self._same(_CONTROLS[escaped])
        if escaped.isalnum():
            raise UnknownPattern(f"escape {escaped}")
        return self._same(escaped)

    def _same(self, wanted: str) -> Callable[[str], bool]:
        if self._ignores_case:
            return lambda character: character.casefold() == wanted.casefold()
        return lambda character: character == wanted

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise UnknownPattern("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _starts(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _skip(self, text: str) -> bool:
        if not self._starts(text):
            return False
        self._at += len(text)
        return True


_NOTHING = _Part(nullable=True)


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda character: low <= character <= high


def _either(one: _Part, other: _Part) -> _Part:
    return _Part(*map(or_, one, other))


def _joined(one: _Part, other: _Part) -> _Part:
    before_y = one.nullable and not one.keeps and not one.looks
    behind_y = other.nullable and not other.looks
    return _either(one, other)._replace(
        nullable=one.nullable and other.nullable,
        takes_x_last=other.takes_x_last or (other.nullable and one.takes_x_last),
        takes_y_first=one.takes_y_first or (one.nullable and other.takes_y_first),
        spans=one.spans or other.spans or (one.takes_x_last and other.takes_y_first),
        takes_y=(before_y and other.takes_y) or (behind_y and one.takes_y),
    )
