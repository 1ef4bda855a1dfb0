"""Requests that two servers share end in every way at every time: nothing stays at the servers, nothing here."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from engines.upstream import kv_connector
from pipeline import Context, PenstockError
from tests.engines.upstream.handover_worlds import sglang_world, vllm_world
from tests.engines.upstream.worlds import continued, prompt, tokens_of

PROMPT = [5, 6, 7]
REQUESTS = 60
TOKENS = 20


async def ending(graph: Any, how: str, after_s: float) -> None:
    """Send a request and end it that way; an answer that is not disturbed is right."""
    context = Context(prompt(TOKENS))
    found: list[Any] = []

    async def read() -> None:
        async with await graph.generate(context) as stream:
            async for item in stream:
                if item.error is not None:
                    raise item.error
                found.append(item.data)
                if how == "drop" and len(found) > after_s * 30:
                    return

    async with anyio.create_task_group() as tasks:

        async def end() -> None:
            await anyio.sleep(after_s)
            if how in ("stop", "kill"):
                getattr(context, how)()
            elif how == "cancel":
                tasks.cancel_scope.cancel()

        tasks.start_soon(end)
        try:
            await read()
        except PenstockError:
            assert how in ("stop", "kill")
    tokens = tokens_of([output for output in found if output is not None])
    assert tokens == continued(PROMPT, TOKENS)[: len(tokens)]
    assert how != "none" or len(tokens) == TOKENS


async def endings(graph: Any, seed: int) -> None:
    rng = Random(seed)
    async with anyio.create_task_group() as tasks:
        for _ in range(REQUESTS):
            how = rng.choice(("none", "stop", "kill", "drop", "cancel"))
            tasks.start_soon(ending, graph, how, rng.uniform(0.0, 0.8))
            await anyio.sleep(rng.uniform(0.0, 0.05))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_two_vllm_servers_keep_neither_requests_nor_blocks(seed: int) -> None:
    connector = kv_connector("nixl")
    slow = {"accept_s": 0.1, "queue_s": 0.1}
    # Without a time of the token no request ends between the end of a prefill and its answer, whose blocks stay.
    async with vllm_world(connector, prefill={"prefill_s": 0.2, "token_s": 0.0}, decode=slow) as halved:
        await endings(halved.graph, seed)
        await anyio.sleep(5.0)  # what was given up before decode had it is fetched meanwhile
        await halved.idle()
        assert len(connector.leases) == 0


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_two_sglang_servers_keep_no_requests(seed: int) -> None:
    async with sglang_world(prefill={"prefill_s": 0.2}) as halved:
        await endings(halved.graph, seed)
        await anyio.sleep(1.0)
        assert halved.running == (0, 0)
