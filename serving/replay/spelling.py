"""Spelling hash ids in the tokens of a model, for engines that know no others."""

from __future__ import annotations

from functools import lru_cache
from random import Random

_SPREAD = 2_654_435_761
"""Far from a divisor of any vocabulary: neighbouring ids take distant parts of the tape."""


def spell(hash_id: int, tokens: int, vocabulary: range) -> list[int]:
    """A block of so many tokens, the same for the same id in any process.

    It begins with the id as a number whose digits are tokens, the lowest first: blocks differ from their first tokens
    on, as soon as they are long enough for these digits, three in a vocabulary of 1,626 tokens or more. What follows
    looks like chance.
    """
    digits, rest = [], hash_id
    for _ in range(_digits(len(vocabulary))):
        rest, digit = divmod(rest, len(vocabulary))
        digits.append(vocabulary[digit])
    begin = hash_id * _SPREAD % len(vocabulary)
    return [*digits, *_tape(tokens, vocabulary)[begin : begin + tokens]][:tokens]


@lru_cache(maxsize=8)
def _digits(base: int) -> int:
    """How many digits any hash id needs, which has 32 bits."""
    needed = 1
    while base**needed < 2**32:
        needed += 1
    return needed


@lru_cache(maxsize=8)
def _tape(tokens: int, vocabulary: range) -> list[int]:
    """Tokens in an order of chance, from which a block may begin at any place within the vocabulary's length."""
    drawn = Random(len(vocabulary)).choices(vocabulary, k=len(vocabulary))
    return (drawn * (1 + -(-tokens // len(drawn))))[: len(drawn) + tokens]
