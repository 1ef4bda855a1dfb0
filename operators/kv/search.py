"""cheapest_of_many: what `select_worker` decides, without a look at each of hundreds of candidates.

    cached blocks ─┐
    active blocks ─┴► classes of candidates: the same prompt work for all in one, masks of ranks
    loads, the lightest first ─► of each class those that can still be the cheapest ─► their costs by the rule itself

In one class the cost grows with the load alone. So the walk through a class ends where even an idle rank's cost and
the weighted load together exceed the cheapest found; most end at the first. The costs themselves come from the same
functions as those of all candidates, so they are equal to the digit, and so are ties and the number drawn for them.

Ranks that are slower or faster than others by nearly as much are a class of their own: their costs are at least those
of the fastest of them.

Every candidate is looked at where that does not hold or would not pay: few candidates, a temperature, preferred taints,
lower tiers, credit that decays or exceeds 1, prompts that are not tracked, many different classes, a class in which all
are busier than most others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from random import Random
from typing import TypeAlias

from attrs import define, evolve, frozen

from .decision import Decision, Prompt
from .eligibility import Candidates
from .index import CandidateOverlap, Overlap, in_tokens
from .load import ActiveSequences, Load, LoadField, RankLoads
from .numbers import Groups, Matches, numbers_in, within
from .pace import UNOBSERVED, Pace
from .selection import RULES, WorkerType, goes_by_delay, judge, load_weights
from .types import RequestSettings

FEW_CANDIDATES = 64
"""Up to so many it takes no longer to look at each."""
_MOST_CLASSES = 64
_LEAST_STEPS = 64
_NO_LOAD: Load = (0, 0, 0, 0)
_ROUNDING = 1e-9
"""More, of the numbers added, than their sums in different orders may differ by."""


@frozen
class Group:
    """Ranks of the same cost: blocks cached and active of the prompt, load and slowness."""

    cached: int
    active: int
    load: Load
    ranks: int
    slowness: float = 1.0


@frozen(eq=False)
class _Costs:
    """The rule for groups of ranks."""

    prompt: Prompt
    settings: RequestSettings
    worker_type: WorkerType
    blocks: int
    pace: Pace

    @property
    def largest(self) -> float:
        """No number of the prompt that is added is larger."""
        return self.prompt.isl_tokens * (2.0 + self.settings.prefill_load_scale)

    def of(self, groups: Sequence[Group]) -> list[float]:
        """The cost of a rank of each group."""
        seen = CandidateOverlap(_NOTHING_BELOW, {}, [group.cached for group in groups])
        tokens, held, requests, lately = zip(*(group.load for group in groups), strict=True)
        loads = RankLoads(tokens, held, requests, [self.blocks - group.active for group in groups], lately)
        column = RULES[self.settings.placement](self.prompt, seen, loads, self.settings, self.worker_type, self.pace)
        if not self.pace.slowness:
            return column
        return [cost * group.slowness for cost, group in zip(column, groups, strict=True)]


_NOTHING_BELOW = Overlap()


def cheapest_of_many(
    prompt: Prompt,
    candidates: Candidates,
    overlap: Overlap,
    sequences: ActiveSequences,
    loads: LoadField,
    settings: RequestSettings,
    rng: Random,
    worker_type: WorkerType = "aggregated",
    pace: Pace = UNOBSERVED,
) -> Decision | None:
    """What `select_worker` returns, with the same draw; None, and nothing drawn, where each must be looked at."""
    groups = _cached_groups(prompt, candidates, overlap, sequences, loads, settings)
    if groups is None:
        return None
    walk = _Walk.begin(groups, sequences, loads, _Costs(prompt, settings, worker_type, loads.blocks, pace))
    try:
        found = None if walk is None else walk.cheapest()
    except _TooFar:
        return None
    if found is None:
        return None
    cost, cheapest = found
    positions = loads.chosen.positions
    tied = [(positions[number], group.cached) for group in cheapest for number in numbers_in(group.ranks)]
    position, cached = tied[0] if len(tied) == 1 else rng.choice(sorted(tied))
    return Decision(
        candidates.ranks[position],
        cost,
        cached,
        max(groups)[0],
        cached,
        in_tokens(cached, prompt.block_size_tokens),
        prompt,
        candidates.ranks,
        overlap,
        settings.placement,
        lambda: judge(prompt, candidates, overlap, loads.columns(), settings, worker_type, pace),
    )


def _cached_groups(
    prompt: Prompt,
    candidates: Candidates,
    overlap: Overlap,
    sequences: ActiveSequences,
    loads: LoadField,
    settings: RequestSettings,
) -> list[tuple[int, int]] | None:
    """The candidates by their cached blocks; None where the search does not apply."""
    device, chosen = overlap.device, loads.chosen
    if settings.temperature > 0 or not settings.track_prefill_tokens or settings.overlap_score_credit_decay > 0:
        return None
    if not 0 <= settings.overlap_score_credit <= 1:
        return None
    if settings.prefill_load_scale < 0 or settings.decode_active_request_weight < 0:
        return None
    if candidates.multipliers is not None or overlap.has_lower_tiers or overlap.shared:
        return None
    if not 0 < len(chosen.ranks) == len(chosen.positions) or prompt.isl_tokens < 1:
        return None
    if not device:
        return within((), chosen.mask)
    if not isinstance(device, Matches) or device.ranks is not sequences.numbers.ranks:
        return None
    groups = within(device.groups, chosen.mask)
    return None if max(groups)[0] * prompt.block_size_tokens > prompt.isl_tokens else groups


class _TooFar(Exception):
    """The walk has taken as many steps as a look at each candidate would."""


_Entries: TypeAlias = Sequence[tuple[float, Load]]


@define(eq=False)
class _Walk:
    """Through the loads of each class."""

    classes: list[tuple[float, Group]]
    """A group of all ranks of a class, as if they were idle, behind the cost without its slowness. Where they differ
    in that it is the least of theirs."""
    slowness: Mapping[int, float]
    """By number; 1 for others."""
    entries: _Entries
    sequences: ActiveSequences
    loads: LoadField
    costs: _Costs

    @classmethod
    def begin(cls, cached: Groups, sequences: ActiveSequences, loads: LoadField, costs: _Costs) -> _Walk | None:
        active = within(loads.shared, loads.chosen.mask)
        if len(cached) * len(active) > _MOST_CLASSES:
            return None
        groups = [
            Group(blocks, shared, _NO_LOAD, both)
            for blocks, ranks in cached
            for shared, others in active
            if (both := ranks & others)
        ]
        idle = costs.of(groups)
        if not all(map(isfinite, idle)):
            return None
        classes = list(zip(idle, groups, strict=True))
        slowness: Mapping[int, float] = {}
        if costs.pace.slowness and goes_by_delay(costs.settings):
            factors = sequences.numbers.factors(costs.pace.slowness)
            slowness = factors.by_number
            classes = [
                (cost, evolve(group, ranks=ranks, slowness=least))
                for cost, group in classes
                for least, ranks in factors.within(group.ranks)
            ]
            if len(classes) > _MOST_CLASSES:
                return None
        entries = sequences.holders().order(load_weights(costs.prompt, costs.settings, costs.pace))
        return cls(classes, slowness, entries, sequences, loads, costs)

    def cheapest(self) -> tuple[float, list[Group]] | None:
        """The lowest cost and the groups that have it; None if a number is too large to compare."""
        ways = [(idle, group.slowness, self._way(group)) for idle, group in self.classes]
        firsts = [next(way) for _, _, way in ways]
        found = [group for _, group in firsts]
        costs = self.costs.of(found)
        if not isfinite(bound := min(costs)):
            return None
        more: list[Group] = []
        for (idle, least, way), (weight, _) in zip(ways, firsts, strict=True):
            if self._may_be_cheapest(least * (idle + weight), bound):
                for weight, group in way:
                    if not self._may_be_cheapest(least * (idle + weight), bound):
                        break
                    more.append(group)
        if more:
            found += more
            costs += self.costs.of(more)
        lowest = min(costs)
        return lowest, [group for group, cost in zip(found, costs, strict=True) if cost == lowest]

    def _may_be_cheapest(self, least: float, bound: float) -> bool:
        return least <= bound + _ROUNDING * (abs(least) + abs(bound) + self.costs.largest)

    def _way(self, group: Group) -> Iterator[tuple[float, Group]]:
        """The groups of a class by load, the lightest first, each behind its weighted load."""
        left, masks = group.ranks, self.sequences.holders().masks
        if left.bit_count() ** 2 <= len(self.entries):  # fewer than the steps to the first of them, as a rule
            yield from sorted(self._one_by_one(group), key=_weight)
            return
        most_steps = max(_LEAST_STEPS, len(self.loads.chosen.ranks) // len(self.classes))
        for weight, load in islice(self.entries, most_steps):
            if here := left & masks[load]:
                yield from self._alike(weight, group, load, here)
                left ^= here
                if not left:
                    return
        if most_steps < len(self.entries):
            raise _TooFar

    def _one_by_one(self, group: Group) -> Iterable[tuple[float, Group]]:
        weights = load_weights(self.costs.prompt, self.costs.settings, self.costs.pace)
        for number in numbers_in(group.ranks):
            load = self.loads.load_of(number)
            yield from self._alike(weights.of(load), group, load, 1 << number)

    def _alike(self, weight: float, group: Group, load: Load, ranks: int) -> Iterable[tuple[float, Group]]:
        """The ranks of a class that have this load, in groups of the same slowness."""
        if group.slowness == 1.0:
            return [(weight, Group(group.cached, group.active, load, ranks))]
        return [
            (weight, Group(group.cached, group.active, load, 1 << number, self.slowness[number]))
            for number in numbers_in(ranks)
        ]


def _weight(entry: tuple[float, Group]) -> float:
    return entry[0]
