"""Busy thresholds: from what the ranks of a worker report to whether it is busy. Functions of values only.

A rank is busy if one of the tests that are configured says so; a worker, if all its known ranks are.

Source: dynamo lib/llm/src/discovery/worker_monitor.rs, WorkerLoadState.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from attrs import asdict, evolve, frozen

from pipeline import InvalidArgument

from .worker_load import RankLoad

UNKNOWN_BATCHED_TOKENS = 10_000_000
"""Taken for the tokens of a batch where a worker does not say its own."""


@frozen
class BusyThresholds:
    """Above what a rank is busy; None: that test is off. Raises InvalidArgument, naming the field.

    The first is a fraction of all KV blocks, from 0 to 1, for the blocks in decode and for those in use; the second a
    number of tokens in prefill; the third the same as a fraction of the largest batch.
    """

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    def __attrs_post_init__(self) -> None:
        _check_range("active_decode_blocks_threshold", self.active_decode_blocks_threshold, 1.0)
        _check_range("active_prefill_tokens_threshold", self.active_prefill_tokens_threshold)
        _check_range("active_prefill_tokens_threshold_frac", self.active_prefill_tokens_threshold_frac)

    def updated(self, changed: BusyThresholds) -> BusyThresholds:
        """With those that are set in `changed`; the others stay."""
        return evolve(self, **{name: value for name, value in asdict(changed).items() if value is not None})


@frozen
class Capacity:
    """What each rank of a worker can hold; None: it does not say."""

    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None


def latch(load: RankLoad, capacity: Capacity, thresholds: BusyThresholds) -> bool | None:
    """The decode test at a report of the rank, to be kept until its next one; `load` has the report in it.

    True if one of the numbers of blocks is above, False if neither is, as last heard. None where it cannot be told:
    there is no threshold, or no capacity.
    """
    fraction, total = thresholds.active_decode_blocks_threshold, capacity.total_kv_blocks
    if fraction is None or not total:
        return None
    most = fraction * total
    return (load.active_decode_blocks or 0) > most or (load.kv_used_blocks or 0) > most


def is_rank_busy(load: RankLoad, latched: bool | None, capacity: Capacity, thresholds: BusyThresholds) -> bool:
    """Whether one of the tests says so; a rank without a latch is judged by its numbers as they are."""
    above = latch(load, capacity, thresholds)
    if above is not None and (above if latched is None else latched):
        return True
    tokens = load.active_prefill_tokens or 0
    most, fraction = thresholds.active_prefill_tokens_threshold, thresholds.active_prefill_tokens_threshold_frac
    if most is not None and tokens > most:
        return True
    batch_tokens = capacity.max_num_batched_tokens
    return fraction is not None and tokens > fraction * (
        UNKNOWN_BATCHED_TOKENS if batch_tokens is None else batch_tokens
    )


def is_worker_busy(
    ranks: Mapping[int, RankLoad], latches: Mapping[int, bool | None], capacity: Capacity, thresholds: BusyThresholds
) -> bool:
    """Whether every rank that has reported is busy; a worker of which nothing is known is not."""
    return bool(ranks) and all(
        is_rank_busy(load, latches.get(dp_rank), capacity, thresholds) for dp_rank, load in ranks.items()
    )


def _check_range(name: str, value: float | None, high: float | None = None) -> None:
    if value is None:
        return
    if not isfinite(value) or value < 0 or (high is not None and value > high):
        limits = "finite and not below 0" if high is None else f"between 0 and {high:g}"
        raise InvalidArgument(f"must be {limits}, got {value}", field=name)
