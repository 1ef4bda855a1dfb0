"""MockEngine: what requests receive from it, and what they leave behind."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import EngineConfig, GenerateContext, KvEventPublisher, as_engine
from engines.mocker import MockEngine, MockEngineArgs
from pipeline import Annotated, Context, EngineShutdown, InvalidArgument
from pipeline.errors import BackendUnknown
from pipeline.protocols import (
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from pipeline.protocols.kv import RouterEvent
from pipeline.protocols.openai import BYPASS_REMOTE_PREFILL
from pipeline.testing import check_engine

from .worlds import assert_empty

SMALL = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_batched_tokens=64, max_num_seqs=8)


def request(prompt: list[int] | int, max_tokens: int | None = 8, **fields: Any) -> PreprocessedRequest:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return PreprocessedRequest(tokens, stop_conditions=StopConditions(max_tokens=max_tokens), **fields)


@asynccontextmanager
async def running(engine: MockEngine) -> AsyncIterator[Any]:
    """Serve the engine; on exit it must hold nothing."""
    async with as_engine(engine) as served:
        yield served
    assert_empty(engine)


async def answer(served: Any, payload: PreprocessedRequest, **context: Any) -> list[LLMEngineOutput]:
    items = await (await served.generate(Context(payload, **context))).collect()
    return [item.ok().data for item in items]


def tokens(chunks: list[LLMEngineOutput]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


# -- what comes back


async def test_an_answer_is_one_token_a_chunk_and_an_empty_last_one() -> None:
    async with running(MockEngine(SMALL)) as served:
        chunks = await answer(served, request(10, 5))
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 1, 1, 1, 1, 0]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + [FinishReason.LENGTH]
    assert all(1000 <= token < 2000 for token in tokens(chunks))
    assert chunks[-1].completion_usage is not None
    assert (chunks[-1].completion_usage.prompt_tokens, chunks[-1].completion_usage.completion_tokens) == (10, 5)


async def test_a_request_without_a_limit_is_bounded() -> None:
    async with running(MockEngine(SMALL)) as served:
        assert len(tokens(await answer(served, request(3, None)))) == 16


async def test_cached_tokens_come_with_the_first_and_the_last_chunk() -> None:
    async with running(MockEngine(SMALL)) as served:
        await answer(served, request(9, 1))
        first, second, last = await answer(served, request(9, 2))
    assert first.completion_usage is not None
    assert first.completion_usage.prompt_tokens_details is not None
    assert first.completion_usage.prompt_tokens_details.cached_tokens == 8
    assert second.completion_usage is None
    assert last.completion_usage is not None
    assert last.completion_usage.prompt_tokens_details == first.completion_usage.prompt_tokens_details


async def test_the_first_token_takes_prefill_and_decode_and_the_others_decode() -> None:
    times: list[float] = []
    async with (
        running(MockEngine(MockEngineArgs())) as served,
        await served.generate(Context(request(128, 3))) as stream,
    ):
        begun_s = anyio.current_time()
        async for _ in stream:
            times.append((anyio.current_time() - begun_s) * 1000)
    decode_ms = 5.74 + 54.01 * (2 / 16384) - 25.74 * (2 / 16384) ** 2
    assert times[0] == pytest.approx(18.4518 + decode_ms, abs=0.001)
    assert times[1] - times[0] == pytest.approx(5.74, abs=0.02)
    assert times[3] == times[2], "the empty last chunk comes with the last token"


async def test_times_shorter_than_can_be_slept_add_up() -> None:
    """A thousand passes of 57 µs take 57 ms."""
    async with running(MockEngine(MockEngineArgs(speedup_ratio=100))) as served:
        begun_s = anyio.current_time()
        await answer(served, request(1, 1000))
        assert anyio.current_time() - begun_s == pytest.approx(0.0575, abs=0.002)


async def test_without_any_speed_nothing_takes_time() -> None:
    async with running(MockEngine(MockEngineArgs(speedup_ratio=0))) as served:
        begun_s = anyio.current_time()
        await answer(served, request(1000, 100))
        assert anyio.current_time() == begun_s


async def test_a_migrated_request_continues_the_same_output() -> None:
    async with running(MockEngine(SMALL)) as one, running(MockEngine(SMALL)) as other:
        whole = tokens(await answer(one, request([7, 8, 9], 12)))
        for cut in range(1, 12):
            moved = await answer(other, request([7, 8, 9, *whole[:cut]], 12 - cut))
            assert whole[:cut] + tokens(moved) == whole


async def test_other_prompts_and_seeds_give_other_outputs() -> None:
    async with running(MockEngine(SMALL)) as served:
        answers = [tokens(await answer(served, request(prompt))) for prompt in ([1, 2], [2, 2], [1, 3], [1, 1, 2])]
        answers.append(tokens(await answer(served, request([1, 2], sampling_options=SamplingOptions(seed=5)))))
    assert len({tuple(answered) for answered in answers}) == len(answers)


async def test_tokens_are_from_the_range_that_was_given() -> None:
    async with running(MockEngine(SMALL, token_ids=range(97, 123))) as served:
        assert set(tokens(await answer(served, request(3, 40)))) <= set(range(97, 123))


def test_an_empty_token_range_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        MockEngine(SMALL, token_ids=range(0))
    assert refused.value.field == "token_ids"


async def test_prompts_that_differ_in_the_first_token_give_different_outputs_in_a_small_alphabet_too() -> None:
    """No two of two hundred outputs agree in most of their tokens, though the range has only 26."""
    async with running(MockEngine(evolve(SMALL, enable_prefix_caching=False), token_ids=range(97, 123))) as served:
        answered = [tokens(await answer(served, request([first, 7, 8], 20))) for first in range(200)]
    alike = [sum(a == b for a, b in zip(one, other, strict=True)) for one, other in itertools.combinations(answered, 2)]
    assert max(alike) < 12


async def test_each_of_n_choices_has_its_own_tokens_and_end() -> None:
    async with running(MockEngine(SMALL)) as served:
        chunks = await answer(served, request(6, 4, sampling_options=SamplingOptions(n=3)))
    answered = {index: tokens([chunk for chunk in chunks if chunk.index == index]) for index in range(3)}
    assert [len(choice) for choice in answered.values()] == [4, 4, 4]
    assert len({tuple(choice) for choice in answered.values()}) == 3
    ends = [chunk for chunk in chunks if chunk.finish_reason is not None]
    assert sorted(chunk.index or 0 for chunk in ends) == [0, 1, 2]
    assert [chunk.completion_usage is not None for chunk in ends] == [False, False, True]
    assert ends[-1].completion_usage is not None
    assert ends[-1].completion_usage.completion_tokens == 12


async def test_log_probabilities_come_when_requested() -> None:
    options = OutputOptions(logprobs=2)
    async with running(MockEngine(SMALL)) as served:
        first, *_ = await answer(served, request(3, 1, output_options=options))
        many, *_ = await answer(served, request(3, 1, output_options=OutputOptions(logprobs=50)))
    (token,) = first.token_ids
    assert first.log_probs is not None
    assert first.log_probs[0] == pytest.approx(-0.1 * (token % 10))
    assert first.top_logprobs is not None
    assert [top.rank for top in first.top_logprobs[0]] == [1, 2, 3]
    assert many.top_logprobs is not None
    assert len(many.top_logprobs[0]) == 21


@pytest.mark.parametrize(("is_stopped", "reason"), [(False, FinishReason.LENGTH), (True, FinishReason.CANCELLED)])
async def test_a_request_for_no_tokens_gives_one_empty_chunk(is_stopped: bool, reason: FinishReason) -> None:
    engine = MockEngine(SMALL)
    async with running(engine):
        context = GenerateContext(Context(None))
        if is_stopped:
            context.stop()
        chunks = [chunk async for chunk in engine.generate(request(3, 0), context)]
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [([], reason)]


# -- what is refused


async def test_before_its_start_and_after_its_end_it_is_shut_down() -> None:
    engine = MockEngine(SMALL)
    served = as_engine(engine)
    with pytest.raises(EngineShutdown):
        await served.generate(Context(request(3)))
    async with served:
        with pytest.raises(EngineShutdown):
            await engine.start(1)
        assert len(await answer(served, request(3))) == 9
    with pytest.raises(EngineShutdown):
        await anext(engine.generate(request(3), GenerateContext(Context(None))))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (request([]), "token_ids"),
        (request(3, sampling_options=SamplingOptions(n=0)), "n"),
        (request(3, routing=RoutingHints(dp_rank=2)), "dp_rank"),
        (request(3, prompt_embeds="AA=="), "prompt_embeds"),
    ],
)
async def test_a_wrong_request_is_refused_naming_the_field(wrong: PreprocessedRequest, field: str) -> None:
    async with running(MockEngine(MockEngineArgs(dp_size=2))) as served:
        with pytest.raises(InvalidArgument) as refused:
            await answer(served, wrong)
    assert refused.value.field == field


async def test_a_prompt_that_can_never_fit_is_rejected_and_others_go_on() -> None:
    async with running(MockEngine(SMALL)) as served:
        with pytest.raises(InvalidArgument, match="exceeds worker admission limits"):
            await answer(served, request(64 * 4 + 1))
        assert len(tokens(await answer(served, request(3)))) == 8


async def test_an_id_in_use_is_refused_and_free_again_when_its_stream_is_closed() -> None:
    async with running(MockEngine(SMALL)) as served:
        async with await served.generate(Context(request(20, 50), id="x")) as stream:
            await anext(stream)
            with pytest.raises(InvalidArgument) as refused:
                await answer(served, request(3), id="x")
            assert refused.value.field == "id"
            assert len((await anext(stream)).data.token_ids) == 1
        assert len(tokens(await answer(served, request(3), id="x"))) == 8


# -- ranks


async def test_ranks_take_turns_unless_one_is_named() -> None:
    """Each rank has its own cache: a prompt is found only where it was served before."""
    engine = MockEngine(MockEngineArgs(dp_size=2, block_size=4))

    def found(chunks: list[LLMEngineOutput]) -> int | None:
        usage = chunks[0].completion_usage
        return (
            None if usage is None or usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        )

    async with running(engine) as served:
        assert [found(await answer(served, request(9, 1))) for _ in range(4)] == [0, 0, 8, 8]
        other = request(list(range(50, 59)), 1, routing=RoutingHints(dp_rank=1))
        assert [found(await answer(served, other)) for _ in range(2)] == [0, 8]


# -- endings


async def test_it_holds_the_engine_contract() -> None:
    args = evolve(SMALL, enable_prefix_caching=False)  # so that an output does not depend on earlier requests
    await check_engine(
        lambda: as_engine(MockEngine(args)),
        request=request(9, 60),
        bad_request=request([]),
        open_count=lambda served: sum(rank.live + rank.scheduler.pool.active for rank in served.engine.ranks),
    )


@pytest.mark.parametrize("ending", ["stop", "kill", "close"])
@pytest.mark.parametrize("read", [0, 1, 5])
async def test_a_request_that_ends_early_frees_its_blocks_at_once(ending: str, read: int) -> None:
    engine = MockEngine(SMALL)
    async with running(engine) as served:
        context = Context(request(20, 100))
        stream = await served.generate(context)
        for _ in range(read):
            await anext(stream)
        if ending == "stop":
            context.control.stop()
        elif ending == "kill":
            context.control.kill()
        else:
            await stream.aclose()
        rest = [] if ending == "close" else await stream.collect()
        assert [item.data.finish_reason for item in rest] == ([FinishReason.CANCELLED] if ending == "stop" else [])
        assert_empty(engine)


async def test_a_stop_takes_effect_while_the_request_waits_for_room() -> None:
    engine = MockEngine(SMALL)
    async with (
        running(engine) as served,
        anyio.create_task_group() as tasks,
        await served.generate(Context(request(200, 30))) as first,
    ):
        await anext(first)
        waiting = Context(request(list(range(900, 1100)), 30))
        ended: list[Any] = []

        async def wait() -> None:
            ended.extend(await (await served.generate(waiting)).collect())

        tasks.start_soon(wait)
        await anyio.sleep(0.01)
        assert not ended
        waiting.control.stop()
        await anyio.wait_all_tasks_blocked()
        assert [item.data.finish_reason for item in ended] == [FinishReason.CANCELLED]


async def test_closing_the_engine_ends_what_runs_as_cancelled() -> None:
    engine = MockEngine(SMALL)
    ended: list[Annotated[LLMEngineOutput]] = []

    async def read(served: Any, prompt: int) -> None:
        ended.append((await (await served.generate(Context(request(prompt, 1000)))).collect())[-1])

    async with anyio.create_task_group() as tasks, as_engine(engine) as served:
        for prompt in (3, 30):
            tasks.start_soon(read, served, prompt)
        await anyio.sleep(0.2)
    assert [item.data and item.data.finish_reason for item in ended] == [FinishReason.CANCELLED] * 2
    assert_empty(engine)


async def test_a_broken_model_of_time_fails_what_runs_and_nothing_after() -> None:

    class Broken:
        fails = True

        def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
            if self.fails:
                raise RuntimeError("no such point")
            return 1.0

        def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
            return 1.0

    timing = Broken()
    async with running(MockEngine(SMALL, timing=timing)) as served:
        items = await (await served.generate(Context(request(9)))).collect()
        assert [type(item.error) for item in items] == [BackendUnknown]
        assert str(items[0].error) == "no such point"
        timing.fails = False
        assert len(tokens(await answer(served, request(9)))) == 8


async def test_preempted_requests_emit_every_token_once() -> None:
    args = MockEngineArgs(num_gpu_blocks=12, block_size=4, max_num_batched_tokens=64)
    answered: dict[int, list[int]] = {}
    engine = MockEngine(args)
    async with running(engine) as served, running(MockEngine(SMALL)) as roomy, anyio.create_task_group() as tasks:

        async def collect_answer(prompt: int) -> None:
            answered[prompt] = tokens(await answer(served, request([prompt] * 6, 20)))

        for prompt in range(4):
            tasks.start_soon(collect_answer, prompt)
        await anyio.sleep(60)
        assert engine.ranks[0].scheduler.preemptions > 0
        for prompt in range(4):
            assert answered[prompt] == tokens(await answer(roomy, request([prompt] * 6, 20)))


# -- what observers receive


async def test_events_replayed_give_the_cache() -> None:
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=16, block_size=4))
    events: list[RouterEvent] = []
    known: set[int] = set()
    async with as_engine(engine) as served:
        for source in await engine.kv_event_sources():
            source.on_ready(KvEventPublisher(7, source.dp_rank, events.append))
        for prompt in range(12):
            await answer(served, request([prompt] * 21, 6))
    for number, event in enumerate(events, start=1):
        assert (event.worker_id, event.event.event_id) == (7, number)
        data: Any = event.event.data
        if hasattr(data, "blocks"):
            assert data.parent_hash is None or data.parent_hash in known
            known |= {block.block_hash for block in data.blocks}
        else:
            known -= set(data.block_hashes)
    assert known == engine.ranks[0].scheduler.pool.names()
    assert known


async def test_without_an_event_reader_nothing_is_published() -> None:
    engine = MockEngine(MockEngineArgs(num_gpu_blocks=16, block_size=4), has_event_reader=False)
    events: list[RouterEvent] = []
    async with as_engine(engine) as served:
        for source in await engine.kv_event_sources():
            source.on_ready(KvEventPublisher(7, source.dp_rank, events.append))
        await answer(served, request([1] * 21, 6))
    assert engine.ranks[0].scheduler.pool.names()
    assert not events


@pytest.mark.parametrize("silent", [{"worker_type": "decode"}, {"enable_prefix_caching": False}])
async def test_a_worker_without_a_cache_to_share_has_no_events(silent: dict[str, Any]) -> None:
    engine = MockEngine(MockEngineArgs(**silent))
    async with as_engine(engine):
        assert list(await engine.kv_event_sources()) == []


async def test_its_configuration_is_what_it_simulates() -> None:
    async with as_engine(MockEngine(SMALL, model="m")) as served:
        config: EngineConfig = served.config
    assert (config.model, config.kv_cache_block_size, config.total_kv_blocks) == ("m", 4, 64)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.data_parallel_size) == (8, 64, 1)
    assert (config.bootstrap_host, config.bootstrap_port) == (None, None)


async def test_its_start_takes_the_configured_time() -> None:
    begun_s = anyio.current_time()
    async with as_engine(MockEngine(MockEngineArgs(startup_time=30.0))):
        assert anyio.current_time() - begun_s == 30


# -- one half of a request


async def test_a_prefill_worker_emits_one_token_and_the_transfer_parameters() -> None:
    args = MockEngineArgs(worker_type="prefill", kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0)
    times: list[float] = []
    async with running(MockEngine(args)) as served, await served.generate(Context(request(128, 50))) as stream:
        begun_s = anyio.current_time()
        chunks = []
        async for item in stream:
            chunks.append(item.data)
            times.append((anyio.current_time() - begun_s) * 1000)
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 0]
    assert chunks[0].disaggregated_params["completed_tokens"] == 128
    assert times == [pytest.approx(18.4518, abs=0.001), pytest.approx(18.4518 + 128, abs=0.001)]


async def took_ms(served: Any, payload: PreprocessedRequest) -> float:
    begun_s = anyio.current_time()
    await answer(served, payload)
    return (anyio.current_time() - begun_s) * 1000


async def test_a_decode_worker_pays_nothing_for_prompts_that_were_handed_over() -> None:
    async with running(MockEngine(MockEngineArgs(worker_type="decode"))) as served:
        prefilled = request(5000, 1, prefill_result=PrefillResult({}))
        assert await took_ms(served, prefilled) == pytest.approx(6.0, abs=0.3)


@pytest.mark.parametrize(
    "fields", [{}, {"is_probe": True}, {"annotations": [BYPASS_REMOTE_PREFILL]}], ids=["fallback", "probe", "bypass"]
)
async def test_a_decode_worker_pays_for_a_prompt_that_no_prefill_worker_computes(fields: dict[str, Any]) -> None:
    """It pays as an aggregated worker does, without the cached part."""
    times_ms = []
    for worker_type in ("aggregated", "decode"):
        async with running(MockEngine(MockEngineArgs(worker_type=worker_type))) as served:
            times_ms.append([await took_ms(served, request(tokens, 1, **fields)) for tokens in (5000, 5000, 5200)])
    first, *cached = times_ms[1]
    assert times_ms[1] == pytest.approx(times_ms[0])
    assert first > 90.0
    assert all(6.0 < each < 30.0 for each in cached)
