"""The same load gives the same counts in real time and in virtual time; only the times depend on the machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig
from serving.replay import Report, SyntheticLoad, Trace, run_config

ROUTERS = ("kv", "round-robin")


def load(count: int) -> Trace:
    made = SyntheticLoad(
        input_tokens=192,
        output_tokens=6,
        request_count=count,
        arrival_interval_ms=200.0,
        shared_prefix_ratio=0.67,
        num_prefix_groups=5,
        trace_block_size=64,
    )
    return made.make()


def both(router: Any, trace: Trace, **how: Any) -> list[Report]:
    """By the clock on asyncio, and in virtual time on trio."""
    config = GraphConfig(engine="mocker", workers=3, router=router, seed=7, engine_args={"speedup_ratio": "100"})
    main = partial(run_config, config, trace, per_request=True, **how)
    return [anyio.run(main), run_in_virtual_time(main, backend="trio")]


def lengths(report: Report) -> list[tuple[Any, ...]]:
    assert report.per_request is not None
    return sorted((one.name, one.status, one.input_length, one.output_length) for one in report.per_request)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_burst_in_real_time_and_in_virtual_time_counts_the_same(router: str) -> None:
    """Two hundred arrivals of forty seconds, five hundred times as fast: requests meet, so caches may differ."""
    real, virtual = both(router, load(200), speed_up=500.0)
    assert (real.completed_requests, real.rejected_requests, real.failed_requests) == (200, 0, 0)
    assert lengths(real) == lengths(virtual)
    assert (real.total_input_tokens, real.total_output_tokens) == (200 * 192, 200 * 6)
    assert real.duration_ms > virtual.duration_ms >= 199 * 200 / 500


@pytest.mark.parametrize("router", ROUTERS)
def test_one_request_after_another_meets_the_same_caches_in_both_times(router: str) -> None:
    real, virtual = both(router, load(20), sessions_at_a_time=1)
    for report in (real, virtual):
        assert report.completed_requests == 20
        assert report.prefix_cache_reused_ratio > 0.1
    assert real.per_request is not None
    assert virtual.per_request is not None
    for one, other in zip(real.per_request, virtual.per_request, strict=True):
        assert (one.name, one.worker, one.reused_input_tokens) == (other.name, other.worker, other.reused_input_tokens)
