"""Block hashes of prompts against values of the original library, and what a prompt's hashes depend on."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from threading import get_ident
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators import KvPushRouter, Model, Preprocess, PushRouter
from operators.kv import PromptBlocks, kv_router
from operators.kv import prompt as block_hash
from operators.kv.prompt import media_of_blocks, pad_token
from operators.kv.request import RouteRequest, hash_beside_the_loop
from operators.text import PromptThreads, offered_threads
from operators.text.prompt_threads import offer_threads
from pipeline import Annotated, Cancelled, Context, InvalidArgument, link
from pipeline.llm import block_hash_array, block_hashes, hash_seed, sequence_hashes
from pipeline.network import static_workers
from pipeline.protocols import BlockExtraInfo, LLMEngineOutput, MmObject, PreprocessedRequest, RoutingHints
from pipeline.protocols.limits import PromptWork
from pipeline.protocols.openai import CompletionRequest
from pipeline.protocols.request import MmRoutingInfo
from pipeline.testing import ScriptedEngine
from pipeline.wire import from_plain

VECTORS = json.loads((Path(__file__).parent / "vectors" / "block_hashes.json").read_text(encoding="utf-8"))["items"]


def media(*hashes: int) -> BlockExtraInfo:
    return BlockExtraInfo([MmObject(value, []) for value in hashes])


@pytest.mark.parametrize("item", VECTORS, ids=lambda item: item["id"])
def test_hashes_are_those_of_the_original(item: dict[str, Any]) -> None:
    for case in item["cases"]:
        infos = [media(*found) if found else None for found in case["mm_hashes_per_block"] or []]
        blocks = PromptBlocks(
            item["tokens"], case["block_size"], case["lora_name"], is_eagle=case["is_eagle"], media=infos
        )
        assert blocks.local_hashes.tolist() == case["block_hashes"]
        assert blocks.sequence_hashes == case["sequence_hashes"]


@pytest.mark.parametrize(
    ("blocks", "local"),
    [
        (PromptBlocks([1, 2, 3, 4], 4), [14643705804678351452]),
        (PromptBlocks([0, 1, 2, 3], 4, "adapter-a"), [6665157333201000639]),
        (PromptBlocks([0, 1, 2, 3], 4, ""), [9143094415614847814]),
        (PromptBlocks([0] * 16, 16, "日本語"), [17931561296237394351]),
        (PromptBlocks([0, 1, 2, 3], 4, None, "tenant-a"), [17009624042690211646]),
        (PromptBlocks([0, 1, 2, 3], 4, "adapter-a", "tenant-a"), [8269515957840517240]),
        (PromptBlocks([1, 2, 3, 4], 4, media=[media(42)]), [14000361058806882387]),
        (PromptBlocks([1, 2, 3, 4], 4, media=[media(42, 7)]), [6295130183325757331]),
        (PromptBlocks([1, 2, 3, 4], 4, media=[media(7, 42)]), [6295130183325757331]),
        (PromptBlocks([0, 1, 2, 3, 4], 2, is_eagle=True), [11646242937812223497, 9948816348502404300]),
        (PromptBlocks([0, 1], 2, is_eagle=True), []),
    ],
)
def test_adapter_tenant_media_and_look_ahead_enter_the_hash(blocks: PromptBlocks, local: list[int]) -> None:
    assert blocks.local_hashes.tolist() == local


@pytest.mark.parametrize("size", [11, 32, 64])
def test_only_whole_blocks_are_hashed(size: int) -> None:
    assert len(block_hashes(range(size + 1), size)) == 1
    assert block_hashes(range(size - 1), size) == []


@pytest.mark.parametrize("size", [2**31, 2**61, 2**64])
@pytest.mark.parametrize("is_eagle", [False, True])
def test_a_block_size_beyond_every_prompt_makes_no_block(size: int, is_eagle: bool) -> None:
    assert block_hashes([1, 2, 3], size, is_eagle=is_eagle) == []


@pytest.mark.parametrize("tokens", [[2**32], [-1], [1.5], ["a"], [None], None])
def test_tokens_that_are_no_u32_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        block_hashes(tokens, 1)
    assert refused.value.field == "token_ids"


@pytest.mark.parametrize("tokens", [range(9), tuple(range(9)), array("I", range(9)), array("Q", range(9))])
def test_tokens_may_come_in_any_sequence(tokens: Sequence[int]) -> None:
    assert block_hashes(tokens, 4) == block_hashes(list(range(9)), 4)


def test_adapter_and_tenant_of_one_name_are_different() -> None:
    prompt = PromptBlocks([0, 1, 2, 3], 4)
    different = [
        prompt,
        *(evolve(prompt, cache_namespace=name) for name in ("tenant-a", "tenant-b")),
        *(evolve(prompt, lora_name=name) for name in ("tenant-a", "adapter-b")),
    ]
    assert len({blocks.local_hashes[0] for blocks in different}) == 5
    assert evolve(prompt, cache_namespace="").local_hashes == prompt.local_hashes


def test_where_media_stand_in_a_block_does_not_matter() -> None:
    placed = BlockExtraInfo([MmObject(42, [(1, 3)])])
    assert PromptBlocks([1, 2, 3, 4], 4, media=[placed]).local_hashes.tolist() == [14000361058806882387]


def test_a_block_without_media_is_plain_text() -> None:
    plain = PromptBlocks(range(12), 4)
    for infos in ([], [None], [BlockExtraInfo([])], [None] * 9):
        assert evolve(plain, media=infos).local_hashes == plain.local_hashes
    marked = evolve(plain, media=[None, media(1)])
    assert [a == b for a, b in zip(marked.local_hashes, plain.local_hashes, strict=True)] == [True, False, True]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5))
def test_a_block_that_looks_ahead_is_a_longer_block_on_its_own(tokens: list[int], size: int) -> None:
    ahead = block_hashes(tokens, size, is_eagle=True)
    assert len(ahead) == max(0, len(tokens) - 1) // size
    windows = [tokens[i * size : (i + 1) * size + 1] for i in range(len(ahead))]
    assert ahead == [hashed for window in windows for hashed in block_hashes(window, size + 1)]


def test_another_option_is_another_prompt_and_hashed_anew() -> None:
    prompt = PromptBlocks(range(6), 2)
    assert prompt.local_hashes is prompt.local_hashes
    changed = [
        evolve(prompt, is_eagle=True),
        evolve(prompt, lora_name="a"),
        evolve(prompt, media=[media(1)]),
        evolve(prompt, cache_namespace="a"),
    ]
    assert all(blocks.local_hashes != prompt.local_hashes for blocks in changed)
    assert all(blocks.sequence_hashes != prompt.sequence_hashes for blocks in changed)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_rolling_the_chain_block_by_block_equals_chaining_it_whole(local: list[int]) -> None:
    rolled = accumulate(local, lambda parent, block: sequence_hashes([block], parent)[0])
    assert list(rolled) == sequence_hashes(local)


def test_a_request_is_hashed_by_what_it_is_routed_by() -> None:
    hints = RoutingHints(lora_name="adapter-a", cache_namespace="tenant-a")
    plain = PromptBlocks.of_request(PreprocessedRequest([0, 1, 2, 3], routing=hints), 4)
    assert plain.local_hashes.tolist() == [8269515957840517240]
    seen = PreprocessedRequest([9], mm_routing_info=MmRoutingInfo([1, 2, 3, 4], [media(42)]))
    assert PromptBlocks.of_request(seen, 4).local_hashes.tolist() == [14000361058806882387]
    assert len(PromptBlocks.of_request(PreprocessedRequest(list(range(5))), 2, is_eagle=True).local_hashes) == 2


@pytest.mark.parametrize("wrong", [-1, 2**64, "a"])
def test_a_media_hash_that_is_no_u64_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument):
        block_hash_array([1], 1, media=[[wrong]])


def test_half_a_surrogate_pair_is_a_name_too() -> None:
    assert hash_seed("\ud800") != hash_seed("\ud801")


def test_media_of_a_prompt_belong_to_the_blocks_they_cover() -> None:
    """A range is cut at the blocks' borders and counted from their starts; ranges of one medium stay together."""
    objects = [MmObject(7, [(2, 9), (10, 11)]), MmObject(5, [(9, 10)])]
    assert media_of_blocks(objects, 4, 13) == [
        BlockExtraInfo([MmObject(7, [(2, 4)])]),
        BlockExtraInfo([MmObject(7, [(0, 4)])]),
        BlockExtraInfo([MmObject(7, [(0, 1), (2, 3)]), MmObject(5, [(1, 2)])]),
        None,
    ]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30), st.integers(0, 30)), max_size=4),
    st.integers(1, 6),
    st.integers(0, 30),
)
def test_each_covered_token_is_listed_once_in_its_block(
    ranges: list[tuple[int, int, int]], size: int, total: int
) -> None:
    objects = [MmObject(mm_hash, [(start, end)]) for mm_hash, start, end in ranges]
    covered = [(mm_hash, i) for mm_hash, start, end in ranges for i in range(start, min(end, total))]
    covered_by_parts = [
        (found.mm_hash, index * size + i)
        for index, info in enumerate(media_of_blocks(objects, size, total))
        for found in (info.mm_objects if info else [])
        for start, end in found.offsets
        for i in range(start, end)
    ]
    assert sorted(covered_by_parts) == sorted(covered)


