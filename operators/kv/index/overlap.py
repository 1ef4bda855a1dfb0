"""Overlap: what of a prompt each rank has cached, tier by tier.

Source: dynamo lib/kv-router/src/scheduling/overlap.rs, OverlapSignals. Other than there a caller that knows one figure
per rank gives it as the device tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

from attrs import define, field, frozen

from ..numbers import Matches
from ..types import RequestSettings, WorkerRank

Blocks = Mapping[WorkerRank, float]


@frozen
class TierBlocks:
    """The cached blocks of one rank; `disk` holds those of external stores too."""

    device: float
    host: float
    disk: float


@define
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
        if not (self.host or self.disk or self.external):
            return self.device.get(rank, 0)
        tiers = self.tiers(rank)
        return tiers.device + settings.host_cache_hit_weight * tiers.host + settings.disk_cache_hit_weight * tiers.disk

    def cached_tokens(self, rank: WorkerRank, settings: RequestSettings, block_size_tokens: int) -> int:
        """The effective blocks in tokens; may exceed the prompt."""
        return in_tokens(self.effective_blocks(rank, settings), block_size_tokens)

    def shared_blocks_beyond(self, device_blocks: float) -> int:
        """Blocks of the shared cache at or behind this position, which is rounded half up."""
        start = floor(device_blocks + 0.5)
        return sum(max(0, hits.stop - max(hits.start, start)) for hits in self.shared)


class CandidateOverlap:
    """An overlap as the candidates see it, in columns; `zero_by_rank` has a 0 for each of them, in their order.

    `device` is that column, and `best_device` the most in it: read out of the ranks once for all uses.
    """

    __slots__ = ("best_device", "device", "overlap", "zero_by_rank")

    def __init__(
        self, overlap: Overlap, zero_by_rank: Mapping[WorkerRank, float], device: Sequence[float] | None = None
    ) -> None:
        self.overlap, self.zero_by_rank = overlap, zero_by_rank
        self.device = self.column(overlap.device) if device is None else device
        self.best_device = max(self.device, default=0)

    def column(self, tier: Blocks) -> list[float]:
        """The blocks of a tier."""
        # Joining two dicts hashes no rank anew, which looking up hundreds of them would. Strangers come last.
        known = tier.by_rank() if isinstance(tier, Matches) else tier
        return list({**self.zero_by_rank, **known}.values())[: len(self.zero_by_rank)]

    def with_lower_tiers(self, column: Sequence[float], settings: RequestSettings) -> list[float]:
        """The column with the blocks below the device added, at their weights."""
        added, overlap, on_disk = list(column), self.overlap, settings.disk_cache_hit_weight
        tiers = (overlap.host, settings.host_cache_hit_weight), (overlap.disk, on_disk), (overlap.external, on_disk)
        for tier, weight in tiers:
            if weight and tier:
                added = [blocks + weight * more for blocks, more in zip(added, self.column(tier), strict=True)]
        return added

    def best_cached_tokens(self, settings: RequestSettings, block_size_tokens: int) -> int:
        """The most `Overlap.cached_tokens` of a candidate; 0 if none has anything."""
        best = self.best_device
        if self.overlap.has_lower_tiers:
            best = max((self.overlap.effective_blocks(rank, settings) for rank in self.zero_by_rank), default=0)
        return in_tokens(best, block_size_tokens)


def in_tokens(blocks: float, block_size_tokens: int) -> int:
    """The blocks in tokens, rounded half up."""
    return floor(blocks * block_size_tokens + 0.5)
