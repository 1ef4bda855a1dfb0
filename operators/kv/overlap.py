"""Overlap: what of a prompt each rank has cached, tier by tier.

Source: dynamo lib/kv-router/src/scheduling/overlap.rs, OverlapSignals. Other than there a caller that knows one figure
per rank gives it as the device tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import floor

from attrs import Factory, field, frozen

from .config_settings import RequestSettings
from .worker_rank import WorkerRank

Blocks = Mapping[WorkerRank, float]


@frozen
class TierBlocks:
    """The cached blocks of one rank; `disk` holds those of external stores too."""

    device: float
    host: float
    disk: float


@frozen
class Overlap:
    """Blocks by rank; a rank that has none of a tier is not in it.

    `device` counts from the prompt's first block; the lower tiers count what they add behind it. `shared` are the
    positions of the prompt's blocks that a cache all workers reach holds, as ranges that do not overlap.
    """

    device: Blocks = field(factory=dict)
    host: Blocks = field(factory=dict)
    disk: Blocks = field(factory=dict)
    external: Blocks = field(factory=dict)
    shared: Sequence[range] = ()

    @property
    def has_lower_tiers(self) -> bool:
        """Whether anything is cached below the devices."""
        return bool(self.host or self.disk or self.external)

    def tiers(self, rank: WorkerRank) -> TierBlocks:
        """What this rank has, by tier."""
        disk = self.disk.get(rank, 0) + self.external.get(rank, 0)
        return TierBlocks(self.device.get(rank, 0), self.host.get(rank, 0), disk)

    def effective_blocks(self, rank: WorkerRank, settings: RequestSettings) -> float:
        """The cached blocks of a rank, those of lower tiers at their weight."""
        tiers = self.tiers(rank)
        return tiers.device + settings.host_cache_hit_weight * tiers.host + settings.disk_cache_hit_weight * tiers.disk

    def cached_tokens(self, rank: WorkerRank, settings: RequestSettings, block_size_tokens: int) -> int:
        """The effective blocks in tokens, rounded half up; may exceed the prompt."""
        return floor(self.effective_blocks(rank, settings) * block_size_tokens + 0.5)

    def best_cached_tokens(
        self, ranks: Mapping[WorkerRank, int], settings: RequestSettings, block_size_tokens: int
    ) -> int:
        """The most any of these ranks (the keys) has; 0 if none has anything."""
        holders = {rank for rank in chain(self.device, self.host, self.disk, self.external) if rank in ranks}
        return max((self.cached_tokens(rank, settings, block_size_tokens) for rank in holders), default=0)

    def shared_blocks_beyond(self, device_blocks: float) -> int:
        """Blocks of the shared cache at or behind this position, which is rounded half up."""
        start = floor(device_blocks + 0.5)
        return sum(max(0, hits.stop - max(hits.start, start)) for hits in self.shared)


@frozen(eq=False)
class CandidateOverlap:
    """An overlap as the candidates see it; `positions` are their places in the columns.

    `device` is a column, with 0 where nothing is cached, and `best_device` the most in it: they are read out of the
    ranks once for all who need them, because looking up hundreds of ranks costs more than the arithmetic.
    """

    overlap: Overlap
    positions: Mapping[WorkerRank, int]
    device: Sequence[float] = field(
        init=False, default=Factory(lambda self: _column(self.overlap.device, self.positions), takes_self=True)
    )
    best_device: float = field(init=False, default=Factory(lambda self: max(self.device, default=0), takes_self=True))


def _column(tier: Blocks, positions: Mapping[WorkerRank, int]) -> list[float]:
    """The blocks of a tier in the order of the candidates."""
    column: list[float] = [0] * len(positions)
    for rank, blocks in tier.items():
        if (position := positions.get(rank)) is not None:
            column[position] = blocks
    return column
