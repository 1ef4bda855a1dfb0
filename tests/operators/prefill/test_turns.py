"""The turns of prefill workers: which one each request goes to, in every mode of the prefill pool."""

from __future__ import annotations

import anyio
import pytest

from pipeline.llm import track_request
from pipeline.protocols import RequestPhase, RoutingHints

from .worlds import MODES, Mode, prefill_world, prompt


@pytest.mark.parametrize("mode", MODES)
async def test_every_prefill_worker_gets_its_share_of_the_requests(mode: Mode) -> None:
    """The worker is chosen anew for each request, also where chance decides."""
    async with prefill_world(mode, workers=tuple(range(1, 7))) as it:
        for number in range(120):
            # With the KV router each prompt is another one: the same one would go where it is cached.
            await it.collect(prompt(token_ids=[number] * 8) if mode == "kv" else None)
        assert min(len(engine.requests) for engine in it.engines.values()) >= 5


@pytest.mark.parametrize("mode", ["direct", *MODES])
async def test_a_request_that_names_its_prefill_worker_goes_there_also_if_prefill_was_switched_off_meanwhile(
    mode: Mode,
) -> None:
    """Switching off is for requests to come; this one had begun, and only waited for its phase."""
    tracker = track_request(lambda: 0)
    async with prefill_world(mode) as it:
        phase = await tracker.set_phase(RequestPhase.AGGREGATED)  # held, so that the request waits
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.collect, prompt(tracker=tracker, routing=RoutingHints(prefill_worker_id=2)))
            await anyio.sleep(1)
            it.router.deactivate()
            phase.release()
        assert len(it.engines[2].requests) == 1
        assert it.decodes[0].payload.routing.prefill_worker_id == 2
