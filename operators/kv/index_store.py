"""Adding blocks to what a rank holds: where they go, what that moves, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TypeAlias

from attrs import define, frozen

from .index_chain import Chain, Hashes, first_difference, hashes
from .index_errors import CapacityExhausted, InvalidBlockSequence, ParentBlockNotFound
from .index_holder import Holder

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
