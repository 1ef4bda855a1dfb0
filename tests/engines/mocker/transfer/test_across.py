"""A transfer whose two workers meet over a request plane ends as one in a process does. In virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from attrs import evolve

from pipeline import Context
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected, TransferFailed

from .process_worlds import ARGS, PROMPT, Half, mock_worker, processes


async def test_tokens_and_times_are_those_of_one_process() -> None:
    async with processes() as both:
        sent, received = await both.read_both(both.half_of(1), both.half_of(1))
        assert both.exchange("prefill") is not both.exchange("decode")
    prefill_ms = 16.50142 + 1.518344e-02 * 10 + 4.209989e-07 * 100
    assert sent.error is received.error is None
    assert len(received.tokens) == 6
    assert sent.tokens == received.tokens[:1]
    assert sent.times_ms == [pytest.approx(prefill_ms, abs=0.01), pytest.approx(prefill_ms + 10, abs=0.01)]
    assert received.times_ms[0] == pytest.approx(prefill_ms + 10 + 8.2, abs=0.5)


async def test_a_prompt_the_decode_worker_has_needs_no_time_on_its_way() -> None:
    async with processes(evolve(ARGS, kv_transfer_timing_mode="destination_missing")) as both:
        first, _ = await both.read_both(both.half_of(1, prompt=PROMPT[:8]), both.half_of(1, prompt=PROMPT[:8]))
        second, _ = await both.read_both(both.half_of(2, prompt=PROMPT[:8]), both.half_of(2, prompt=PROMPT[:8]))
    assert first.times_ms[1] - first.times_ms[0] == pytest.approx(8, abs=0.01)
    assert second.times_ms[1] == second.times_ms[0]


async def test_the_decode_worker_may_go_first() -> None:
    async with processes(evolve(ARGS, engine_type="sglang", block_size=1)) as both:
        sent, received = await both.read_both(both.half_of(1), both.half_of(1))
    assert sent.error is received.error is None
    assert sent.tokens == received.tokens[:1]
    assert len(received.tokens) == 6


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_half_whose_other_half_never_comes_times_out(half: str) -> None:
    async with processes() as both:
        read, begun_s = Half(), anyio.current_time()
        await both.read(half, both.half_of(1), read)
        assert isinstance(read.error, BackendConnectionTimeout)
        assert anyio.current_time() - begun_s == pytest.approx(30, abs=0.1)


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("half", ["prefill", "decode"])
@pytest.mark.parametrize("after_ms", [0.1, 5.0, 20.0, 26.0])
async def test_a_half_that_leaves_ends_the_other_at_once(half: str, how: str, after_ms: float) -> None:
    """After 5 ms the prompt is being computed, after 20 the blocks are on their way, at 26 they are about to arrive."""
    other = "decode" if half == "prefill" else "prefill"
    async with processes() as both, anyio.create_task_group() as tasks:
        contexts = {one: both.half_of(1) for one in ("prefill", "decode")}
        halves = {one: Half() for one in contexts}
        for one, context in contexts.items():
            tasks.start_soon(both.read, one, context, halves[one])
        await anyio.sleep(after_ms / 1000)
        getattr(contexts[half], how)()
        await anyio.sleep(0.001)
        assert halves[half].is_over
        assert halves[other].is_over
        assert isinstance(halves[other].error, BackendDisconnected)
        both.check_empty()


async def test_a_decode_worker_that_is_full_reserves_room_when_there_is_some() -> None:
    reads = [(Half(), Half()) for _ in range(4)]
    async with processes(evolve(ARGS, num_gpu_blocks=4)) as both, anyio.create_task_group() as tasks:
        for room, (sent, received) in enumerate(reads):
            prompt = tuple(range(100 * room, 100 * room + 10))
            tasks.start_soon(both.read, "prefill", both.half_of(room, prompt=prompt), sent)
            tasks.start_soon(both.read, "decode", both.half_of(room, prompt=prompt), received)
    for sent, received in reads:
        assert sent.error is received.error is None
        assert len(received.tokens) == 6


async def test_a_prefill_that_fails_while_decode_waits_for_room_ends_the_wait() -> None:
    async with processes(evolve(ARGS, num_gpu_blocks=4)) as both, anyio.create_task_group() as tasks:
        long, waiting = Half(), Half()
        tasks.start_soon(both.read, "prefill", both.half_of(1, max_tokens=4), Half())
        tasks.start_soon(both.read, "decode", both.half_of(1, max_tokens=4), long)
        await anyio.sleep(0.001)
        other = tuple(range(100, 110))
        second = both.half_of(2, prompt=other)
        tasks.start_soon(both.read, "prefill", second, Half())
        tasks.start_soon(both.read, "decode", both.half_of(2, prompt=other), waiting)
        await anyio.sleep(0.050)
        assert not waiting.is_over
        second.kill()
        await anyio.sleep(0.001)
        assert isinstance(waiting.error, BackendDisconnected)


async def test_a_prefill_worker_that_is_gone_is_noticed_in_the_time_of_a_lookup() -> None:
    async with processes() as both:
        context = both.half_of(1)
        both.prefill.shutdown()
        served = both.prefill.served
        assert served is not None
        both.prefill._peers.abort()
        read, begun_s = Half(), anyio.current_time()
        await both.read("decode", context, read)
        assert isinstance(read.error, TransferFailed)
        assert anyio.current_time() - begun_s <= 1.01


async def test_a_prefill_worker_that_dies_ends_both_halves_and_frees_their_blocks() -> None:
    async with processes() as both, anyio.create_task_group() as tasks:
        sent, received = Half(), Half()
        tasks.start_soon(both.read, "prefill", both.half_of(1), sent)
        tasks.start_soon(both.read, "decode", both.half_of(1), received)
        await anyio.sleep(0.020)
        both.prefill._peers.abort()
        await anyio.sleep(0.001)
        assert isinstance(received.error, TransferFailed)
        assert isinstance(sent.error, BackendDisconnected)
        both.check_empty()


async def test_a_request_from_before_a_restart_is_refused_at_once_by_the_worker_that_has_the_id_now() -> None:
    async with processes() as both:
        before: Context[Any] = both.half_of(1)
        runtime, worker_id = both.prefill.runtime, both.prefill.worker_id
        both.prefill.abort()
        await anyio.wait_all_tasks_blocked()
        async with mock_worker(runtime, "prefill", worker_id=worker_id) as again:
            assert again.engine_config is not None
            assert again.engine_config.bootstrap_host != before.payload.bootstrap_info.bootstrap_host
            read, begun_s = Half(), anyio.current_time()
            await both.read("decode", before, read)
            assert isinstance(read.error, TransferFailed)
            assert "started again" in str(read.error)
            assert anyio.current_time() == begun_s
            both.prefill = again
            sent, received = await both.read_both(both.half_of(2), both.half_of(2))
            assert sent.error is received.error is None
            assert len(received.tokens) == 6
