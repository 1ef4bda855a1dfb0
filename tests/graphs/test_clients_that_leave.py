"""Clients that leave take their work with them: nothing is prefilled or decoded for a client that has left.

client ──► prefill router's queue ──► prefill worker's queue ──► computed ──► transferred ──► decode
  └─ leaves: the request is dropped wherever it waits; a transfer under way is finished
"""

from __future__ import annotations

from contextlib import suppress
from math import inf
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.mocker import MockEngineArgs
from operators.kv import KvRouterConfig
from pipeline import Context, PenstockError
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import OpenStreams, watch_streams
from serving.deployment import StandardGraph
from tests.graphs.worlds import open_fleet

CLIENTS = [25, pytest.param(100, marks=pytest.mark.slow)]
PROMPT_TOKENS = 8_000
LEAVES_AFTER_S = 0.01
LARGE = MockEngineArgs()
"""A cache that holds all prompts."""
ROUTERS: dict[str, dict[str, Any]] = {
    "round-robin": {"router": "round-robin"},
    "kv": {},
    "kv without a queue": {"kv_router": KvRouterConfig(router_queue_threshold=None)},
}


def chat(number: int, prompt_tokens: int = PROMPT_TOKENS, max_tokens: int = 4) -> ChatCompletionRequest:
    """A chat whose prompt shares no block with that of another number."""
    text = "".join(Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=prompt_tokens))
    return ChatCompletionRequest(
        model="echo", messages=[ChatMessage(role="user", content=text)], max_tokens=max_tokens, seed=number
    )


async def answered_after_s(graph: StandardGraph, request: ChatCompletionRequest) -> float:
    """Send the request and return the seconds until its answer, of `max_tokens` tokens, ended."""
    began_s = anyio.current_time()
    items = await (await graph.generate(Context(request))).collect()
    assert sum(len(item.data.token_ids) for item in items if item.data is not None) == request.max_tokens
    return anyio.current_time() - began_s


async def leave(graph: StandardGraph, chat: ChatCompletionRequest, how: str, after_s: float) -> None:
    """Send a chat and leave after a while: by stop or kill, by a cancelled task, or by closing the stream."""
    request = Context(chat)

    async def end() -> None:
        await anyio.sleep(after_s)
        getattr(request, how)()

    async with anyio.create_task_group() as tasks:
        if how in ("stop", "kill"):
            tasks.start_soon(end)
        with suppress(PenstockError), anyio.move_on_after(after_s if how in ("close", "cancel") else 3600) as waiting:
            stream = await graph.generate(request)
            async with stream:
                if how == "close":
                    until_s, waiting.deadline = waiting.deadline, inf
                    await anyio.sleep_until(until_s)
                    return
                async for _ in stream:
                    pass


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("how", ["kill", "close", "cancel"])
@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_the_next_request_does_not_wait_for_clients_that_have_left(
    router: str, meets: bool, how: str, clients: int, open_streams: OpenStreams
) -> None:
    """It took 100 times as long; it waits at most for the step that runs when they leave."""
    async with open_fleet(1, 1, meets=meets, args=LARGE, environment={}, **ROUTERS[router]) as fleet:
        idle_s = await answered_after_s(fleet.graph, chat(clients))
        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(leave, fleet.graph, chat(number), how, LEAVES_AFTER_S)
            await anyio.sleep(2 * LEAVES_AFTER_S)
            assert await answered_after_s(fleet.graph, chat(clients + 1)) < 2 * idle_s
        await anyio.sleep(60)
        fleet.assert_idle()


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
@pytest.mark.parametrize("meets", [True, False])
async def test_a_request_in_the_router_s_queue_whose_client_left_goes_to_no_worker(
    meets: bool, how: str, clients: int
) -> None:
    """Also if the worker does not promise that prefills may be stopped."""
    async with open_fleet(1, 1, meets=meets, args=LARGE, environment={}, stops_prefills=False) as fleet:
        (host,) = fleet.of("prefill")
        sent = 0
        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(leave, fleet.graph, chat(number), how, LEAVES_AFTER_S)
            await anyio.sleep(2 * LEAVES_AFTER_S)
            sent = host.engine.requests
            assert 0 < sent < 5
        await anyio.sleep(60)
        assert (host.engine.requests, host.engine.stopped) == (sent, 0)
        fleet.assert_idle()


@pytest.mark.slow
@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
async def test_no_step_begins_after_the_last_client_has_left_and_nothing_stays(
    router: str, meets: bool, seed: int
) -> None:
    rng = Random(seed)
    async with open_fleet(2, 2, meets=meets, seed=seed, environment={}, **ROUTERS[router]) as fleet:
        with watch_streams() as streams:
            last_s = began_s = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for number in range(30):
                    how, after_s = rng.choice(["stop", "kill", "cancel"]), rng.choice([0.0, rng.uniform(0, 0.4)])
                    last_s = max(last_s, began_s + after_s)
                    leaving = chat(number, rng.randrange(1, 120), max_tokens=60)
                    tasks.start_soon(leave, fleet.graph, leaving, how, after_s)
                    if rng.random() < 0.3:
                        began_s += (pause_s := rng.uniform(0, 0.02))
                        await anyio.sleep(pause_s)
            await anyio.sleep(60)
            assert streams.open == []
        fleet.assert_idle()
        assert max(engine.timing.last_step_s for engine in fleet.engines) <= last_s
        assert await answered_after_s(fleet.graph, chat(1000, 50)) < 1
