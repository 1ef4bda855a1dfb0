"""RankNumbers: small numbers for worker-ranks, the same in the indexes and in the load book of one router.

Many ranks together are then one integer, a bit each, and "which have this cached and that in flight" is one operation
however many there are.

Matches: how deep each rank matches a prompt, as masks of such bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, count
from typing import Self

from attrs import define, field, frozen

from .types import WorkerRank

Groups = Sequence[tuple[int, int]]
"""Masks of ranks, no rank in two of them, each with what is the same for its ranks."""

_AS_BITS = bytes.maketrans(b"01", b"\x00\x01")
_FEW = 16
"""So many bits are found faster one by one."""
_NO_RANK = WorkerRank(0, 0)
_NEARLY = 1.1
"""Factors of one class differ by less than that."""


@frozen(eq=False)
class Factors:
    """By what some ranks are multiplied, as numbers and masks; for all others it is 1."""

    by_rank: Mapping[WorkerRank, float]
    ranks: Sequence[WorkerRank]
    """The list of ranks of its time."""
    count: int
    """How many there were."""
    by_number: Mapping[int, float]
    classes: Sequence[tuple[float, int]]
    """Masks of ranks whose factors differ little, each behind the least of them."""

    @classmethod
    def of(
        cls, by_rank: Mapping[WorkerRank, float], numbers: Mapping[WorkerRank, int], ranks: list[WorkerRank]
    ) -> Self:
        """Find the numbers of the ranks, and put those of nearly the same factor together."""
        pairs = sorted((factor, numbers[rank]) for rank, factor in by_rank.items() if factor != 1.0 and rank in numbers)
        classes = list[tuple[float, int]]()
        for factor, number in pairs:
            if classes and factor < classes[-1][0] * _NEARLY:
                classes[-1] = classes[-1][0], classes[-1][1] | 1 << number
            else:
                classes.append((factor, 1 << number))
        return cls(by_rank, ranks, len(ranks), {number: factor for factor, number in pairs}, classes)

    def within(self, mask: int) -> list[tuple[float, int]]:
        """Return the classes within a mask, and the other ranks of it behind 1."""
        found = []
        for least, ranks in self.classes:
            if here := ranks & mask:
                found.append((least, here))
                mask ^= here
        return [*found, (1.0, mask)] if mask else found


@define(eq=False)
class RankNumbers:
    """Gives a rank its number, for as long as anything holds it. No rank has the number 0."""

    ranks: list[WorkerRank] = field(factory=lambda: [_NO_RANK], init=False)
    """The ranks by number. A number that goes to another rank makes it another list: a mask read with the list of its
    time names the ranks of its time."""
    _numbers: dict[WorkerRank, int] = field(factory=dict, init=False)
    _holds: list[int] = field(factory=lambda: [1], init=False)
    _free: list[int] = field(factory=list, init=False)
    _factors: Factors | None = field(default=None, init=False)

    def hold(self, rank: WorkerRank) -> int:
        """Return the rank's number; `let_go` is called as often."""
        number = self._numbers.get(rank)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.ranks = [*self.ranks]
                self.ranks[number] = rank
            else:
                number = len(self.ranks)
                self.ranks.append(rank)
                self._holds.append(0)
            self._numbers[rank] = number
        self._holds[number] += 1
        return number

    def let_go(self, number: int) -> None:
        """One holder less; without any the number is free."""
        self._holds[number] -= 1
        if not self._holds[number]:
            del self._numbers[self.ranks[number]]
            self._free.append(number)

    def factors(self, by_rank: Mapping[WorkerRank, float]) -> Factors:
        """Return the factors by number; fastest for the same mapping, unchanged, as last time."""
        known, ranks = self._factors, self.ranks
        if known is None or known.by_rank is not by_rank or known.ranks is not ranks or known.count != len(ranks):
            known = self._factors = Factors.of(by_rank, self._numbers, ranks)
        return known


class Matches(Mapping[WorkerRank, int]):
    """The depth of each rank that matches at all; computed by rank only when it is read like that."""

    __slots__ = ("_by_rank", "groups", "ranks")

    def __init__(self, groups: Groups, ranks: Sequence[WorkerRank]) -> None:
        self.groups, self.ranks = groups, ranks
        self._by_rank: dict[WorkerRank, int] | None = None

    def by_rank(self) -> dict[WorkerRank, int]:
        """Return the same as a dict."""
        if (known := self._by_rank) is None:
            known = self._by_rank = {}
            for depth, mask in self.groups:
                if mask & (mask - 1) == 0:
                    known[self.ranks[mask.bit_length() - 1]] = depth
                else:
                    known.update(dict.fromkeys(compress(self.ranks, _digits(mask)), depth))
        return known

    def __getitem__(self, rank: WorkerRank) -> int:
        return self.by_rank()[rank]

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self.by_rank())

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self.groups)

    def __repr__(self) -> str:
        return repr(self.by_rank())


def deepest(matches: Matches, others: Matches) -> Matches:
    """For each rank the deeper of both, which are of the same numbers."""
    if not matches.groups or not others.groups:
        return matches if matches.groups else others
    taken, groups = 0, list[tuple[int, int]]()
    for depth, mask in sorted([*matches.groups, *others.groups], reverse=True):
        if left := mask & ~taken:
            groups.append((depth, left))
            taken |= left
    return Matches(groups, others.ranks)


def numbers_in(mask: int) -> list[int]:
    """The numbers whose bits are set, in order."""
    if mask.bit_count() > _FEW:
        return list(compress(count(), _digits(mask)))
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def within(groups: Groups, mask: int) -> list[tuple[int, int]]:
    """The groups without the ranks outside of the mask, and its other ranks as a group with 0."""
    found = []
    for what, ranks in groups:
        if here := ranks & mask:
            found.append((what, here))
            mask ^= here
    return [*found, (0, mask)] if mask else found


def _digits(mask: int) -> bytes:
    """A byte for each bit, the lowest first."""
    return f"{mask:b}"[::-1].encode().translate(_AS_BITS)
