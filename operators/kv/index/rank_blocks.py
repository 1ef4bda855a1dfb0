"""RankBlocks: what one worker-rank holds, by the names its engine gives the blocks.

Adding blocks to what a rank holds: where they go, what that moves, and what is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TypeAlias

from attrs import define, field

from ..hash_arrays import Hashes, first_difference, hashes
from ..types import WorkerRank
from .block_run import BlockRun, CapacityExhausted, InvalidBlockSequence, ParentBlockNotFound

_NOT_HELD = -1
"""Stands for the number of a run, where a rank does not hold the block."""
_FEW_NAMES = 16
"""From so many on, reading a run's names one by one is faster than looking for each in memory."""


@define(eq=False)
class RankBlocks:
    """`number_of`: name of each block held -> number of its run. `runs`: number -> run.

    `counts`: blocks held of each run, from its start. `own_names`: the rank's names of a run's blocks where its
    engine's names differ from the run's. The first, the one large dict, holds nothing but numbers because then the
    garbage collector does not walk it: a million blocks would be a pause of 50 ms.
    """

    rank: WorkerRank
    bit: int
    number_of: dict[int, int] = field(factory=dict)
    runs: dict[int, BlockRun] = field(factory=dict)
    counts: dict[BlockRun, int] = field(factory=dict)
    own_names: dict[BlockRun, Hashes] = field(factory=dict)

    def names(self, run: BlockRun) -> Hashes:
        """The rank's names of the run's blocks; the array may go on behind those it holds."""
        return self.own_names.get(run, run.names)

    def place(self, name: int) -> tuple[BlockRun, int] | None:
        """Return run and index of the block of this name; None if the rank does not hold it."""
        number = self.number_of.get(name)
        if number is None:
            return None
        run = self.runs[number]
        last = self.counts[run] - 1
        names = self.names(run)
        return run, last if names[last] == name else _index(names, name)

    def claim(self, run: BlockRun, start: int, names: Hashes) -> None:
        """Add the run's blocks from `start` on under these names; `start` is at most the count so far.

        The caller updates `number_of`, except for the names that these replace.
        """
        count, end = self.counts.get(run, 0), start + len(names)
        own = self.own_names.get(run)
        if own is None and run.names[start:end] != names:
            own = self.own_names[run] = run.names[:count]
        if own is not None:
            for replaced in set(own[start:end]).difference(names):
                del self.number_of[replaced]
            own[start:end] = names
        if end > count:
            run.move_end(self.bit, count, end)
            self.counts[run], self.runs[run.number] = end, run

    def remove(self, names: Sequence[int]) -> Sequence[int]:
        """Remove these blocks and everything below them; return the names that are not held, or were named before."""
        distinct, forget = set(names), self.number_of.pop  # what cannot be a name raises here, before any change
        # One look at the large dict for each name is most of the cost: it is seldom in the processor's cache.
        by_run = _by_number(names, list(map(forget, names, repeat(_NOT_HELD))))
        missing, inner = by_run.pop(_NOT_HELD, ()), dict[int, int]()
        for number in sorted(by_run, reverse=True):  # runs before those they leave
            run, found = self.runs[number], by_run[number]
            keep = (count := self.counts[run]) - len(found)
            if distinct.issuperset(self.names(run)[keep:count]) and not self._below(run, keep, count):
                self._shorten(run, count, keep)  # its last blocks, on which nothing hangs: what an engine evicts
            else:
                inner.update(dict.fromkeys(found, number))
        if inner:
            self.number_of.update(inner)
            self.let_go_places(self.first_places(inner))
        return missing

    def first_places(self, names: Iterable[int]) -> list[tuple[BlockRun, int]]:
        """Return the place of the first of these held blocks, each named once, in each run."""
        by_run: dict[BlockRun, list[int]] = {}
        for name in names:
            by_run.setdefault(self.runs[self.number_of[name]], []).append(name)
        return [(run, self._first_of(run, found)) for run, found in by_run.items()]

    def let_go_places(self, places: list[tuple[BlockRun, int]]) -> None:
        """Remove the blocks there, and everything below them; one may be removed with another."""
        for run, index in places:
            if index < self.counts.get(run, 0):
                self.let_go(run, index)

    def _first_of(self, run: BlockRun, names: list[int]) -> int:
        """Index of the first of these blocks of the run."""
        count = self.counts[run]
        own, first = self.names(run), count - len(names)
        wanted = set(names)
        if set(own[first:count]) == wanted:
            return first  # its last blocks: what an engine removes first
        if len(names) < _FEW_NAMES:
            return min(_index(own, name) for name in names)
        return next(index for index, name in enumerate(own) if name in wanted)

    def let_go(self, run: BlockRun, keep: int) -> None:
        """Keep only the first `keep` blocks of the run, and nothing that leaves behind them.

        Everything below is removed too: a block whose beginning is lost cannot be used again.
        """
        gone: list[int] = []
        todo = [(run, keep)]
        while todo:
            run, keep = todo.pop()
            count = self.counts[run]
            names = self.names(run)[keep:count]
            gone += names
            todo += [(below, 0) for below in self._below(run, keep, count)]
            self._shorten(run, count, keep)
        for name in gone:
            del self.number_of[name]

    def _below(self, run: BlockRun, keep: int, count: int) -> list[BlockRun]:
        """The runs of which the rank holds blocks, and that leave this one behind its first `keep` blocks."""
        return [below for below in run.branches_behind(keep, count) if below in self.counts] if run.branches else []

    def let_go_all(self) -> None:
        """Remove everything."""
        held = list(self.counts.items())
        self.number_of.clear()
        for run, count in held:
            self._shorten(run, count, 0)

    def _shorten(self, run: BlockRun, count: int, keep: int) -> None:
        run.move_end(self.bit, count, keep)
        if count == len(run.local):  # otherwise another rank holds more of it
            run.trim()
        own = self.own_names.get(run)
        if keep:
            self.counts[run] = keep
            if own is not None:
                del own[keep:]
        else:
            del self.counts[run], self.runs[run.number]
            if own is not None:
                del self.own_names[run]


