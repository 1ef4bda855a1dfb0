"""SplitPattern: what a pre-tokenizer's regular expression certainly does between two characters. Pure.

    "...xy..."    does every match end at x, and one begin at y, whatever stands before and behind?

Reads the constructs that such expressions are made of (Llama 3, GPT-2 and 4, Qwen, DeepSeek); any other is refused, so
that nothing is concluded from what is not understood.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from unicodedata import category

from attrs import evolve, frozen

_CATEGORY = re.compile(r"[LMNPSZ][a-z]?")
_COUNTS = re.compile(r"\{(\d*)(,?)(\d*)\}")
_IGNORES_CASE = "(?i:"
_GROUPS = ("(?:", _IGNORES_CASE)
_LOOKS_FOR_A_SPACE = r"(?!\S)"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class UnknownPattern(Exception):
    """The expression has a construct that is not understood here."""


@frozen
class _Part:
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
        return evolve(part, nullable=part.nullable or low == 0, spans=spans, takes_y=takes_y, keeps=part.keeps or keeps)

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
    return _Part(
        nullable=one.nullable or other.nullable,
        takes_x_last=one.takes_x_last or other.takes_x_last,
        takes_y_first=one.takes_y_first or other.takes_y_first,
        spans=one.spans or other.spans,
        takes_y=one.takes_y or other.takes_y,
        looks=one.looks or other.looks,
        keeps=one.keeps or other.keeps,
    )


def _joined(one: _Part, other: _Part) -> _Part:
    before_y = one.nullable and not one.keeps and not one.looks
    behind_y = other.nullable and not other.looks
    return _Part(
        nullable=one.nullable and other.nullable,
        takes_x_last=other.takes_x_last or (other.nullable and one.takes_x_last),
        takes_y_first=one.takes_y_first or (one.nullable and other.takes_y_first),
        spans=one.spans or other.spans or (one.takes_x_last and other.takes_y_first),
        takes_y=(before_y and other.takes_y) or (behind_y and one.takes_y),
        looks=one.looks or other.looks,
        keeps=one.keeps or other.keeps,
    )
