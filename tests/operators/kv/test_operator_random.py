"""Random faults, stops, kills, drops and waits: whatever happens, no booking and no place in the queue is left."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators import PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.kv.operator import KvPushRouter
from operators.kv.queue import PolicyClass, PolicyProfile
from pipeline import Annotated, AsyncEngine, CannotConnect, Context, Disconnected, ResponseStream
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RoutingHints
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait, run_in_virtual_time
from tests.operators.endings import BACKENDS, all_closed, ended, read, seeds

BUSY_ABOVE_TOKENS = 30


def script(payload: PreprocessedRequest) -> list[Any]:
    """What a worker does with a request: some items, then perhaps a fault or silence."""
    rng = Random(payload.token_ids[0])
    items: list[Any] = [Annotated(LLMEngineOutput([0] * rng.randrange(6))) for _ in range(rng.randrange(6))]
    steps = [step for item in items for step in ((item,) if rng.random() < 0.7 else (Wait(rng.random()), item))]
    error = Disconnected("lost")
    ends: list[list[Any]] = [
        [],
        [Annotated(LLMEngineOutput.stop())],
        [Fail(error)],
        [Annotated[Any].from_error(error)],
        [Annotated(LLMEngineOutput.error("broken"))],
        [Stall()],
    ]
    return steps + rng.choice(ends)


class Flaky(ScriptedEngine):
    """Refuses one in six outright, some of them after a while."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        seed = request.payload.token_ids[0]
        if seed % 6 == 5:
            await anyio.sleep(seed % 2)
            raise CannotConnect("not now")
        return await super().generate(request)


def payload_of(seed: int) -> PreprocessedRequest:
    rng = Random(seed)
    hints = RoutingHints(backend_instance_id=1 + rng.randrange(4)) if rng.random() < 0.2 else None  # 4 is not there
    return PreprocessedRequest([seed] * rng.randrange(1, 40), routing=hints)


async def one(graph: AsyncEngine[Any, Any], seed: int, ending: str) -> None:
    """One request that ends in that way, whatever it meets, perhaps while it still waits for its place."""
    rng = Random(seed)
    metadata = {"x-dynamo-session-id": str(seed % 3)} if rng.random() < 0.3 else {}
    request = Context(payload_of(seed), metadata=metadata)
    await anyio.sleep(rng.random() * 10)
    async with ended(request, ending, rng.random() * 2, rng.random()):
        await read(await graph.generate(request), ending, rng.randrange(4))


@given(
    requests=seeds(40),
    backend=BACKENDS,
    queues=st.booleans(),
    session_ttl_s=st.sampled_from([None, 5.0]),
)
@settings(max_examples=40)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
def test_no_booking_and_no_place_in_the_queue_is_left(
    requests: list[tuple[int, str]], backend: Any, queues: bool, session_ttl_s: float | None
) -> None:
    async def run() -> None:
        workers = static_workers({i: Flaky(script) for i in (1, 2, 3)})
        threshold = BUSY_ABOVE_TOKENS if queues else None
        router = kv_router(
            workers,
            KvRouterConfig(use_kv_events=False, router_track_output_blocks=True),
            block_size_tokens=4,
            rng=Random(1),
            profile=PolicyProfile.single(PolicyClass(prefill_busy_threshold=threshold)),
            session_ttl_s=session_ttl_s,
            expiry_s=1e9,  # nothing is healed by time
        )
        graph = KvPushRouter(router) >> PushRouter(workers, cooldown_s=0)
        async with all_closed() as tasks:
            for seed, ending in requests:
                tasks.start_soon(one, graph, seed, ending)
        assert (len(router.loads), len(router.queue)) == (0, 0)
        ranks = router.loads.sequences.ranks()
        loads = router.loads.sequences.project((), ranks, anyio.current_time())
        assert (sum(loads.prefill_tokens), sum(loads.decode_blocks), sum(loads.requests)) == (0, 0, 0)
        if router.sessions is not None:
            await anyio.sleep(6)
            router.sessions.expire()
            assert len(router.sessions) == 0

    run_in_virtual_time(run, backend=backend)
