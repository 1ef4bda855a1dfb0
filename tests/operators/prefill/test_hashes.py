"""The prompt of a disaggregated request is hashed once for all routers it passes."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from operators import KvPushRouter, PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.kv import prompt as block_hash
from operators.kv.prompt import PromptBlocks
from operators.kv.request import HashedPrompts, RouteRequest, share_hashes, with_shared_hashes
from operators.prefill import ConditionalDisaggregation
from pipeline import Context
from pipeline.llm import block_hash_array
from pipeline.network import static_workers
from pipeline.protocols import BlockExtraInfo, MmObject, PreprocessedRequest
from pipeline.testing import ScriptedEngine

from .worlds import prefill_world, prompt, tokens

TOKENS = list(range(8))
PLAIN = PromptBlocks(TOKENS, 4)
MEDIA = [BlockExtraInfo([MmObject(9, [(0, 1)])]), None]


@pytest.mark.parametrize("block_size_tokens", [4, 2])
async def test_a_prompt_is_hashed_once_for_each_size_of_block(
    block_size_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    hashed = block_hash_array

    def counted(tokens: Any, size: int, **options: Any) -> Any:
        calls.append(size)
        return hashed(tokens, size, **options)

    monkeypatch.setattr(block_hash, "block_hash_array", counted)
    pool = static_workers({9: ScriptedEngine(tokens(1))})
    config = KvRouterConfig(use_kv_events=False, conditional_disagg_enabled=True)
    router = kv_router(pool, config, block_size_tokens=block_size_tokens, worker_type="decode")
    graph = KvPushRouter(router) >> PushRouter(pool)
    conditional = ConditionalDisaggregation(config, router)
    async with prefill_world(conditional=conditional, below=lambda _: graph) as it:
        for number in range(3):
            await it.collect(prompt(token_ids=[number] * 8))
    assert len(it.prefills) == 3
    assert sorted(calls) == sorted([*{4, block_size_tokens}] * 3)


@pytest.mark.parametrize(
    "other",
    [
        evolve(PLAIN, token_ids=[*TOKENS]),
        evolve(PLAIN, token_ids=[*TOKENS, 8]),
        evolve(PLAIN, block_size_tokens=2),
        evolve(PLAIN, lora_name="a"),
        evolve(PLAIN, cache_namespace="a"),
        evolve(PLAIN, is_eagle=True),
        evolve(PLAIN, media=MEDIA),
    ],
)
def test_only_the_very_same_prompt_cut_the_same_way_shares_its_hashes(other: PromptBlocks) -> None:
    known = HashedPrompts()
    assert known.of(PLAIN) is PLAIN
    assert known.of(evolve(PLAIN)) is PLAIN
    assert known.of(other) is other
    assert known.of(evolve(other)) is other


def test_what_is_shared_rides_along_with_the_request() -> None:
    request = Context(PreprocessedRequest(TOKENS))
    route = RouteRequest.of_request(request.payload, 4)
    assert with_shared_hashes(route, request) is route
    share_hashes(request)
    assert with_shared_hashes(route, request) is route
    share_hashes(request)
    again = RouteRequest.of_request(request.payload, 4, metadata={"policy-class": "a"})
    below = request.child(request.payload, linked=False)
    found = with_shared_hashes(again, below)
    assert (found.blocks, found.policy_class) == (route.blocks, "a")
