"""`penstock serve --router kv` in front of two real vLLM servers: what is reused, believed and forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import anyio
import pytest
from openai import AsyncOpenAI

from tests.vllm.front import Front, answered, client_of, prompts, reusable, served, stream
from tests.vllm.servers import VllmServer, until

pytestmark = pytest.mark.vllm

CONVERSATIONS, TURNS = 20, 3
ANSWER_TOKENS, NEW_TOKENS = 24, 40
AT_A_TIME = 1
"""More, and the router rightly weighs what is cached against the load: benchmarks/vllm_conversations.py has figures."""


@pytest.fixture
def front(pair: tuple[VllmServer, VllmServer], tmp_path: Path) -> Iterator[Front]:
    """In front of two servers that have nothing cached."""
    with served(tmp_path / "penstock.log", pair, "--router", "kv") as front:
        front.wait_for(2)
        yield front


async def converse(client: AsyncOpenAI, beginning: Sequence[int], seed: int, room: anyio.CapacityLimiter) -> int:
    """Hold a conversation; return how many tokens of its later prompts a server had computed, in whole blocks."""
    random, history, could = Random(seed), list(beginning), 0
    for turn in range(TURNS):
        async with room:
            answer = await answered(client, history, ANSWER_TOKENS)
        if turn < TURNS - 1:
            # The last token of an answer was sampled and never computed.
            could += reusable(len(history) + ANSWER_TOKENS - 1)
            history += answer.token_ids + [random.randrange(300, 8000) for _ in range(NEW_TOKENS)]
    return could


async def test_later_turns_reuse_at_least_95_percent_of_what_can_be_reused(
    front: Front, pair: tuple[VllmServer, VllmServer]
) -> None:
    before = [server.reused_tokens for server in pair]
    room, could = anyio.CapacityLimiter(AT_A_TIME), 0

    async def one(number: int, beginning: Sequence[int]) -> None:
        nonlocal could
        could += await converse(client, beginning, number, room)

    async with client_of(front) as client, anyio.create_task_group() as tasks:
        for number, beginning in enumerate(prompts(CONVERSATIONS, 300, seed=11)):
            tasks.start_soon(one, number, beginning)
    reused = [server.reused_tokens - was for server, was in zip(pair, before, strict=True)]
    assert min(reused) > 0, "one server has had all conversations"
    assert sum(reused) >= 0.95 * could, f"{sum(reused):.0f} of {could}"


async def test_a_router_that_starts_late_knows_all_cached_blocks_by_replay(
    pair: tuple[VllmServer, VllmServer], tmp_path: Path
) -> None:
    first, second = pair
    asked = {first: prompts(6, 320, seed=21), second: prompts(6, 320, seed=22)}
    for server, own in asked.items():
        for prompt in own:
            server.greedy(prompt, 1)
    with served(tmp_path / "penstock.log", pair, "--router", "kv") as front:
        front.wait_for(2)
        until(front.known_blocks, lambda known: sum(known.values()) >= 2 * 6 * 10, within_s=10)
        async with client_of(front) as client:
            for own in asked.values():
                chosen = [await answered(client, prompt, 1) for prompt in own]
                assert [answer.overlap_blocks for answer in chosen] == [10] * 6
                assert len({answer.worker for answer in chosen}) == 1
    for server in pair:
        assert server.reused_tokens > 0


async def test_every_stream_goes_on_token_by_token_when_a_server_is_killed_and_the_next_one_is_not_believed(
    front: Front, pair: tuple[VllmServer, VllmServer]
) -> None:
    asked, tokens = prompts(8, 200, seed=31), 300
    expected = [pair[1].greedy(prompt, tokens) for prompt in asked]
    for server in pair:
        server.forget()
    workers = front.workers
    answers: dict[int, list[int]] = {}
    are_running, victim = anyio.Event(), pair[0]

    async def one(number: int, prompt: Sequence[int]) -> None:
        async for answer in stream(client, prompt, tokens):
            answers[number] = answer.token_ids
            if len(answers) == len(asked) and min(map(len, answers.values())) >= 10:
                are_running.set()

    async with client_of(front) as client, anyio.create_task_group() as tasks:
        for number, prompt in enumerate(asked):
            tasks.start_soon(one, number, prompt)
        with anyio.fail_after(60):
            await are_running.wait()
        victim = max(pair, key=lambda server: server.running)
        assert victim.running > 0
        assert min(map(len, answers.values())) < tokens
        await anyio.to_thread.run_sync(victim.kill)
    assert [answers[number] for number in range(len(asked))] == expected

    left = await anyio.to_thread.run_sync(front.wait_for, 1)
    assert left < workers
    victim.start()
    await anyio.to_thread.run_sync(victim.wait_until_ready)
    back = await anyio.to_thread.run_sync(front.wait_for, 2)
    assert not (back - left) & workers, "a restarted server is another worker"
    assert front.known_blocks().get(next(iter(back - left)), 0.0) == 0.0
    async with client_of(front) as client:
        for number, prompt in enumerate(asked):
            answer = await answered(client, prompt, 30)
            assert answer.token_ids == expected[number][:30]


async def test_a_client_that_leaves_frees_its_place_at_the_server_within_100_ms(
    front: Front, pair: tuple[VllmServer, VllmServer]
) -> None:
    freed_s = []
    async with client_of(front) as client:
        for prompt in prompts(5, 100, seed=41):
            answer = stream(client, prompt, 4000)
            async for so_far in answer:
                if len(so_far.token_ids) >= 5:
                    break
            left_s = anyio.current_time()
            await answer.aclose()
            await anyio.to_thread.run_sync(
                lambda: until(lambda: sum(each.running for each in pair), lambda running: running == 0, within_s=5)
            )
            freed_s.append(anyio.current_time() - left_s)
    assert sorted(freed_s)[2] < 0.1, freed_s
