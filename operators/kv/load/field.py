"""LoadField: the load of many ranks at one moment, and who of them has which: what a search for the cheapest reads.

LoadOrder: the different loads that ranks have, the lightest first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from math import inf, log1p
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from attrs import define, field, frozen

from ..numbers import Groups, numbers_in
from ..types import WorkerRank
from .ranks import Column, RankLoads

Load: TypeAlias = tuple[int, int, int, int]
"""Prompt tokens in flight, decode blocks and requests of a rank, and the blocks it held lately where that is shown."""


class Weights(NamedTuple):
    """What each of them counts."""

    tokens: float
    blocks: float
    requests: float
    any_request: float = 0.0
    """What a rank with requests counts more than one without."""
    lately: float = 0.0
    """What the blocks held lately count: this times log(1 + `lately_part` * blocks)."""
    lately_part: float = 0.0
    free: float = inf
    """Requests beyond so many wait for a seat; the next two are by request that does."""
    seat: float = 0.0
    seat_blocks: float = 0.0
    """What each block counts then, besides."""

    def of(self, load: Load) -> float:
        """Return what a load counts."""
        tokens, blocks, requests, lately = load
        counted = self.tokens * tokens + self.blocks * blocks
        if requests:
            counted += self.requests * requests + self.any_request
            if requests > self.free:
                counted += (requests - self.free) * (self.seat + self.seat_blocks * blocks)
        return counted + self.lately * log1p(self.lately_part * lately) if lately else counted


@frozen(eq=False)
class Chosen:
    """Ranks in their order, and where their figures stand in columns by number."""

    ranks: Sequence[WorkerRank]
    numbers: Sequence[int]
    """The number of each; 0 without an account."""
    take: Callable[[Sequence[int]], Sequence[int]]
    """Takes their figures out of a column."""
    positions: Mapping[int, int]
    """The position of each number; a rank without an account has none."""
    mask: int
    """Their numbers."""

    @classmethod
    def of(cls, ranks: Sequence[WorkerRank], numbers: Sequence[int]) -> Chosen:
        """Prepare taking the figures of these ranks, which have these numbers."""
        if len(numbers) > 1:
            take: Callable[[Sequence[int]], Sequence[int]] = itemgetter(*numbers)
        else:  # with one position `itemgetter` returns no sequence
            take = itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))
        positions = {number: position for position, number in enumerate(numbers) if number}
        return cls(ranks, numbers, take, positions, sum(1 << number for number in positions))

    def loads(self, blocks: int, shared: Groups, *columns: Column) -> RankLoads:
        """Return their figures in the columns, and how many of the blocks a prompt would add to each.

        The columns are prompt tokens in flight, decode blocks, requests and blocks held lately, by number; `shared` are
        the blocks that are active there already.
        """
        added = [blocks] * len(self.ranks)
        for depth, mask in shared:
            for number in numbers_in(mask & self.mask):
                added[self.positions[number]] -= depth
        tokens, held, requests, lately = map(self.take, columns)
        return RankLoads(tokens, held, requests, added, lately)


@frozen(eq=False)
class LoadField:
    """The load of the chosen ranks, as it was, and what a prompt would add: later bookings do not change it."""

    chosen: Chosen
    blocks: int
    """Those of the prompt that are counted."""
    shared: Groups
    """How many of them are active already, by masks of ranks."""
    prefill_tokens: Sequence[int]
    """By number, as the next two."""
    decode_blocks: Sequence[int]
    requests: Sequence[int]
    blocks_lately: Sequence[int]

    def columns(self) -> RankLoads:
        """The load of each of the ranks, in their order."""
        columns = self.prefill_tokens, self.decode_blocks, self.requests, self.blocks_lately
        return self.chosen.loads(self.blocks, self.shared, *columns)

    def load_of(self, number: int) -> Load:
        """The load of the rank with this number."""
        held = self.decode_blocks[number]
        return self.prefill_tokens[number], held, self.requests[number], self.blocks_lately[number]


@define(eq=False)
class LoadOrder:
    """The loads that some rank has, by their weighted sum; told of those that come and go, and sorted when read."""

    weights: Weights
    _sorted: list[tuple[float, Load]] = field(factory=list, init=False)
    _changed: set[Load] = field(factory=set, init=False)

    def toggle(self, load: Load) -> None:
        """Note that a load is there that was not, or the other way round."""
        if load in self._changed:
            self._changed.remove(load)
        else:
            self._changed.add(load)

    def entries(self, present: Mapping[Load, object]) -> Sequence[tuple[float, Load]]:
        """Return each load that is present behind its weighted sum, the least first."""
        of = self.weights.of
        changed = [(of(load), load) for load in self._changed]
        self._changed.clear()
        if len(changed) > len(self._sorted) // 2:
            gone = {load for _, load in changed if load not in present}
            kept = [entry for entry in self._sorted if entry[1] not in gone]
            self._sorted = sorted(kept + [entry for entry in changed if entry[1] in present])
            return self._sorted
        for entry in changed:
            if entry[1] in present:
                insort(self._sorted, entry)
            else:
                del self._sorted[bisect_left(self._sorted, entry)]
        return self._sorted


class Holders:
    """Which ranks have each load, as masks; kept up to date once `order` was called."""

    MOST_ORDERS = 4
    """Requests may bring weights of their own; so many different ones are remembered."""

    def __init__(self) -> None:
        self.masks: dict[Load, int] = {}
        self._orders: dict[Weights, LoadOrder] = {}

    def add(self, load: Load, bit: int) -> None:
        """Count one more rank with this load."""
        if (mask := self.masks.get(load)) is None:
            self._toggle(load)
        self.masks[load] = (mask or 0) | bit

    def remove(self, load: Load, bit: int) -> None:
        """Count one that has this load no longer."""
        if left := self.masks[load] ^ bit:
            self.masks[load] = left
        else:
            del self.masks[load]
            self._toggle(load)

    def order(self, weights: Weights) -> Sequence[tuple[float, Load]]:
        """Return the loads that ranks have, each behind its sum by these weights, the least first."""
        if (order := self._orders.get(weights)) is None:
            if len(self._orders) == self.MOST_ORDERS:
                del self._orders[next(iter(self._orders))]
            order = self._orders[weights] = LoadOrder(weights)
            for load in self.masks:
                order.toggle(load)
        return order.entries(self.masks)

    def _toggle(self, load: Load) -> None:
        for order in self._orders.values():
            order.toggle(load)
