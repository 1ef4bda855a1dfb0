"""Random faults, stops, kills and drops: nothing stays in flight, and every exclusion ends."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators import PushRouter
from operators.pool.push_router import RouterMode
from pipeline import (
    Annotated,
    CannotConnect,
    Context,
    Disconnected,
    InvalidArgument,
    ResponseStream,
    WorkerOverloaded,
)
from pipeline.network import static_workers
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait, run_in_virtual_time
from tests.operators.endings import BACKENDS, all_closed, ended, read, seeds

COOLDOWN_S = 5.0
MODES: list[RouterMode] = ["round_robin", "random", "power_of_two_choices", "least_loaded", "device_aware_weighted"]


def script(seed: int) -> list[Any]:
    """What an instance does with a request: some items, then perhaps a fault, a refusal or silence."""
    rng = Random(seed)
    steps: list[Any] = [Annotated(n) if rng.random() < 0.7 else Wait(rng.random()) for n in range(rng.randrange(6))]
    error = rng.choice([Disconnected("lost"), WorkerOverloaded("full"), InvalidArgument("wrong")])
    end = rng.choice(["well", "well", "raises", "says", "stalls"])
    endings: dict[str, list[Any]] = {"raises": [Fail(error)], "says": [Annotated[Any].from_error(error)]}
    return steps + endings.get(end, [Stall()] if end == "stalls" else [])


class Flaky(ScriptedEngine):
    """Refuses one in eight outright, and plays the script of the request for the others."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        if request.payload % 8 == 7:
            raise CannotConnect("not now")
        return await super().generate(request)


async def one(router: PushRouter[Any, Any], seed: int, ending: str) -> None:
    """One request that ends in that way, whatever it meets."""
    request, rng = Context(seed), Random(seed)
    await anyio.sleep(rng.random() * 10)
    by_reader = ending in ("stop", "kill")
    async with ended(request, "read" if by_reader else ending, 0, rng.random()):
        await read(await router.generate(request), ending, rng.randrange(4), request)


@given(requests=seeds(40), mode=st.sampled_from(MODES), backend=BACKENDS, has_limit=st.booleans())
@settings(max_examples=40)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
def test_nothing_stays_in_flight_and_every_exclusion_ends(
    requests: list[tuple[int, str]], mode: RouterMode, backend: Any, has_limit: bool
) -> None:
    async def run() -> None:
        engines = {i: Flaky(script) for i in (1, 2, 3)}
        limit_s = 2.0 if has_limit else None
        router = PushRouter(static_workers(engines), mode, Random(1), cooldown_s=COOLDOWN_S, silence_timeout_s=limit_s)
        async with all_closed() as tasks:
            for seed, ending in requests:
                tasks.start_soon(one, router, seed, ending)
        assert {i: load.in_flight for i, load in router.loads.current().items()} == {1: 0, 2: 0, 3: 0}
        assert sum(engine.open for engine in engines.values()) == 0
        await anyio.sleep(COOLDOWN_S)
        assert list(router.health.view.free) == [1, 2, 3]

    run_in_virtual_time(run, backend=backend)
