"""Random faults, stops, kills, drops and cancellations: no task, no phase, no booking and no stream is left."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from operators import KvPrefill, KvPushRouter, PrefillRouter, PrefillSettings, PushPrefill, PushRouter
from operators.kv import KvRouter, KvRouterConfig, PolicyClass, PolicyProfile, kv_router
from pipeline import Annotated, AsyncEngine, CannotConnect, Context, Disconnected, ResponseStream
from pipeline.llm import track_request
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RequestPhase, RequestTracker, RoutingHints
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait, run_in_virtual_time
from tests.operators.endings import BACKENDS, ENDINGS, all_closed, ended, read, seeds

from .worlds import present_workers

ERROR = Disconnected("lost")
MEETING = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}


def handed(rng: Random) -> Annotated[LLMEngineOutput]:
    params = rng.choice([{"handle": 1}, {"handle": 1}, MEETING, None, {"worker_id": {"prefill_worker_id": 1}}])
    return Annotated(LLMEngineOutput([1], disaggregated_params=params))


def half(seed: int, prefills: bool) -> list[Any]:
    """What a worker does with its half: perhaps nothing for a while, some items, then perhaps a fault or silence."""
    rng = Random(seed * 2 + prefills)
    items = [handed(rng) if prefills else Annotated(LLMEngineOutput([1])) for _ in range(rng.randrange(4))]
    steps = [step for item in items for step in ((item,) if rng.random() < 0.6 else (Wait(rng.random() * 3), item))]
    ends: list[list[Any]] = [[], [], [], [Fail(ERROR)], [Annotated[Any].from_error(ERROR)], [Stall()], [Wait(20)]]
    return steps + rng.choice(ends)


class Flaky(ScriptedEngine):
    """Refuses one in six outright, some of them after a while."""

    def __init__(self, prefills: bool) -> None:
        super().__init__(lambda payload: half(payload.token_ids[0], prefills))
        self._prefills = prefills

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        rng = Random(request.payload.token_ids[0] * 3 + self._prefills)
        if rng.random() < 0.3:
            await anyio.sleep(rng.random() * 2)
        if rng.random() < 0.15:
            raise CannotConnect("not now")
        return await super().generate(request)


async def one(graph: AsyncEngine[Any, Any], seed: int, ending: str, tracker: RequestTracker) -> None:
    """One request that ends in that way, whatever it meets, perhaps while it still waits for its prefill."""
    rng = Random(seed)
    hints = RoutingHints(prefill_worker_id=1 + rng.randrange(4)) if rng.random() < 0.2 else None  # 4 is not there
    request = Context(PreprocessedRequest([seed] * rng.randrange(1, 30), routing=hints, tracker=tracker))
    await anyio.sleep(rng.random() * 10)
    for _ in range(2 if ending == "again" else 1):  # the second time as Migration does it
        async with ended(request, ending, rng.random() * 4, rng.random() * 3):
            await read(await graph.generate(request.child(request.payload)), ending, rng.randrange(3))


def side_of(kv: bool, workers: Any) -> tuple[Any, KvRouter | None]:
    if not kv:
        return PushPrefill(PushRouter(workers, cooldown_s=0)), None
    router = kv_router(
        workers,
        KvRouterConfig(use_kv_events=False),
        block_size_tokens=4,
        rng=Random(1),
        profile=PolicyProfile.single(PolicyClass(prefill_busy_threshold=40)),
        expiry_s=1e9,  # nothing is healed by time
    )
    stage = KvPushRouter(router)
    return KvPrefill(stage, stage >> PushRouter(workers, cooldown_s=0)), router


@given(
    requests=seeds(20, (*ENDINGS, "read", "again")),
    backend=BACKENDS,
    kv=st.booleans(),
    meets=st.booleans(),
    leaves_s=st.sampled_from([None, 5.0]),
)
@settings(max_examples=40)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
def test_nothing_is_left(
    requests: list[tuple[int, str]], backend: Any, kv: bool, meets: bool, leaves_s: float | None
) -> None:
    endpoint = ModelRuntimeConfig(disaggregated_endpoint=DisaggregatedEndpoint("h", 1) if meets else None)

    async def run() -> None:
        engines = {i: Flaky(prefills=True) for i in (1, 2, 3)}
        workers = static_workers(engines)
        side, chosen_by = side_of(kv, workers)
        decode = Flaky(prefills=False)
        limits = PrefillSettings(prefill_timeout_s=15)
        trackers = [track_request(lambda: 0) for _ in requests]
        async with AnyIOScheduler() as scheduler:
            router = PrefillRouter(
                side,
                present_workers(1, 2, 3, configs=dict.fromkeys((1, 2, 3), endpoint)).views,
                scheduler=scheduler,
                settings=limits,
                rng=Random(3),
            )
            async with all_closed(settle_s=40) as tasks:
                for (seed, ending), tracker in zip(requests, trackers, strict=True):
                    tasks.start_soon(one, router >> decode, seed, ending, tracker)
                if leaves_s is not None:
                    tasks.start_soon(leave, router, leaves_s)
            assert router.prefills == 0
            assert decode.open == sum(engine.open for engine in engines.values()) == 0
        with anyio.fail_after(1):
            for tracker in trackers:
                (await tracker.set_phase(RequestPhase.AGGREGATED)).release()
        if chosen_by is not None:
            assert (len(chosen_by.loads), len(chosen_by.queue)) == (0, 0)

    run_in_virtual_time(run, backend=backend)


async def leave(router: PrefillRouter, after_s: float) -> None:
    """The operator's end, perhaps in the middle of it all; after it requests go without prefill."""
    await anyio.sleep(after_s)
    async with router:
        pass
    for _ in range(3):
        await checkpoint()
    assert router.prefills == 0
