"""WorkerPool: which workers may take a request, by pins, allowed workers, taints, reachability and overload. Pure.

Source: dynamo lib/kv-router/src/scheduling/filter.rs, RoutingEligibility.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

from attrs import Factory, define, evolve, field, frozen

from pipeline import InvalidArgument, PenstockError, ResourceExhausted, Unavailable, WorkerOverloaded
from pipeline.protocols import RoutingConstraints
from pipeline.protocols.card import ModelRuntimeConfig

from ..pool import Adapters
from .types import WorkerRank

Reason = Literal["not_allowed", "not_routable", "unknown_worker", "rank_unavailable", "taints", "overloaded"]


@frozen
class Ineligible:
    """Why one rank may not take a request."""

    reason: Reason
    message: str


@define
class RoutingRules:
    """Which workers may take a request. A pinned one is never sent elsewhere, and its preferences have no effect."""

    pinned: WorkerRank | None = None
    """The only rank it may go to; None for any."""
    allowed_worker_ids: AbstractSet[int] | None = None
    """The workers it may go to; None for all."""
    constraints: RoutingConstraints = field(factory=RoutingConstraints)
    """Taints that its worker must carry, or should."""
    failed_worker_ids: AbstractSet[int] = frozenset()
    """The workers it has failed on."""
    is_overload: bool = False
    """Whether the last of them was overloaded."""


@frozen(eq=False)
class Candidates:
    """The ranks that may take a request."""

    ranks: tuple[WorkerRank, ...]
    """Sorted."""
    multipliers: Sequence[float] | None = None
    """What their costs are multiplied by; None for nothing."""
    zero_by_rank: Mapping[WorkerRank, float] = field(
        default=Factory(lambda self: dict.fromkeys(self.ranks, 0), takes_self=True)
    )
    """A 0 for each rank, in their order."""


def worker_ranks(config: ModelRuntimeConfig) -> range:
    """The data-parallel ranks of a worker. Raises InvalidArgument for an impossible range."""
    start, size = config.data_parallel_start_rank, config.data_parallel_size
    if size < 1:
        raise InvalidArgument(f"must be at least 1, got {size}", field="data_parallel_size")
    if start + size > 2**32:
        raise InvalidArgument(f"ranks {start} to {start + size - 1} exceed 32 bits", field="data_parallel_start_rank")
    return range(start, start + size)


@frozen(eq=False)
class WorkerPool:
    """The workers at one moment. A change makes a new one; until then all requests share its candidates."""

    configs: Mapping[int, ModelRuntimeConfig]
    """The settings in their cards."""
    available: AbstractSet[int] | None = None
    """The workers that can be reached; None if that is not known."""
    overloaded: AbstractSet[int] = frozenset()
    """The workers that get no requests for now."""
    adapters: Adapters = field(factory=dict)
    """The workers that have each adapter loaded."""
    ranks: Mapping[int, range] = field(
        init=False,
        default=Factory(lambda self: {w: worker_ranks(c) for w, c in sorted(self.configs.items())}, takes_self=True),
    )
    _unrestricted: Candidates = field(
        init=False, default=Factory(lambda self: Candidates(self._select(RoutingRules())), takes_self=True)
    )

    def candidates(self, rules: RoutingRules) -> Candidates:
        """The ranks that may take a request with these rules.

        Raises Unavailable if there is none, ResourceExhausted if there would be but all are overloaded; for a pinned
        rank InvalidArgument if it is not allowed, WorkerOverloaded if its worker is overloaded.
        """
        if rules.pinned is not None:
            if (refusal := self.check(rules, rules.pinned)) is not None:
                raise _pin_error(refusal)
            return Candidates((rules.pinned,))
        constraints = rules.constraints
        plain = rules.allowed_worker_ids is None and not constraints.required_taints and not rules.failed_worker_ids
        found = self._unrestricted if plain else Candidates(self._select(rules))
        if not found.ranks:
            raise self._no_candidate(rules)
        if constraints.preferred_taints:
            return evolve(found, multipliers=self._multipliers(found.ranks, constraints.preferred_taints))
        return found

    def check(self, rules: RoutingRules, rank: WorkerRank) -> Ineligible | None:
        """The first reason why this rank may not take the request, None if it may."""
        worker = f"worker {rank.worker_id}"
        if rules.allowed_worker_ids is not None and rank.worker_id not in rules.allowed_worker_ids:
            return Ineligible("not_allowed", f"{worker} is not among the allowed workers")
        if self.available is not None and rank.worker_id not in self.available:
            return Ineligible("not_routable", f"{worker} cannot be reached")
        config = self.configs.get(rank.worker_id)
        if config is None:
            return Ineligible("unknown_worker", f"{worker} is not known")
        ranks = self.ranks[rank.worker_id]
        if rank.dp_rank not in ranks:
            text = f"{worker} has ranks {ranks.start} to {ranks.stop - 1}, not {rank.dp_rank}"
            return Ineligible("rank_unavailable", text)
        if not rules.constraints.required_taints <= config.taints:
            missing = ", ".join(sorted(rules.constraints.required_taints - config.taints))
            return Ineligible("taints", f"{worker} lacks the required taints {missing}")
        if rank.worker_id in self.overloaded:
            return Ineligible("overloaded", f"{worker} is overloaded")
        return None

    def _select(self, rules: RoutingRules) -> tuple[WorkerRank, ...]:
        return tuple(rank for rank in self._matching(rules) if rank.worker_id not in self.overloaded)

    def _matching(self, rules: RoutingRules) -> Iterator[WorkerRank]:
        """The ranks that may take the request, overloaded ones included."""
        allowed, available, required = rules.allowed_worker_ids, self.available, rules.constraints.required_taints
        for worker_id, ranks in self.ranks.items():
            if (
                (allowed is None or worker_id in allowed)
                and (available is None or worker_id in available)
                and required <= self.configs[worker_id].taints
                and worker_id not in rules.failed_worker_ids
            ):
                for rank in ranks:
                    yield WorkerRank(worker_id, rank)

    def _no_candidate(self, rules: RoutingRules) -> PenstockError:
        if any(True for _ in self._matching(rules)):
            return ResourceExhausted("all workers that may take this request are overloaded")
        if rules.failed_worker_ids:
            failed = ", ".join(map(str, sorted(rules.failed_worker_ids)))
            text = f"no worker is left for this request: it has failed on {failed}"
            return ResourceExhausted(text) if rules.is_overload else Unavailable(text)
        return Unavailable("no worker can take this request")

    def _multipliers(self, ranks: Iterable[WorkerRank], preferred: Mapping[str, float]) -> list[float]:
        by_worker: dict[int, float] = {}
        for rank in ranks:
            if rank.worker_id not in by_worker:
                by_worker[rank.worker_id] = taint_multiplier(preferred, self.configs[rank.worker_id].taints)
        return [by_worker[rank.worker_id] for rank in ranks]


def taint_multiplier(preferred: Mapping[str, float], taints: AbstractSet[str]) -> float:
    """By what a worker's cost is multiplied: from 1/e if it carries much that is preferred to e if much to avoid.

    Raises InvalidArgument for a weight that is not finite.
    """
    if preferred.keys().isdisjoint(taints):
        return 1.0
    weights = sorted(weight for taint, weight in preferred.items() if taint in taints)
    if not all(map(math.isfinite, weights)):
        raise InvalidArgument("weights must be finite", field="routing.routing_constraints.preferred_taints")
    return math.exp(-math.tanh(sum(weights)))


def narrowed_to_adapter(
    allowed: AbstractSet[int] | None, loaded_on: AbstractSet[int], worker_ids: AbstractSet[int]
) -> AbstractSet[int] | None:
    """The allowed workers that have the adapter loaded; unchanged if none of the workers there are has."""
    narrowed = (worker_ids if allowed is None else allowed & worker_ids) & loaded_on
    return narrowed or allowed


def _pin_error(refusal: Ineligible) -> PenstockError:
    if refusal.reason == "not_allowed":
        return InvalidArgument(refusal.message, field="routing.allowed_worker_ids")
    if refusal.reason == "overloaded":
        return WorkerOverloaded(refusal.message)
    return Unavailable(refusal.message)
