"""select_worker: one of the candidates, by cost or expected delay, with the reasons.

Source: dynamo lib/kv-router/src/scheduling/selector/default.rs, DefaultWorkerPicker. Other than there the random
numbers come from outside, so the same generator makes the same choices; and the rule has a name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from random import Random

from attrs import define, field, frozen

from pipeline import InvalidArgument, Unavailable
from pipeline.protocols import RouterConfigOverride

from ..config import KvRouterConfig
from ..eligibility import Candidates
from ..index import CandidateOverlap, Overlap
from ..load import RankLoads
from ..types import PlacementRule, RequestSettings, WorkerRank
from .cost import Prompt, WorkerType, costs, delays

Rule = Callable[[Prompt, CandidateOverlap, RankLoads, RequestSettings, WorkerType], list[float]]
RULES: Mapping[PlacementRule, Rule] = {"cost": costs, "expected_delay": delays}


@frozen
class CandidateReport:
    """What one candidate was judged by."""

    rank: WorkerRank
    cost: float
    overlap_blocks: float
    active_prefill_tokens: int
    active_decode_blocks: int
    additional_blocks: int
    active_requests: int


@frozen(eq=False)
class Decision:
    """The chosen rank and why.

    `overlap_blocks` are on its device, `effective_overlap_blocks` and `cached_tokens` count lower tiers at their
    weight; `best_available_overlap_blocks` is the most any candidate had on its device, the chosen one included.
    `margin` is how much dearer the cheapest other candidate is, below 0 if the temperature let a dearer one win, None
    if there is no other. Costs are in blocks, or in the unit of the rule in `placement`.
    """

    rank: WorkerRank
    cost: float
    margin: float | None
    overlap_blocks: float
    best_available_overlap_blocks: float
    effective_overlap_blocks: float
    cached_tokens: int
    prompt: Prompt
    ranks: Sequence[WorkerRank] = field(repr=False)
    costs: Sequence[float] = field(repr=False)
    loads: RankLoads = field(repr=False)
    overlap: Overlap = field(repr=False)
    placement: PlacementRule = "cost"

    @property
    def chosen(self) -> CandidateReport:
        """What the chosen one was judged by."""
        return self._report(self.ranks.index(self.rank))

    def report(self) -> list[CandidateReport]:
        """What every candidate was judged by, in order of rank."""
        return [self._report(position) for position in range(len(self.ranks))]

    def attributes(self) -> Mapping[str, float | str]:
        """The reasons, for a span: numbers, and the name of the rule."""
        chosen = self.chosen
        reasons: dict[str, float | str] = {
            "placement": self.placement,
            "worker_id": self.rank.worker_id,
            "dp_rank": self.rank.dp_rank,
            "candidates": len(self.ranks),
            "cost": self.cost,
            "overlap_blocks": self.overlap_blocks,
            "best_available_overlap_blocks": self.best_available_overlap_blocks,
            "effective_overlap_blocks": self.effective_overlap_blocks,
            "prompt_blocks": self.prompt.blocks,
            "active_prefill_tokens": chosen.active_prefill_tokens,
            "active_decode_blocks": chosen.active_decode_blocks,
            "additional_blocks": chosen.additional_blocks,
            "active_requests": chosen.active_requests,
        }
        return reasons if self.margin is None else {**reasons, "margin": self.margin}

    def _report(self, position: int) -> CandidateReport:
        rank, loads = self.ranks[position], self.loads
        return CandidateReport(
            rank,
            self.costs[position],
            self.overlap.device.get(rank, 0),
            loads.prefill_tokens[position],
            loads.decode_blocks[position],
            loads.additional_blocks[position],
            loads.requests[position],
        )


def select_worker(
    prompt: Prompt,
    candidates: Candidates,
    overlap: Overlap,
    loads: RankLoads,
    settings: RequestSettings,
    rng: Random,
    worker_type: WorkerType = "aggregated",
) -> Decision:
    """The cheapest candidate, or with a temperature a random one that is likelier the cheaper it is.

    `loads` are those of the candidates' ranks, in their order. Raises InvalidArgument for a prompt without tokens,
    Unavailable without candidates.
    """
    if prompt.isl_tokens < 1:
        raise InvalidArgument("must have at least one token", field="token_ids")
    if not candidates.ranks:
        raise Unavailable("no worker can take this request")
    seen = CandidateOverlap(overlap, candidates.zero_by_rank)
    column = RULES[settings.placement](prompt, seen, loads, settings, worker_type)
    if candidates.multipliers is not None:
        column = [cost * multiplier for cost, multiplier in zip(column, candidates.multipliers, strict=True)]
    position = pick(column, settings.temperature, rng)
    rank = candidates.ranks[position]
    return Decision(
        rank,
        column[position],
        _margin(column, position),
        seen.device[position],
        seen.best_device,
        overlap.effective_blocks(rank, settings),
        overlap.cached_tokens(rank, settings, prompt.block_size_tokens),
        prompt,
        candidates.ranks,
        column,
        loads,
        overlap,
        settings.placement,
    )


@define(eq=False)
class WorkerSelector:
    """By what one router selects ranks."""

    config: KvRouterConfig
    rng: Random = field(factory=Random)
    """Decides between equal costs; a seeded one repeats a run."""
    worker_type: WorkerType = "aggregated"
    """What the workers of the pool do."""
    _settings: RequestSettings = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._settings = self.config.settings()

    def settings(self, override: RouterConfigOverride | None) -> RequestSettings:
        """The router's settings, with what a request overrides."""
        return self._settings if override is None else self.config.settings(override)


def pick(costs: Sequence[float], temperature: float, rng: Random) -> int:
    """The position of the chosen cost; equal lowest ones are equally likely. Draws only where there is a choice."""
    if temperature > 0 and len(costs) > 1:
        return _sample(_weights(costs, temperature), rng.random())
    lowest = min(costs)
    if costs.count(lowest) == 1:
        return costs.index(lowest)
    return rng.choice([position for position, cost in enumerate(costs) if cost == lowest])


def _weights(costs: Sequence[float], temperature: float) -> list[float]:
    """How likely each is, up to a factor: 1 for the lowest cost, exp(-1/temperature) for the highest."""
    # Halved, and never infinite: the difference of two extreme costs may be more than a number can hold.
    halves = [min(cost, sys.float_info.max) / 2 for cost in costs]
    lowest = min(halves)
    span = max(halves) - lowest
    if span == 0:
        return [1.0] * len(costs)
    return [math.exp(-((half - lowest) / span) / temperature) for half in halves]


def _sample(weights: Sequence[float], sample: float) -> int:
    """The first position at which the weights so far make up this share of all."""
    share, so_far = sample * sum(weights), 0.0
    for position, weight in enumerate(weights):
        so_far += weight
        if so_far >= share:
            return position
    return len(weights) - 1


def _margin(costs: Sequence[float], position: int) -> float | None:
    others = [*costs[:position], *costs[position + 1 :]]
    if not others:
        return None
    # Two infinite costs are equal; their difference would be no number.
    return 0.0 if (next_best := min(others)) == costs[position] else next_best - costs[position]
