"""Holder: what one worker-rank holds, by the names its engine gives the blocks.

Adding blocks to what a rank holds: where they go, what that moves, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TypeAlias

from attrs import define, field, frozen

from ..types import WorkerRank
from .chain import CapacityExhausted, Chain, Hashes, InvalidBlockSequence, ParentBlockNotFound, first_difference, hashes

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


Place: TypeAlias = tuple[Chain, int]
"""A chain and how many of its blocks come before."""

Step: TypeAlias = tuple[Chain, int, int]
"""A chain, how many of its blocks come before, and how many follow; they may go on behind its end."""


@define
class Blocks:
    """Blocks one below the other: their names as they came, and both kinds of hash as arrays."""

    names: Sequence[int]
    name_hashes: Hashes
    local: Hashes

    @classmethod
    def of(cls, names: Sequence[int], local_hashes: Iterable[int]) -> Blocks:
        """Raises InvalidBlockSequence for a hash that is no u64, and for lists that differ in length."""
        try:
            blocks = cls(names, hashes(names), hashes(local_hashes))
        except (OverflowError, TypeError) as error:
            raise InvalidBlockSequence("a block hash is an integer from 0 to 2^64 - 1", cause=error) from error
        if len(blocks.local) != len(blocks.names):
            raise InvalidBlockSequence(f"{len(blocks.names)} names for {len(blocks.local)} blocks")
        return blocks

    def behind(self, count: int) -> Blocks:
        """Those after the first so many."""
        return Blocks(self.names[count:], self.name_hashes[count:], self.local[count:])


@frozen
class Rules:
    """How many blocks a rank may hold, and whether one it holds elsewhere may move."""

    limit_blocks: int
    moves: bool = True


def store(root: Chain, holder: Holder, parent: int | None, blocks: Blocks, rules: Rules) -> bool:
    """Gives the rank some blocks below the parent; False if it held all of them, there and by these names.

    A name it holds elsewhere moves, if it may: the block there goes, with what is below. Raises ParentBlockNotFound,
    InvalidBlockSequence and CapacityExhausted before anything has changed.
    """
    route = _route(_behind(root, holder, parent), blocks.local)
    known, place = _known(holder, route, blocks.name_hashes)
    if known == len(blocks.names):
        return False
    if known:
        parent, blocks = blocks.names[known - 1], blocks.behind(known)
        route = _route(place, blocks.local)
    if not _note_new(holder, route, blocks.names, rules.limit_blocks):
        if len(set(blocks.names)) < len(blocks.names):
            raise InvalidBlockSequence("a store names a block twice")
        _make_way(holder, blocks.names, place, rules)
        route = _route(_behind(root, holder, parent), blocks.local)  # chains may have gone with what moved
        _note_new(holder, route, blocks.names, rules.limit_blocks)
    _commit(holder, route, blocks)
    return True


def _behind(root: Chain, holder: Holder, parent: int | None) -> Place:
    """Where the rank's blocks below the parent begin."""
    if parent is None:
        return root, 0
    place = holder.place(parent)
    if place is None:
        raise ParentBlockNotFound(f"Failed to find parent block {parent} of {holder.rank}")
    chain, index = place
    return chain, index + 1


def _route(place: Place, local: Hashes) -> list[Step]:
    """Where the blocks go: along the chains that agree, then on in one that ends there, else in a new one."""
    (chain, at), done, route = place, 0, list[Step]()
    while True:
        shared = chain.shared(local, done, at)
        left = len(local) - done - shared
        below = chain.branch(at + shared, local[done + shared]) if left else None
        if left and below is None and at + shared == len(chain.local) and chain.parent is not None:
            shared, left = shared + left, 0
        if shared:
            route.append((chain, at, shared))
        if not left:
            return route
        if below is None:
            return [*route, (Chain(chain, at + shared), 0, left)]
        chain, at, done = below, 0, done + shared


def _note_new(holder: Holder, route: list[Step], names: Sequence[int], limit_blocks: int) -> bool:
    """Notes the chain of each block by its name; False, and nothing noted, unless all are new and there is room.

    One look at the large dict for each name, that is what a store costs most: it is seldom in the processor's cache.
    """
    number_of = holder.number_of
    before = len(number_of)
    if before + len(names) > limit_blocks:
        return False
    found, done = list[int](), 0
    for chain, _, count in route:
        found += map(number_of.setdefault, names[done : done + count], repeat(chain.number))
        done += count
    if len(number_of) == before + len(names):
        return True
    _forget_new(holder, route, names, found)
    return False


def _forget_new(holder: Holder, route: list[Step], names: Sequence[int], found: list[int]) -> None:
    """Takes back what was noted of names that were not there: those with their step's number and not held in it."""
    done = 0
    for chain, _, count in route:
        held = set(holder.names(chain)[: holder.counts.get(chain, 0)])
        for name, number in zip(names[done : done + count], found[done : done + count], strict=True):
            if number == chain.number and name not in held:
                holder.number_of.pop(name, None)
        done += count


def _known(holder: Holder, route: list[Step], names: Hashes) -> tuple[int, Place]:
    """How many of the first blocks on the way the rank holds already by these names, and the place behind them."""
    done, place = 0, (route[0][0], route[0][1])
    for chain, at, count in route:
        held = min(count, holder.counts.get(chain, 0) - at)
        if held <= 0:
            break
        own, wanted = holder.names(chain)[at : at + held], names[done : done + held]
        same = held if own == wanted else first_difference(own, wanted)
        done, place = done + same, (chain, at + same)
        if same < count:
            break
    return done, place


def _make_way(holder: Holder, names: Sequence[int], place: Place, rules: Rules) -> None:
    """Lets go of the rank's blocks that have one of these names, which shall stand behind the place from now on."""
    moved = [name for name in names if name in holder.number_of]
    first = holder.first_places(moved)
    if any(_is_before(block, place) for block in first):
        raise InvalidBlockSequence("a store has a block below itself")
    if moved and not rules.moves:
        raise InvalidBlockSequence(f"block {moved[0]} of {holder.rank} stands for another one")
    if len(holder.number_of) + len(names) - len(moved) > rules.limit_blocks:
        raise CapacityExhausted(f"{holder.rank} would hold more than {rules.limit_blocks} blocks")
    holder.let_go_places(first)


def _is_before(block: Place, place: Place) -> bool:
    """Whether the block at the one place stands on the way from the root to the other."""
    chain, at = place
    while chain is not block[0]:
        if chain.parent is None:
            return False
        chain, at = chain.parent, chain.at
    return block[1] < at


def _commit(holder: Holder, route: list[Step], blocks: Blocks) -> None:
    """Makes the chains of the way as long as it needs, and the rank hold them so far."""
    done = 0
    for chain, at, count in route:
        end, new = done + count, len(chain.local) - at
        names = blocks.name_hashes if count == len(blocks.names) else blocks.name_hashes[done:end]
        if new < count:
            chain.grow(blocks.local[done + new : end], names[new:])
        holder.claim(chain, at, names)
        done = end
