"""Holder: what one worker-rank holds, by the names its engine gives the blocks."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from .index_chain import Chain, Hashes, hashes
from .worker_rank import WorkerRank

_FEW_NAMES = 16
"""From so many on, reading a chain's names one by one is faster than looking for each in memory."""


@define(eq=False)
class Holder:
    """`number_of`: name of each block held -> number of its chain. `chains`: number -> chain.

    `counts`: blocks held of each chain, from its start. `own_names`: the rank's names of a chain's blocks where its
    engine's names differ from the chain's. The first, the one large dict, holds nothing but numbers because then the
    garbage collector does not walk it: a million blocks would be a pause of 50 ms.
    """

    rank: WorkerRank
    bit: int
    number_of: dict[int, int] = field(factory=dict)
    chains: dict[int, Chain] = field(factory=dict)
    counts: dict[Chain, int] = field(factory=dict)
    own_names: dict[Chain, Hashes] = field(factory=dict)

    def names(self, chain: Chain) -> Hashes:
        """Its names of the chain's blocks; the array may go on behind those it holds."""
        return self.own_names.get(chain, chain.names)

    def place(self, name: int) -> tuple[Chain, int] | None:
        """Chain and index of the block of this name; None if it holds none."""
        number = self.number_of.get(name)
        if number is None:
            return None
        chain = self.chains[number]
        last = self.counts[chain] - 1
        names = self.names(chain)
        return chain, last if names[last] == name else _index(names, name)

    def claim(self, chain: Chain, start: int, names: Hashes) -> None:
        """It holds the chain's blocks from `start` on under these names; `start` is at most its count so far.

        `number_of` is the caller's to bring up to date, but for the names that these replace.
        """
        count, end = self.counts.get(chain, 0), start + len(names)
        own = self.own_names.get(chain)
        if own is None and chain.names[start:end] != names:
            own = self.own_names[chain] = chain.names[:count]
        if own is not None:
            for replaced in set(own[start:end]).difference(names):
                del self.number_of[replaced]
            own[start:end] = names
        if end > count:
            chain.move_end(self.bit, count, end)
            self.counts[chain], self.chains[chain.number] = end, chain

    def remove(self, names: list[int]) -> None:
        """It holds none of these blocks of its own, each named once, nor what is below them."""
        self.let_go_places(self.first_places(names))

    def remove_end(self, name: int, is_end: Callable[[int], bool]) -> None:
        """Lets go of the block of this name, and of those before it that nothing needs; if it holds none, of nothing.

        Needed is a block with something below it, and one that `is_end` says something ends with.
        """
        place = self.place(name)
        while place is not None:
            chain, index = place
            keep = self._needed(chain, index + 1, is_end)
            if keep > index:
                return
            self.let_go(chain, keep)
            place = (chain.parent, chain.at - 1) if keep == 0 and chain.parent is not None and chain.at else None

    def first_places(self, names: list[int]) -> list[tuple[Chain, int]]:
        """Of these blocks of its own, each named once, where the first one in each chain is."""
        by_chain: dict[Chain, list[int]] = {}
        for name in names:
            by_chain.setdefault(self.chains[self.number_of[name]], []).append(name)
        return [(chain, self._first_of(chain, found)) for chain, found in by_chain.items()]

    def let_go_places(self, places: list[tuple[Chain, int]]) -> None:
        """Lets go of the blocks there, and of what is below them; one may go with another."""
        for chain, index in places:
            if index < self.counts.get(chain, 0):
                self.let_go(chain, index)

    def _first_of(self, chain: Chain, names: list[int]) -> int:
        """Index of the first of these blocks of the chain."""
        count = self.counts[chain]
        own, first = self.names(chain), count - len(names)
        wanted = set(names)
        if set(own[first:count]) == wanted:
            return first  # its last blocks: what an engine removes first
        if len(names) < _FEW_NAMES:
            return min(_index(own, name) for name in names)
        return next(index for index, name in enumerate(own) if name in wanted)

    def _needed(self, chain: Chain, end: int, is_end: Callable[[int], bool]) -> int:
        """How many of the first `end` blocks of a chain are needed; see `remove_end`."""
        if self.counts[chain] > end:
            return end
        names = self.names(chain)
        while end and not is_end(names[end - 1]):
            leaving = chain.branches.get(end)
            if leaving is not None and not self.counts.keys().isdisjoint(leaving.values()):
                break
            end -= 1
        return end

    def let_go(self, chain: Chain, keep: int) -> None:
        """It holds only the first `keep` blocks of the chain, and nothing that leaves behind them.

        Everything below goes too: what it says of a block whose beginning is lost cannot be used again.
        """
        gone: list[int] = []
        touched, todo = [], [(chain, keep)]
        while todo:
            chain, keep = todo.pop()
            count = self.counts[chain]
            names = self.names(chain)[keep:count]
            gone += names
            todo += [(below, 0) for below in chain.branches_behind(keep, count) if below in self.counts]
            self._shorten(chain, count, keep)
            touched.append(chain)
        for name in gone:
            del self.number_of[name]
        for chain in touched:
            chain.trim()

    def let_go_all(self) -> None:
        """It holds nothing."""
        held = list(self.counts.items())
        self.number_of.clear()
        for chain, count in held:
            self._shorten(chain, count, 0)
        for chain, _ in held:
            chain.trim()

    def _shorten(self, chain: Chain, count: int, keep: int) -> None:
        chain.move_end(self.bit, count, keep)
        own = self.own_names.get(chain)
        if keep:
            self.counts[chain] = keep
            if own is not None:
                del own[keep:]
        else:
            del self.counts[chain], self.chains[chain.number]
            if own is not None:
                del self.own_names[chain]


def _index(names: Hashes, name: int) -> int:
    """Index of the name, found in memory: some twenty times faster than comparing number by number."""
    content, pattern, size = names.tobytes(), hashes([name]).tobytes(), names.itemsize
    found = content.find(pattern)
    while found % size:  # the end of one number and the beginning of the next
        found = content.find(pattern, found + 1)
    return found // size
