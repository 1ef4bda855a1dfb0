"""Blocks pass from a mock prefill worker to a mock decode worker, and every ending frees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
from attrs import define, evolve

from engines import DisaggregationMode, as_engine
from engines.mocker import MockEngine, MockEngineArgs, TransferExchange
from engines.mocker.scheduling import Sequence
from pipeline import Context, InvalidArgument
from pipeline.errors import BackendConnectionTimeout, BackendDisconnected
from pipeline.protocols import BootstrapInfo, FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions

ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=4, kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
PROMPT = list(range(10))


@define
class Pair:
    """A prefill and a decode worker of one deployment."""

    prefill: Any
    decode: Any
    exchange: TransferExchange

    def generate_half(self, half: str, context: Context[Any]) -> Any:
        return getattr(self, half).generate(context)

    def assert_empty(self) -> None:
        for half in (self.prefill, self.decode):
            (rank,) = half.engine.ranks
            rank.scheduler.pool.check()
            assert rank.scheduler.pool.active == 0
            assert rank.live == 0
        assert self.exchange.waiting == self.exchange.sessions == 0


@asynccontextmanager
async def pair(args: MockEngineArgs = ARGS) -> AsyncIterator[Pair]:
    exchange = TransferExchange()
    prefill = MockEngine(evolve(args, worker_type="prefill"), exchange=exchange)
    decode = MockEngine(evolve(args, worker_type="decode"), exchange=exchange)
    async with (
        as_engine(prefill, mode=DisaggregationMode.PREFILL) as sender,
        as_engine(decode, mode=DisaggregationMode.DECODE) as receiver,
    ):
        both = Pair(sender, receiver, exchange)
        yield both
        both.assert_empty()


def half_of(room: int, prompt: list[int] | None = None, max_tokens: int = 6) -> Context[PreprocessedRequest]:
    """Return one half of the request that meets in that room; both halves have its id."""
    info = BootstrapInfo("host", 1, room)
    stop = StopConditions(max_tokens=max_tokens)
    request = PreprocessedRequest(PROMPT if prompt is None else prompt, stop_conditions=stop, bootstrap_info=info)
    return Context(request, id=f"request-{room}")


@define
class HalfAnswer:
    """The chunks of one half, and their times in milliseconds."""

    chunks: list[LLMEngineOutput]
    times_ms: list[float]
    error: Exception | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


async def read_half(both: Pair, half: str, context: Context[Any], answer: HalfAnswer) -> None:
    begun_s = anyio.current_time()
    async with await both.generate_half(half, context) as stream:
        async for item in stream:
            answer.times_ms.append((anyio.current_time() - begun_s) * 1000)
            if item.is_error:
                answer.error = item.error
            else:
                answer.chunks.append(item.data)


async def run_both(both: Pair, first: Context[Any], second: Context[Any]) -> tuple[HalfAnswer, HalfAnswer]:
    sent, received = HalfAnswer([], []), HalfAnswer([], [])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_half, both, "prefill", first, sent)
        tasks.start_soon(read_half, both, "decode", second, received)
    return sent, received


async def test_decode_begins_when_the_blocks_have_arrived_and_answers_as_one_worker_would() -> None:
    async with pair() as both, as_engine(MockEngine(evolve(ARGS, worker_type="aggregated"))) as whole:
        undisturbed = await (await whole.generate(half_of(9))).collect()
        sent, received = await run_both(both, half_of(1), half_of(1))
    assert received.tokens == [token for item in undisturbed if item.data for token in item.data.token_ids]
    assert sent.tokens == received.tokens[:1]
    prefill_ms = 16.50142 + 1.518344e-02 * 10 + 4.209989e-07 * 100
    assert sent.times_ms == [pytest.approx(prefill_ms, abs=0.01), pytest.approx(prefill_ms + 10, abs=0.01)]
    assert received.times_ms[0] == pytest.approx(prefill_ms + 10 + 8.2, abs=0.5)


async def test_a_prompt_the_decode_worker_has_needs_no_time_on_its_way() -> None:
    async with pair(evolve(ARGS, kv_transfer_timing_mode="destination_missing")) as both:
        prompt = list(range(8))
        first, _ = await run_both(both, half_of(1, prompt), half_of(1, prompt))
        second, _ = await run_both(both, half_of(2, prompt), half_of(2, prompt))
    assert first.times_ms[1] - first.times_ms[0] == pytest.approx(8, abs=0.01)
    assert second.times_ms[1] == second.times_ms[0]


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_half_whose_other_half_never_comes_times_out(half: str) -> None:
    async with pair() as both:
        answer = HalfAnswer([], [])
        await read_half(both, half, half_of(1), answer)
        assert type(answer.error) is BackendConnectionTimeout


@pytest.mark.parametrize("half", ["prefill", "decode"])
@pytest.mark.parametrize("ending", ["stop", "kill"])
@pytest.mark.parametrize("after_ms", [0, 5, 20, 27, 30])
async def test_when_one_half_is_ended_both_let_their_blocks_go(half: str, ending: str, after_ms: float) -> None:
    async with pair() as both:
        contexts = {"prefill": half_of(1, max_tokens=40), "decode": half_of(1, max_tokens=40)}
        answers = {name: HalfAnswer([], []) for name in contexts}
        async with anyio.create_task_group() as tasks:
            for name, context in contexts.items():
                tasks.start_soon(read_half, both, name, context, answers[name])
            await anyio.sleep(after_ms / 1000)
            getattr(contexts[half].control, ending)()
        ended, other = answers[half], answers["decode" if half == "prefill" else "prefill"]
        assert ended.error is None
        if ending == "stop" and ended.chunks:
            assert ended.chunks[-1].finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        assert other.error is None or isinstance(other.error, BackendDisconnected)


async def test_a_worker_without_an_exchange_refuses_a_meeting() -> None:
    async with as_engine(MockEngine(evolve(ARGS, worker_type="decode")), mode=DisaggregationMode.DECODE) as alone:
        (item,) = await (await alone.generate(half_of(1))).collect()
    assert isinstance(item.error, InvalidArgument)
    assert item.error.field == "bootstrap_info"


async def test_a_decode_worker_without_room_lets_the_prefill_wait() -> None:
    async with pair(evolve(ARGS, num_gpu_blocks=8)) as both:
        busy = HalfAnswer([], [])
        prompts = list(range(100, 120)), list(range(200, 220))
        contexts = [half_of(room, prompt, 10) for room, prompt in enumerate(prompts)]
        answers = [HalfAnswer([], []) for _ in contexts]
        async with anyio.create_task_group() as tasks:
            for room, prompt in enumerate(prompts):
                tasks.start_soon(read_half, both, "decode", contexts[room], answers[room])
                tasks.start_soon(read_half, both, "prefill", half_of(room, prompt, 10), busy)
        assert [len(one.tokens) for one in answers] == [10, 10]
        assert [one.error for one in (*answers, busy)] == [None] * 3


async def test_the_first_half_to_wait_for_room_gets_it_first() -> None:
    """Small prompts do not overtake a large one for ever."""
    async with pair(evolve(ARGS, num_gpu_blocks=8)) as both:
        (rank,) = both.decode.engine.ranks
        (held, large, small) = (Sequence([1] * tokens, 1, block_size=4) for tokens in (24, 28, 4))
        order: list[str] = []

        async def reserve(sequence: Sequence, name: str) -> None:
            await rank.reserve(sequence)
            order.append(name)

        await rank.reserve(held)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reserve, large, "large")
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(reserve, small, "small")
            await anyio.wait_all_tasks_blocked()
            assert order == []
            rank.cancel(held)
        assert order == ["large", "small"]
        for sequence in (large, small):
            rank.cancel(sequence)


async def test_a_half_that_gives_up_waiting_for_room_yields_to_the_next() -> None:
    async with pair(evolve(ARGS, num_gpu_blocks=8)) as both:
        (rank,) = both.decode.engine.ranks
        (held, large, small) = (Sequence([1] * tokens, 1, block_size=4) for tokens in (24, 28, 4))
        await rank.reserve(held)
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as waiting:
                tasks.start_soon(rank.reserve, small)
                waiting.cancel()
                await rank.reserve(large)
        for sequence in (held, small):
            rank.cancel(sequence)


async def test_random_endings_of_both_halves_leave_nothing() -> None:
    rng = Random(5)
    async with pair(evolve(ARGS, num_gpu_blocks=24)) as both:
        errors: list[Exception] = []

        async def play(room: int) -> None:
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 30))]
            contexts = [half_of(room, prompt, rng.randrange(1, 12)) for _ in range(2)]
            answers = [HalfAnswer([], []), HalfAnswer([], [])]

            async def disturb() -> None:
                await anyio.sleep(rng.random() * 0.2)
                victim = rng.choice(contexts)
                rng.choice((victim.control.stop, victim.control.kill))()

            async with anyio.create_task_group() as tasks:
                for half, context, one in zip(("prefill", "decode"), contexts, answers, strict=True):
                    if rng.random() < 0.95:
                        tasks.start_soon(read_half, both, half, context, one)
                if rng.random() < 0.5:
                    tasks.start_soon(disturb)
            errors.extend(one.error for one in answers if one.error is not None)

        async with anyio.create_task_group() as tasks:
            for room in range(150):
                tasks.start_soon(play, room)
                await anyio.sleep(0.01)
    assert {type(error) for error in errors} <= {BackendDisconnected, BackendConnectionTimeout}
