"""The table of what routing does to conversations: repeatable, and better with KV-aware routing."""

from __future__ import annotations

from random import Random
from typing import Literal

import anyio

from benchmarks.conversations import Measured, conversations, routers, talk
from engines.mocker import MockEngine
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig, RouterName

SEED = 5


def run(router: RouterName, backend: Literal["asyncio", "trio"] = "asyncio") -> Measured:
    talks = conversations(24, Random(SEED))
    arguments = {"num_gpu_blocks": "2048"}
    config = GraphConfig(engine="mocker", engine_args=arguments, workers=4, router=router, seed=SEED)
    return run_in_virtual_time(talk, talks, config, backend=backend)


def test_kv_routing_finds_more_of_a_conversation_cached_than_round_robin_and_so_answers_sooner() -> None:
    in_turn, by_cache = run("round-robin"), run("kv")
    assert by_cache.prompt_tokens == in_turn.prompt_tokens
    assert by_cache.cached_tokens > 1.1 * in_turn.cached_tokens
    assert sum(by_cache.first_token_s) < sum(in_turn.first_token_s)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert run("kv") == run("kv")


def test_the_caches_behind_each_router_hold_less_than_half_of_all_tokens() -> None:
    """Otherwise nothing would be evicted, and it would hardly matter which worker gets a request."""
    tokens_in_all = sum(
        len(question) + tokens for one in conversations(200, Random(7)) for question, tokens, _ in one.turns
    )
    for config in routers(4, 7).values():
        held = 0
        for engine in anyio.run(config.make_engines, 4):
            assert isinstance(engine, MockEngine)
            held += engine.args.num_gpu_blocks * engine.args.block_size
        assert tokens_in_all / 4 < held < tokens_in_all / 2
