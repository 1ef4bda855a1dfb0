"""What a look at a blocked queue costs: 256 busy workers, 2,000 waiting requests, and none of them may go.

    python -m benchmarks.kv_queue

The router looks at its queue after each change of load. `one lane`: the requests may go to the same workers, so they
wait in one line. `2,000 lanes`: each allows eight workers of its own. `taken and freed`: a worker that none of them
allows takes a prompt and ends it, with a look after each of both.
"""

from __future__ import annotations

from random import Random
from time import perf_counter

import anyio
from anyio.lowlevel import checkpoint

from operators.kv import (
    KvRouter,
    KvRouterConfig,
    PolicyClass,
    PolicyProfile,
    PromptBlocks,
    RouteRequest,
    WorkerRank,
    kv_router,
)
from operators.kv.load import SequenceLoad
from pipeline.network import static_workers
from pipeline.testing import ScriptedEngine

from .kv_index import show
from .measure import Result

WORKERS, WAITING, ALLOWED, BLOCK_TOKENS = 256, 2000, 8, 16
LOOKS, REPEATS = 5, 7
BUSY_WITH_ANY_PROMPT = PolicyProfile.single(PolicyClass(prefill_busy_threshold=0))


def _router() -> KvRouter:
    pool = static_workers({worker_id: ScriptedEngine([]) for worker_id in range(WORKERS + 1)})
    config = KvRouterConfig(use_kv_events=False)
    return kv_router(pool, config, block_size_tokens=BLOCK_TOKENS, profile=BUSY_WITH_ANY_PROMPT, rng=Random(1))


def _request(number: int, **rules: object) -> RouteRequest:
    return RouteRequest(blocks=PromptBlocks([number] * BLOCK_TOKENS, BLOCK_TOKENS), **rules)  # type: ignore[arg-type]


async def _wait_for_one_of(router: KvRouter, request: RouteRequest, number: int) -> None:
    await router.reserve(request, request_id=f"w{number}")


async def _look_s(lanes: bool, is_taken_and_freed: bool) -> float:
    """Seconds of a look at the queue: the fastest of some passes."""
    random, router, best = Random(1), _router(), float("inf")
    all_workers = list(range(WORKERS))
    for worker_id in all_workers:
        await router.reserve(_request(worker_id, worker_id=worker_id), request_id=f"b{worker_id}")
    async with anyio.create_task_group() as tasks:
        for number in range(WAITING):
            allowed = frozenset(random.sample(all_workers, ALLOWED) if lanes else all_workers)
            tasks.start_soon(_wait_for_one_of, router, _request(number, allowed_worker_ids=allowed), number)
        while len(router.queue) < WAITING:
            await checkpoint()
        for _ in range(REPEATS):
            best = min(best, await _timed(router, is_taken_and_freed))
        assert len(router.queue) == WAITING
        tasks.cancel_scope.cancel()
    return best


async def _timed(router: KvRouter, is_taken_and_freed: bool) -> float:
    took = 0.0
    for _ in range(LOOKS):
        if is_taken_and_freed:
            load = router.loads.sequences.book("other", WorkerRank(WORKERS), SequenceLoad((), BLOCK_TOKENS), 0.0)
            took -= perf_counter()
            router.queue.drain()
            router.loads.sequences.release(load, 0.0)
            router.queue.drain()
            took += perf_counter()
        else:
            took -= perf_counter()
            router.queue.drain()
            took += perf_counter()
    return took / LOOKS


async def measure() -> list[Result]:
    """Measure looks at a blocked queue."""
    rows = {"one lane": (False, False), "2,000 lanes": (True, False), "2,000 lanes, taken and freed": (True, True)}
    name = f"look at a blocked queue, {WORKERS} workers, {WAITING:,} waiting, "
    return [Result(name + row, 1e6 * await _look_s(*case), "µs") for row, case in rows.items()]


if __name__ == "__main__":
    show(anyio.run(measure))