def test_an_image_has_a_token_of_its_own_beyond_every_vocabulary() -> None:
    assert pad_token(0) == 1_000_000
    assert pad_token(2**64 - 1) == 1_000_000 + 2**30 - 1


# -- long prompts are hashed in threads


@pytest.fixture
def hashing_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which prompts are hashed."""
    threads: list[int] = []
    hashed = block_hash_array

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(get_ident())
        return hashed(*args, **options)

    monkeypatch.setattr(block_hash, "block_hash_array", noted)
    return threads


def route(tokens: list[int]) -> RouteRequest:
    return RouteRequest(blocks=PromptBlocks(tokens, 4))


@pytest.mark.parametrize("chained", [False, True])
async def test_with_threads_the_hashes_are_made_there_and_found_in_the_loop(
    hashing_threads: list[int], chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaining_threads = list[int]()

    def noted(local_hashes: array[int]) -> list[int]:
        chaining_threads.append(get_ident())
        return sequence_hashes(local_hashes)

    monkeypatch.setattr(block_hash, "sequence_hashes", noted)
    request, routed = Context(None), route(list(range(100)))
    offer_threads(request, PromptThreads())
    await hash_beside_the_loop(routed, request, chained=chained)
    assert chaining_threads == hashing_threads[:1] * chained
    plain = PromptBlocks(list(range(100)), 4)
    assert routed.blocks.local_hashes == plain.local_hashes
    assert routed.blocks.sequence_hashes == plain.sequence_hashes
    there, here = hashing_threads
    assert (there != get_ident(), here) == (True, get_ident())


async def test_without_threads_nothing_is_hashed_before_it_is_looked_up(hashing_threads: list[int]) -> None:
    await hash_beside_the_loop(route([1, 2, 3, 4]), Context(None), chained=True)
    assert not hashing_threads


async def test_a_stopped_request_and_tokens_that_are_none_fail_as_they_do_in_the_loop() -> None:
    request = Context(None)
    offer_threads(request, PromptThreads())
    with pytest.raises(InvalidArgument):
        await hash_beside_the_loop(route([-1] * 4), request, chained=True)
    request.stop()
    with pytest.raises(Cancelled):
        await hash_beside_the_loop(route([1, 2, 3, 4]), request, chained=True)


async def test_the_router_hashes_a_long_prompt_in_its_threads_and_nowhere_else(hashing_threads: list[int]) -> None:
    engine: Any = ScriptedEngine([Annotated(LLMEngineOutput([1]))])
    workers = static_workers({1: engine, 2: engine})
    push: PushRouter[Any, Any] = PushRouter(workers)
    with kv_router(workers, block_size_tokens=4, health=push.health, rng=Random(1)) as router:
        graph: Any = KvPushRouter(router) >> push
        request = Context(PreprocessedRequest(list(range(100))))
        offer_threads(request, PromptThreads())
        async with await graph.generate(request) as stream:
            assert [item.data.token_ids async for item in stream] == [[1]]
    assert hashing_threads
    assert get_ident() not in hashing_threads


@pytest.mark.parametrize(("tokens", "has_threads"), [(8, False), (9, True)])
async def test_only_long_prompts_bring_their_threads_along(tokens: int, has_threads: bool) -> None:
    graph = link(Preprocess(Model.byte_level("m"), work=PromptWork(inline_prompt_characters=8)), ScriptedEngine([]))
    request = Context(from_plain({"model": "m", "prompt": [1] * tokens}, CompletionRequest))
    await (await graph.generate(request)).aclose()
    assert (offered_threads(request) is not None) is has_threads
