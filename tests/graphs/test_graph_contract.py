"""Whole graphs hold the engine contract, on the embedded runtime as well as over a fixed pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines import EchoEngine, as_engine
from operators import BusyThresholds, Detokenize, Model, Preprocess, PushRouter
from operators.kv import KvRouterConfig
from pipeline.network import static_workers
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import Faults, Probe, check_engine
from serving.deployment import GraphConfig, standard_graph


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="echo", messages=[ChatMessage(role="user", content="x" * 60)], **fields)


@asynccontextmanager
async def over_a_fixed_pool() -> AsyncIterator[Any]:
    """A graph over two engines without a runtime."""
    model = Model.byte_level("echo")
    async with as_engine(EchoEngine()) as one, as_engine(EchoEngine()) as two:
        pool = static_workers({1: one, 2: two})
        yield Preprocess(model) >> Detokenize(model) >> Faults(delay_s=0.01) >> Probe() >> PushRouter(pool)


NO_CACHE = {"enable_prefix_caching": "false"}
"""Otherwise the usage of an answer depends on the requests before it, through the cached tokens."""

GRAPHS: dict[str, Callable[[], Any]] = {
    "one worker": lambda: standard_graph(GraphConfig()),
    "slow workers": lambda: standard_graph(GraphConfig(workers=3, engine_args={"delay_s": "0.05"})),
    "random routing": lambda: standard_graph(GraphConfig(workers=2, router="random", seed=1)),
    "busy thresholds": lambda: standard_graph(
        GraphConfig(engine="mocker", engine_args=NO_CACHE, workers=2, router="p2c", seed=1, busy=BusyThresholds(1.0))
    ),
    "KV routing": lambda: standard_graph(
        GraphConfig(engine="mocker", engine_args=NO_CACHE, workers=2, router="kv", seed=1)
    ),
    "approximate KV routing": lambda: standard_graph(
        GraphConfig(workers=2, router="kv", kv_router=KvRouterConfig(use_kv_events=False), seed=1)
    ),
    "a fixed pool": over_a_fixed_pool,
}


@pytest.mark.parametrize("name", GRAPHS)
async def test_a_whole_graph_holds_the_engine_contract(name: str) -> None:
    await check_engine(GRAPHS[name], request=chat(), bad_request=chat(temperature=9), slack_items=16)


@pytest.mark.parametrize("fields", [{"n": 3}, {"stop": "y"}, {"max_tokens": 40}])
async def test_it_holds_for_several_choices_stop_strings_and_token_limits(fields: dict[str, Any]) -> None:
    await check_engine(lambda: standard_graph(GraphConfig(workers=2)), request=chat(**fields))
