"""Decision: the rank that was chosen for a prompt, and what all candidates were judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from attrs import Factory, define, field, frozen

from .index import Overlap
from .load import RankLoads
from .types import PlacementRule, WorkerRank


@define
class Prompt:
    """The prompt of a request, as its worker has to compute it."""

    isl_tokens: int
    """Its length, in tokens."""
    block_size_tokens: int
    """The worker's KV block size."""
    blocks: int = field(
        init=False, default=Factory(lambda self: -(-self.isl_tokens // self.block_size_tokens), takes_self=True)
    )
    """The blocks it fills, the last one perhaps in part."""


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


@define(eq=False)
class Judged:
    """What all candidates were judged by, in columns."""

    costs: Sequence[float]
    loads: RankLoads
    device: Sequence[float]
    """The blocks each has cached on its device."""


@define(eq=False)
class Decision:
    """The chosen rank and why.

    `overlap_blocks` are on its device, `effective_overlap_blocks` and `cached_tokens` count lower tiers at their
    weight; `best_available_overlap_blocks` is the most any candidate had on its device, the chosen one included.
    Costs are in blocks, or in the unit of the rule in `placement`.
    """

    rank: WorkerRank
    cost: float
    overlap_blocks: float
    best_available_overlap_blocks: float
    effective_overlap_blocks: float
    cached_tokens: int
    prompt: Prompt
    ranks: Sequence[WorkerRank] = field(repr=False)
    overlap: Overlap = field(repr=False)
    placement: PlacementRule
    _judge: Callable[[], Judged] = field(repr=False)

    @cached_property
    def judged(self) -> Judged:
        """All candidates, as they were when this one was chosen; worked out when it is first read."""
        return self._judge()

    @property
    def costs(self) -> Sequence[float]:
        """The cost of each candidate."""
        return self.judged.costs

    @property
    def margin(self) -> float | None:
        """How much dearer the cheapest other candidate is, below 0 if the temperature let a dearer one win, None if
        there is no other."""
        return _margin(self.costs, self.ranks.index(self.rank))

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
        return reasons if (margin := self.margin) is None else {**reasons, "margin": margin}

    def _report(self, position: int) -> CandidateReport:
        rank, judged = self.ranks[position], self.judged
        loads = judged.loads
        return CandidateReport(
            rank,
            judged.costs[position],
            judged.device[position],
            loads.prefill_tokens[position],
            loads.decode_blocks[position],
            loads.additional_blocks[position],
            loads.requests[position],
        )


def _margin(costs: Sequence[float], position: int) -> float | None:
    others = [*costs[:position], *costs[position + 1 :]]
    if not others:
        return None
    # Two infinite costs are equal; their difference would be no number.
    return 0.0 if (next_best := min(others)) == costs[position] else next_best - costs[position]
