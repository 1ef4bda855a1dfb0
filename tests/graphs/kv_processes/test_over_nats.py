"""KV routers over a real NATS server that is killed: requests go on, and what the routers lost is repaired."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from operators.kv import shared_bookings
from pipeline.network import Runtime
from tests.graphs.kv_processes.worlds import Logs, held, is_known, routed, send_all, worker
from tests.operators.kv.load.worlds import ENDPOINT, placed, prompt, router_of, view
from tests.pipeline.network.nats.worlds import own_server
from tests.pipeline.network.worlds import eventually

WITHIN_S = 20.0
"""How long a repair may take on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_an_index_is_repaired_after_the_server_was_killed_under_load(tmp_path: Path) -> None:
    logs = Logs()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(own_server(tmp_path))
        here, front = [await stack.enter_async_context(Runtime.at(server.url)) for _ in range(2)]
        for worker_id in (1, 2):
            await stack.enter_async_context(worker(here, worker_id, logs))
        router, graph = await stack.enter_async_context(routed(front))
        await router.pool.ready(2)
        await send_all(graph)
        await eventually(lambda: is_known(router, logs), WITHIN_S)
        known = held(logs)
        await server.kill()
        await send_all(graph, first=100)
        assert held(logs) > known, "requests go on meanwhile"
        assert not is_known(router, logs)
        await server.start()
        await eventually(lambda: is_known(router, logs), WITHIN_S)


async def test_bookings_are_repaired_after_the_server_was_killed(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(own_server(tmp_path))
        routers = []
        for _ in range(2):
            runtime = await stack.enter_async_context(Runtime.at(server.url))
            peers = await stack.enter_async_context(shared_bookings(runtime, ENDPOINT))
            routers.append(await stack.enter_async_context(router_of(peers)))
        here, there = routers
        booked = [await placed(here, prompt(8, first=n), f"{n}") for n in range(6)]
        await eventually(lambda: view(there) == view(here) != view(router_of(None)), WITHIN_S)
        await server.kill()
        for one in booked[:4]:
            one.release()
        await placed(here, prompt(40), "meanwhile")
        await placed(there, prompt(20), "theirs")
        assert view(there) != view(here)
        await server.start()
        await eventually(lambda: view(there) == view(here), WITHIN_S)
        assert len(here.loads) == len(there.loads) == 4