def _by_number(names: Sequence[int], numbers: Sequence[int]) -> dict[int, Sequence[int]]:
    """The names by their numbers, which mostly are the same for all."""
    if numbers and numbers.count(numbers[0]) == len(numbers):
        return {numbers[0]: names}
    groups: dict[int, list[int]] = {}
    for name, number in zip(names, numbers, strict=True):
        groups.setdefault(number, []).append(name)
    return dict[int, Sequence[int]](groups)


def _index(names: Hashes, name: int) -> int:
    """Index of the name, found in memory: some twenty times faster than comparing number by number."""
    content, pattern, size = names.tobytes(), hashes([name]).tobytes(), names.itemsize
    found = content.find(pattern)
    while found % size:  # the end of one number and the beginning of the next
        found = content.find(pattern, found + 1)
    return found // size


Place: TypeAlias = tuple[BlockRun, int]
"""A run and how many of its blocks come before."""

Step: TypeAlias = tuple[BlockRun, int, int]
"""A run, how many of its blocks come before, and how many follow; they may go on behind its end."""


@define
class Blocks:
    """Blocks one below the other: their names as given, and both kinds of hash as arrays."""

    names: Sequence[int]
    name_hashes: Hashes
    local: Hashes

    @classmethod
    def of(cls, names: Sequence[int], local_hashes: Iterable[int]) -> Blocks:
        """Raises InvalidBlockSequence for a hash that is not a u64, and for lists that differ in length."""
        try:
            blocks = cls(names, hashes(names), hashes(local_hashes))
        except (OverflowError, TypeError) as error:
            raise InvalidBlockSequence("a block hash is an integer from 0 to 2^64 - 1", cause=error) from error
        if len(blocks.local) != len(blocks.names):
            raise InvalidBlockSequence(f"{len(blocks.names)} names for {len(blocks.local)} blocks")
        return blocks

    def behind(self, count: int) -> Blocks:
        """Return the blocks after the first so many."""
        return Blocks(self.names[count:], self.name_hashes[count:], self.local[count:])


def store(root: BlockRun, held_blocks: RankBlocks, parent: int | None, blocks: Blocks, limit_blocks: int) -> bool:
    """Give the rank blocks below the parent; return False if it held all of them, there and by these names.

    A name it holds elsewhere moves: the block there is removed, with everything below. Raises
    ParentBlockNotFound, InvalidBlockSequence and CapacityExhausted before anything has changed.
    """
    route = _route(_behind(root, held_blocks, parent), blocks.local)
    known, place = _known(held_blocks, route, blocks.name_hashes)
    if known == len(blocks.names):
        return False
    if known:
        parent, blocks = blocks.names[known - 1], blocks.behind(known)
        route = _route(place, blocks.local)
    if not _note_new(held_blocks, route, blocks.names, limit_blocks):
        if len(set(blocks.names)) < len(blocks.names):
            raise InvalidBlockSequence("a store names a block twice")
        _make_way(held_blocks, blocks.names, place, limit_blocks)
        route = _route(_behind(root, held_blocks, parent), blocks.local)  # runs may have gone with what moved
        _note_new(held_blocks, route, blocks.names, limit_blocks)
    _commit(held_blocks, route, blocks)
    return True


