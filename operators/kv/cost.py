"""The cost of sending a request to each of some ranks, in blocks; lower is better.

    cost = prefill_load_scale * max(0, prompt work in flight and new - credit for what is cached)
           + decode blocks held and added + decode_active_request_weight * requests

Columns in, one column out, in the order of the candidates: for hundreds of them a call each would cost more than the
arithmetic.

Source: dynamo lib/kv-router/src/scheduling/selector/default.rs, DefaultWorkerScorer. Other than there a rank without a
load record counts as idle, so it also pays for the blocks the prompt would add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from .active_sequences_loads import Column, RankLoads
from .config_settings import RequestSettings
from .overlap import Blocks, Overlap
from .worker_rank import WorkerRank

WorkerType = Literal["aggregated", "prefill", "decode"]


@frozen
class Prompt:
    """What a request asks of its worker."""

    isl_tokens: int
    block_size_tokens: int

    @property
    def blocks(self) -> int:
        """The blocks it fills, the last one perhaps in part."""
        return -(-self.isl_tokens // self.block_size_tokens)


def costs(
    prompt: Prompt,
    positions: Mapping[WorkerRank, int],
    overlap: Overlap,
    loads: RankLoads,
    settings: RequestSettings,
    worker_type: WorkerType = "aggregated",
) -> list[float]:
    """The cost for each candidate; `positions` are the candidates' places in the columns of `loads`."""
    if not settings.track_prefill_tokens:
        return _decode_costs(prompt, positions, overlap, loads, settings, worker_type)
    credit = cache_credits(prompt, positions, overlap, loads.prefill_tokens, settings)
    prompt_tokens = _prompt_tokens(prompt, positions, overlap, settings)
    size, scale, weight = prompt.block_size_tokens, settings.prefill_load_scale, settings.decode_active_request_weight
    columns = zip(
        loads.prefill_tokens,
        prompt_tokens,
        credit,
        loads.decode_blocks,
        loads.additional_blocks,
        loads.requests,
        strict=True,
    )
    return [
        scale * (work if (work := (active + new) / size - saved) > 0.0 else 0.0) + held + added + weight * requests
        for active, new, saved, held, added, requests in columns
    ]


def _decode_costs(
    prompt: Prompt,
    positions: Mapping[WorkerRank, int],
    overlap: Overlap,
    loads: RankLoads,
    settings: RequestSettings,
    worker_type: WorkerType,
) -> list[float]:
    """The cost where prompts are not tracked: there is no prompt work to save.

    A decode worker with credit is still chosen by what it has cached: there the credit is taken off the decode blocks.
    """
    weight = settings.decode_active_request_weight
    columns = zip(loads.decode_blocks, loads.additional_blocks, loads.requests, strict=True)
    plain = [(float(held + added), weight * requests) for held, added, requests in columns]
    if worker_type != "decode" or settings.overlap_score_credit <= 0:
        return [blocks + requests for blocks, requests in plain]
    credit = cache_credits(prompt, positions, overlap, loads.prefill_tokens, settings)
    return [max(0.0, blocks - saved) + requests for (blocks, requests), saved in zip(plain, credit, strict=True)]


def cache_credits(
    prompt: Prompt,
    positions: Mapping[WorkerRank, int],
    overlap: Overlap,
    prefill_tokens: Column,
    settings: RequestSettings,
) -> list[float]:
    """The blocks each candidate saves by what is cached, every tier at its weight."""
    column = _shared_credits(positions, overlap, settings)
    credit = settings.overlap_score_credit
    if settings.overlap_score_credit_decay > 0 and settings.track_prefill_tokens:
        decays = _decays(prompt, prefill_tokens, settings.overlap_score_credit_decay)
        for rank, blocks in overlap.device.items():
            if (position := positions.get(rank)) is not None:
                column[position] += credit * decays[position] * blocks
    else:
        _add(column, positions, overlap.device, credit)
    _add_lower_tiers(column, positions, overlap, settings)
    return column


def _add(column: list[float], positions: Mapping[WorkerRank, int], tier: Blocks, weight: float) -> None:
    """Adds the blocks of a tier to the candidates that have some."""
    if not weight:
        return
    for rank, blocks in tier.items():
        if (position := positions.get(rank)) is not None:
            column[position] += weight * blocks


def _shared_credits(positions: Mapping[WorkerRank, int], overlap: Overlap, settings: RequestSettings) -> list[float]:
    """The part of the credit that the shared cache gives: blocks behind those on the device."""
    if not (settings.shared_cache_multiplier and overlap.shared):
        return [0.0] * len(positions)
    multiplier = settings.shared_cache_multiplier
    column = [multiplier * overlap.shared_blocks_beyond(0)] * len(positions)
    for rank, blocks in overlap.device.items():
        if (position := positions.get(rank)) is not None:
            column[position] = multiplier * overlap.shared_blocks_beyond(blocks)
    return column


def _decays(prompt: Prompt, prefill_tokens: Column, decay: float) -> list[float]:
    """What is left of the device credit on ranks that have more prompt work in flight than the calmest candidate."""
    least = min(prefill_tokens, default=0)
    size, blocks = prompt.block_size_tokens, max(1, prompt.blocks)
    return [1.0 / (1.0 + decay * ((tokens - least) / size / blocks)) for tokens in prefill_tokens]


def _prompt_tokens(
    prompt: Prompt, positions: Mapping[WorkerRank, int], overlap: Overlap, settings: RequestSettings
) -> list[int]:
    """The tokens each candidate would have to look at: the prompt, or more where more than the prompt is cached."""
    isl, size = prompt.isl_tokens, prompt.block_size_tokens
    on_device_only = not (overlap.host or overlap.disk or overlap.external)
    if on_device_only and max(overlap.device.values(), default=0) * size <= isl:
        return [isl] * len(positions)
    cached = [0.0] * len(positions)
    _add(cached, positions, overlap.device, 1.0)
    _add_lower_tiers(cached, positions, overlap, settings)
    return [isl if blocks * size <= isl else int(blocks * size + 0.5) for blocks in cached]


def _add_lower_tiers(
    column: list[float], positions: Mapping[WorkerRank, int], overlap: Overlap, settings: RequestSettings
) -> None:
    """Adds the blocks below the device, at their weights."""
    _add(column, positions, overlap.host, settings.host_cache_hit_weight)
    _add(column, positions, overlap.disk, settings.disk_cache_hit_weight)
    _add(column, positions, overlap.external, settings.disk_cache_hit_weight)
