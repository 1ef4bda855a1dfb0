"""Clients that leave take their work with them: nothing is prefilled or decoded for a client that has left.

client ──► prefill router's queue ──► prefill worker's queue ──► computed ──► handed over ──► decode
  └─ leaves: the request is dropped wherever it waits; what is being handed over is finished
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

pytestmark = pytest.mark.anyio

CLIENTS = 100
PROMPT_TOKENS = 8_000
LEAVES_AFTER_S = 0.01
LARGE = MockEngineArgs()
ROUTERS: dict[str, dict[str, Any]] = {
    "round-robin": {"router": "round-robin"},
    "kv": {},
    "kv without a queue": {"kv_router": KvRouterConfig(router_queue_threshold=None)},
}


def chat(number: int, prompt_tokens: int = PROMPT_TOKENS, max_tokens: int = 4) -> ChatCompletionRequest:
    """A prompt that shares no block with another one."""
    text = "".join(Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=prompt_tokens))
    return ChatCompletionRequest(
        model="echo", messages=[ChatMessage(role="user", content=text)], max_tokens=max_tokens, seed=number
    )


async def answered_after_s(graph: Any, request: ChatCompletionRequest) -> float:
    """How long a request takes to its end."""
    began_s = anyio.current_time()
    items = await (await graph.generate(Context(request))).collect()
    assert sum(len(item.data.token_ids) for item in items if item.data is not None) == request.max_tokens
    return anyio.current_time() - began_s


async def leave(graph: Any, asked: ChatCompletionRequest, how: str, after_s: float) -> None:
    """Ask, and leave after a while: by stop or kill, a cancelled task, or by closing the stream once there is one."""
    request = Context(asked)

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


@pytest.mark.parametrize("how", ["kill", "close", "cancel"])
@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_the_next_request_does_not_wait_for_clients_that_have_left(
    router: str, meets: bool, how: str, fleet: Any, open_streams: OpenStreams
) -> None:
    """Issue 12, point 22: it took 100 times as long. A pass that runs when they leave is the most it waits for."""
    async with fleet(1, 1, meets=meets, args=LARGE, environment={}, **ROUTERS[router]) as it:
        idle_s = await answered_after_s(it.graph, chat(CLIENTS))
        async with anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(leave, it.graph, chat(number), how, LEAVES_AFTER_S)
            await anyio.sleep(2 * LEAVES_AFTER_S)
            assert await answered_after_s(it.graph, chat(CLIENTS + 1)) < 2 * idle_s
        await anyio.sleep(60)
        it.assert_idle()


@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
@pytest.mark.parametrize("meets", [True, False])
async def test_what_waits_in_the_routers_queue_is_not_sent_to_any_worker(meets: bool, how: str, fleet: Any) -> None:
    """Issue 12, point 22: also where the worker makes no promise about prefills that are stopped."""
    async with fleet(1, 1, meets=meets, args=LARGE, environment={}, stops_prefills=False) as it:
        (host,) = it.of("prefill")
        sent = 0
        async with anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(leave, it.graph, chat(number), how, LEAVES_AFTER_S)
            await anyio.sleep(2 * LEAVES_AFTER_S)
            sent = host.engine.requests
            assert 0 < sent < 5
        await anyio.sleep(60)
        assert (host.engine.requests, host.engine.stopped) == (sent, 0)
        it.assert_idle()


@pytest.mark.slow
@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
async def test_whenever_they_leave_nothing_is_begun_for_them_and_nothing_stays(
    router: str, meets: bool, seed: int, fleet: Any
) -> None:
    rng = Random(seed)
    async with fleet(2, 2, meets=meets, seed=seed, environment={}, **ROUTERS[router]) as it:
        with watch_streams() as streams:
            last_s = began_s = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                for number in range(30):
                    how, after_s = rng.choice(["stop", "kill", "cancel"]), rng.choice([0.0, rng.uniform(0, 0.4)])
                    last_s = max(last_s, began_s + after_s)
                    asked = chat(number, rng.randrange(1, 120), max_tokens=60)
                    tasks.start_soon(leave, it.graph, asked, how, after_s)
                    if rng.random() < 0.3:
                        began_s += (pause_s := rng.uniform(0, 0.02))
                        await anyio.sleep(pause_s)
            await anyio.sleep(60)
            assert streams.open == []
        it.assert_idle()
        assert max(engine.timing.last_pass_s for engine in it.engines) <= last_s
        assert await answered_after_s(it.graph, chat(1000, 50)) < 1