def _behind(root: BlockRun, held_blocks: RankBlocks, parent: int | None) -> Place:
    """Where the rank's blocks below the parent begin."""
    if parent is None:
        return root, 0
    place = held_blocks.place(parent)
    if place is None:
        raise ParentBlockNotFound(f"Failed to find parent block {parent} of {held_blocks.rank}")
    run, index = place
    return run, index + 1


def _route(place: Place, local: Hashes) -> list[Step]:
    """Where the blocks go: along the runs that agree, then on in one that ends there, else in a new one."""
    (run, at), done, route = place, 0, list[Step]()
    while True:
        shared = run.shared(local, done, at)
        left = len(local) - done - shared
        below = run.branch(at + shared, local[done + shared]) if left else None
        if left and below is None and at + shared == len(run.local) and run.parent is not None:
            shared, left = shared + left, 0
        if shared:
            route.append((run, at, shared))
        if not left:
            return route
        if below is None:
            return [*route, (BlockRun(run, at + shared), 0, left)]
        run, at, done = below, 0, done + shared


def _note_new(held_blocks: RankBlocks, route: list[Step], names: Sequence[int], limit_blocks: int) -> bool:
    """Note the run of each block by its name; return False, with nothing noted, unless all are new and there is room.

    One look at the large dict for each name is most of the cost of a store: it is seldom in the processor's cache.
    """
    number_of = held_blocks.number_of
    before = len(number_of)
    if before + len(names) > limit_blocks:
        return False
    found, done = list[int](), 0
    for run, _, count in route:
        found += map(number_of.setdefault, names[done : done + count], repeat(run.number))
        done += count
    if len(number_of) == before + len(names):
        return True
    _forget_new(held_blocks, route, names, found)
    return False


def _forget_new(held_blocks: RankBlocks, route: list[Step], names: Sequence[int], found: list[int]) -> None:
    """Undo the notes of names that were not there: those with their step's number that are not held in it."""
    done = 0
    for run, _, count in route:
        held = set(held_blocks.names(run)[: held_blocks.counts.get(run, 0)])
        for name, number in zip(names[done : done + count], found[done : done + count], strict=True):
            if number == run.number and name not in held:
                held_blocks.number_of.pop(name, None)
        done += count


def _known(held_blocks: RankBlocks, route: list[Step], names: Hashes) -> tuple[int, Place]:
    """Return how many of the first blocks on the way the rank holds by these names, and the place behind them."""
    done, place = 0, (route[0][0], route[0][1])
    for run, at, count in route:
        held = min(count, held_blocks.counts.get(run, 0) - at)
        if held <= 0:
            break
        own, wanted = held_blocks.names(run)[at : at + held], names[done : done + held]
        same = held if own == wanted else first_difference(own, wanted)
        done, place = done + same, (run, at + same)
        if same < count:
            break
    return done, place


def _make_way(held_blocks: RankBlocks, names: Sequence[int], place: Place, limit_blocks: int) -> None:
    """Remove the rank's blocks with one of these names, which are to stand behind the place."""
    moved = [name for name in names if name in held_blocks.number_of]
    first = held_blocks.first_places(moved)
    if any(_is_before(block, place) for block in first):
        raise InvalidBlockSequence("a store has a block below itself")
    if len(held_blocks.number_of) + len(names) - len(moved) > limit_blocks:
        raise CapacityExhausted(f"{held_blocks.rank} would hold more than {limit_blocks} blocks")
    held_blocks.let_go_places(first)


def _is_before(block: Place, place: Place) -> bool:
    """Whether the block at the one place is on the way from the root to the other."""
    run, at = place
    while run is not block[0]:
        if run.parent is None:
            return False
        run, at = run.parent, run.at
    return block[1] < at


def _commit(held_blocks: RankBlocks, route: list[Step], blocks: Blocks) -> None:
    """Extend the runs of the way as needed, and give them to the rank."""
    done = 0
    for run, at, count in route:
        end, new = done + count, len(run.local) - at
        names = blocks.name_hashes if count == len(blocks.names) else blocks.name_hashes[done:end]
        if new < count:
            run.grow(blocks.local[done + new : end], names[new:])
        held_blocks.claim(run, at, names)
        done = end
