"""A server with its engines in one process sends the same bytes whether the tokens they offer are taken or read."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import anyio
import pytest

from engines import GenerateContext
from pipeline.testing import watch_streams
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import app
from tests.serving.worlds import Exchange, chat

TOKENS = 20


async def answers(config: GraphConfig, *, takes: bool, **fields: Any) -> tuple[list[tuple[int, list[Any]]], int]:
    """Return three chats that run at the same time, and how many of their tokens were taken."""
    taken = 0
    offer = GenerateContext.offer_token

    def offered(context: GenerateContext, token_id: int) -> bool:
        nonlocal taken
        is_taken = takes and offer(context, token_id)
        taken += is_taken
        return is_taken

    with watch_streams() as streams, patch.object(GenerateContext, "offer_token", offered):
        async with hosted_graph(config, HostOptions()) as opened:
            served = app({"m": opened.graph})
            exchanges = [chat(served, stream=True, max_tokens=TOKENS, **fields) for _ in range(3)]
            async with anyio.create_task_group() as tasks:
                for exchange in exchanges:
                    tasks.start_soon(exchange.run)
    assert streams.open == []
    return [_shown(exchange) for exchange in exchanges], taken


def _shown(exchange: Exchange) -> tuple[int, list[Any]]:
    chunks = exchange.chunks
    for chunk in chunks:
        for name in ("id", "created", "request_id"):
            chunk.pop(name, None)
    return exchange.status, chunks


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_a_client_gets_the_same_taken_and_read(router: Any, workers: int) -> None:
    config = GraphConfig(engine="mocker", router=router, workers=workers, seed=7)
    taken, count = await answers(config, takes=True)
    read, none = await answers(config, takes=False)
    assert (taken, none) == (read, 0)
    assert all(status == 200 for status, _ in taken)
    assert count == 3 * (TOKENS - 2), "all but the first and the last of each"


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": True, "top_logprobs": 1}])
async def test_where_an_item_has_more_than_a_token_all_is_read(fields: dict[str, Any]) -> None:
    config = GraphConfig(engine="mocker", seed=7)
    taken, count = await answers(config, takes=True, **fields)
    assert (taken, count) == ((await answers(config, takes=False, **fields))[0], 0)


async def test_a_client_gets_the_same_from_decode_workers() -> None:
    config = GraphConfig(engine="mocker", router="kv", workers=2, prefill_workers=1, seed=7)
    taken, count = await answers(config, takes=True)
    assert taken == (await answers(config, takes=False))[0]
    assert count == 3 * (TOKENS - 2)
