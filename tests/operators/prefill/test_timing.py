"""What the tracker knows of a request that one worker prefills and another goes on with."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from operators import KvPushRouter, PushRouter
from operators.kv import KvRouterConfig, kv_router
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols.timing import WorkerIdInfo
from pipeline.testing import Wait

from .worlds import everywhere, prefill_world, prefilled, prompt, tokens


def below_a_kv_router(decode: Any) -> Any:
    """Worker 9 decodes."""
    workers = static_workers({9: decode}, name="decode")
    router = kv_router(workers, KvRouterConfig(use_kv_events=False), block_size_tokens=4, rng=Random(1))
    return KvPushRouter(router) >> PushRouter(workers)


@pytest.mark.parametrize("late_s", [0, 30])
@pytest.mark.parametrize("meets", [False, True])
async def test_the_times_are_those_of_both_halves(meets: bool, late_s: float) -> None:
    """The prefill worker may send more, also behind decode's end where that does not wait for it."""
    prefill = [Wait(2), prefilled(), Wait(late_s), *tokens(5)]
    decode = [Wait(5), *tokens(1), Wait(1), *tokens(6)]
    configs = everywhere() if meets else {}
    tracker = track_request(lambda: 0)
    async with prefill_world(script=prefill, decode=decode, configs=configs, below=below_a_kv_router) as it:
        await it.collect(prompt(tracker=tracker))
        began_s = 0 if meets else 2 + late_s  # when decode got the request
        await anyio.sleep(40)
        it.assert_idle()
    assert (tracker.osl_tokens, tracker.ttft_ms, tracker.total_time_ms) == (7, 2000, (began_s + 6) * 1000)
    assert tracker.kv_transfer_estimated_latency_s == began_s + 5 - 2
    info = tracker.worker_info()
    assert isinstance(info, WorkerIdInfo)
    assert (info.prefill_worker_id in (1, 2, 3), info.decode_worker_id) == (True, 9)


async def test_without_prefill_workers_nothing_is_transferred() -> None:
    tracker = track_request(lambda: 0)
    async with prefill_world(present=(), below=below_a_kv_router) as it:
        await it.collect(prompt(tracker=tracker))
    assert (tracker.osl_tokens, tracker.kv_transfer_estimated_latency_s) == (3, None)
