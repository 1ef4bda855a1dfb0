"""Whose turn it is to prefill, in every mode."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pipeline.llm import track_request
from pipeline.protocols import RequestPhase, RoutingHints

pytestmark = pytest.mark.anyio

MODES = ["kv", "round_robin", "random", "power_of_two_choices", "least_loaded", "device_aware_weighted"]


@pytest.mark.parametrize("mode", MODES)
async def test_every_worker_has_its_share(mode: str, deployment: Any, made: Any) -> None:
    """The worker found is used: whoever draws by chance draws anew for the next request."""
    async with deployment(mode, workers=tuple(range(1, 7))) as it:
        for number in range(120):
            await it.ask(made.prompt(token_ids=[number] * 8) if mode == "kv" else None)
        assert min(len(engine.requests) for engine in it.engines.values()) >= 5


async def test_a_worker_the_request_names_prefills_also_if_all_were_switched_off_meanwhile(
    deployment: Any, made: Any
) -> None:
    """Only an endpoint that was never there is one that is not activated."""
    for mode in ["direct", *MODES]:
        tracker = track_request(lambda: 0)
        async with deployment(mode) as it:
            held = await tracker.set_phase(RequestPhase.AGGREGATED)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(it.ask, made.prompt(tracker=tracker, routing=RoutingHints(prefill_worker_id=2)))
                await anyio.sleep(1)
                it.router.deactivate()
                held.release()
            assert len(it.engines[2].requests) == 1
            assert it.decodes[0].payload.routing.prefill_worker_id == 2
