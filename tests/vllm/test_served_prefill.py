"""`penstock serve --prefill-upstream` in front of two real vLLM servers: one computes prompts, NIXL hands them over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from openai import AsyncOpenAI

from tests.vllm.front import Front, answered, client_of, prompts, served
from tests.vllm.servers import BLOCK_SIZE_TOKENS, Servers, VllmServer, nixl
from tests.vllm.tiny_model import BYTES_A_TOKEN

pytestmark = pytest.mark.vllm

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, AT_A_TIME = 50, 200, 30, 8


@pytest.fixture
def prefill_and_decode(servers: Servers) -> tuple[VllmServer, VllmServer]:
    prefill, decode = servers.take(nixl("kv_producer"), nixl("kv_consumer"))
    for each in (prefill, decode):
        each.forget()
    return prefill, decode


@pytest.fixture
def front(prefill_and_decode: tuple[VllmServer, VllmServer], tmp_path: Path) -> Iterator[Front]:
    prefill, decode = prefill_and_decode
    options = ("--prefill-upstream", prefill.url, "--kv-connector", "nixl")
    with served(tmp_path / "penstock.log", [decode], *options) as front:
        front.wait_for(2)
        front.wait_for_prefill()
        yield front


async def test_50_prompts_computed_elsewhere_have_the_tokens_of_one_server(
    front: Front, prefill_and_decode: tuple[VllmServer, VllmServer]
) -> None:
    prefill, decode = prefill_and_decode
    asked = prompts(PROMPTS, PROMPT_TOKENS, seed=51)
    expected = await anyio.to_thread.run_sync(lambda: [prefill.greedy(prompt, ANSWER_TOKENS) for prompt in asked])
    await anyio.to_thread.run_sync(prefill.forget)
    before = decode.metric("vllm:nixl_bytes_transferred_sum")
    room, got = anyio.CapacityLimiter(AT_A_TIME), dict[int, list[int]]()

    async def one(number: int) -> None:
        async with room:
            answer = await answered(client, asked[number], ANSWER_TOKENS)
        got[number] = answer.token_ids

    async with client_of(front) as client, anyio.create_task_group() as tasks:
        for number in range(PROMPTS):
            tasks.start_soon(one, number)
    assert [number for number in range(PROMPTS) if got[number] != expected[number]] == []
    blocks = -(-PROMPT_TOKENS // BLOCK_SIZE_TOKENS)
    moved = decode.metric("vllm:nixl_bytes_transferred_sum") - before
    assert moved == PROMPTS * blocks * BLOCK_SIZE_TOKENS * BYTES_A_TOKEN, "some prompt was computed where it is decoded"


async def test_a_prefill_server_that_is_killed_costs_no_answer_and_its_prompts_are_computed_elsewhere(
    front: Front, prefill_and_decode: tuple[VllmServer, VllmServer]
) -> None:
    prefill, decode = prefill_and_decode
    asked = prompts(8, PROMPT_TOKENS, seed=61)
    expected = await anyio.to_thread.run_sync(lambda: [decode.greedy(prompt, ANSWER_TOKENS) for prompt in asked])
    await anyio.to_thread.run_sync(decode.forget)

    async def one(client: AsyncOpenAI, number: int) -> None:
        assert (await answered(client, asked[number], ANSWER_TOKENS)).token_ids == expected[number]

    async def all_of_them() -> None:
        async with client_of(front) as client, anyio.create_task_group() as tasks:
            for number in range(len(asked)):
                tasks.start_soon(one, client, number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(all_of_them)
        await anyio.to_thread.run_sync(prefill.kill)
    await anyio.to_thread.run_sync(front.wait_for_no_prefill)
    await all_of_them()
