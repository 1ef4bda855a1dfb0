"""Block hashes as arrays of u64: to compare two is to compare memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeAlias

Hashes: TypeAlias = "array[int]"
"""Block hashes, 8 bytes each."""


def hashes(values: Iterable[int] = ()) -> Hashes:
    """The values as an array of u64. Raises OverflowError or TypeError for a value that is not a u64."""
    return array("Q", values)


def as_hashes(values: Iterable[int]) -> Hashes:
    """Return the values as `hashes`; what is such an array already as it is."""
    return values if isinstance(values, array) and values.typecode == "Q" else array("Q", values)


def first_difference(left: Hashes, right: Hashes) -> int:
    """Index of the first differing item of two arrays of one length; any order of bytes inside an item will do."""
    difference = int.from_bytes(left.tobytes(), "little") ^ int.from_bytes(right.tobytes(), "little")
    return ((difference & -difference).bit_length() - 1) // (8 * left.itemsize)
