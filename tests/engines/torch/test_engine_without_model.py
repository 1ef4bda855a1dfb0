"""TorchEngine over cells in the place of a model, in virtual time: who is woken, stopped, refused; the load."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from threading import Event
from typing import Any
from unittest.mock import patch

import anyio
import pytest

from engines import GenerateContext, run_conformance
from engines.publishing import ComponentSnapshot
from engines.torch import Drawn, HeldBlocks, KvBytes, TorchEngine, step_times
from engines.torch.planning import Chunk, StepPlan
from engines.torch.slots import Choice
from engines.torch.step_times import StepTimes
from pipeline import Context, EngineShutdown
from pipeline.errors import BackendUnknown
from pipeline.protocols import FinishReason, LLMEngineOutput, OutputOptions, PrefillResult, PreprocessedRequest
from pipeline.protocols.kv import PassRates

from .worlds import CellEngine, CellMachine, answer_to, order, request_of

CONTEXT: Any = None
"""The context of metrics, which the engine does not read."""


class FakeHandover:
    """Keeps what is offered; a take waits for ever unless it has KV to give."""

    def __init__(self, kv: KvBytes | None = None) -> None:
        self.kv, self.held, self.steps = kv, list[HeldBlocks](), list[str]()

    def offer(self, request: PreprocessedRequest, held: HeldBlocks) -> Any:
        self.held.append(held)
        return {"offer": len(self.held)}

    async def take(self, request: PreprocessedRequest) -> KvBytes | None:
        self.steps.append("take")
        if self.kv is None:
            await anyio.sleep_forever()
        return self.kv

    async def start(self, engine: TorchEngine, peers: Any) -> None:
        self.steps.append("start")

    async def background(self) -> None:
        self.steps.append("background")
        await anyio.sleep_forever()

    async def drain(self) -> None:
        self.steps.append("drain")

    async def close(self) -> None:
        self.steps.append("close")


@asynccontextmanager
async def running(engine: TorchEngine) -> AsyncIterator[TorchEngine]:
    """Start the engine and compute its steps, for a minute at most; `cleanup` ends both, and leaves no thread."""
    with anyio.fail_after(60):
        async with _running(engine):
            yield engine


@asynccontextmanager
async def _running(engine: TorchEngine) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        await engine.start(1)
        tasks.start_soon(engine.background)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await engine.cleanup()
    assert all(thread.name != "torch-1" for thread in threading.enumerate())
    assert engine.batcher.pool.active == 0 or isinstance(engine.handover, FakeHandover)


async def chunks(
    engine: TorchEngine, request: PreprocessedRequest, context: Context[Any] | None = None
) -> list[LLMEngineOutput]:
    context = context or Context(request)
    return [chunk async for chunk in engine.generate(request, GenerateContext(context))]


def tokens(found: list[LLMEngineOutput], index: int | None = None) -> list[int]:
    return [token for chunk in found if index is None or chunk.index == index for token in chunk.token_ids]


async def test_steps_are_computed_in_the_one_thread() -> None:
    names = set[str]()
    machine = CellMachine(64, lambda plan: names.add(threading.current_thread().name))
    async with running(CellEngine(machine)) as engine:
        assert tokens(await chunks(engine, request_of([1, 2], max_tokens=6))) == answer_to([1, 2], 6)
    assert names == {"torch-1"}


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_request_leaves_while_its_prompt_is_fetched(how: str) -> None:
    handover, found = FakeHandover(), list[LLMEngineOutput]()
    request = request_of([1, 2, 3], max_tokens=4)
    request.prefill_result = PrefillResult({})
    context = Context(request)
    async with running(CellEngine(handover=handover, role="decode")) as engine:

        async def ask() -> None:
            found.extend(await chunks(engine, request, context))

        with anyio.fail_after(1):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                assert "take" in handover.steps
                getattr(context, how)()
    assert [chunk.finish_reason for chunk in found] == ([FinishReason.CANCELLED] if how == "stop" else [])


@pytest.mark.parametrize(("role", "taken"), [("decode", 1), ("aggregated", 0), ("prefill", 0)])
async def test_a_prompt_is_fetched_by_decode_workers_only(role: Any, taken: int) -> None:
    handover = FakeHandover(KvBytes(6, bytes(range(6))))
    request = request_of(range(6), max_tokens=3)
    request.prefill_result = PrefillResult({})
    async with running(CellEngine(handover=handover, role=role)) as engine:
        assert tokens(await chunks(engine, request)) == answer_to(range(6), 3)
    assert handover.steps.count("take") == taken
    assert handover.steps[0] == "start"
    assert handover.steps[-1] == "close"


async def test_what_waits_for_blocks_begins_when_a_hand_over_releases_some() -> None:
    handover, second = FakeHandover(), list[LLMEngineOutput]()
    async with running(CellEngine(CellMachine(4), handover=handover, role="prefill")) as engine:

        async def ask() -> None:
            second.extend(await chunks(engine, request_of(range(50, 58), max_tokens=1)))

        first = await chunks(engine, request_of(range(12), max_tokens=1))
        assert first[-1].disaggregated_params == {"offer": 1}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert second == []
            engine.release(handover.held[0])
        assert tokens(second) == answer_to(range(50, 58), 1)
        engine.release(handover.held[1])
        assert engine.batcher.pool.active == 0


async def test_what_waits_for_blocks_begins_when_a_request_that_kept_some_is_dropped() -> None:
    handover, second = FakeHandover(), list[LLMEngineOutput]()
    async with running(CellEngine(CellMachine(4), handover=handover, role="prefill")) as engine:
        request = request_of(range(11), max_tokens=2)
        dropped = engine.generate(request, GenerateContext(Context(request)))
        await anext(dropped)
        await anyio.sleep(1)  # its second token is there, and not read: its blocks are kept

        async def ask() -> None:
            second.extend(await chunks(engine, request_of(range(50, 58), max_tokens=1)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(1)
            assert second == []
            await dropped.aclose()
        assert tokens(second) == answer_to(range(50, 58), 1)


async def test_only_the_first_choice_is_offered() -> None:
    handover = FakeHandover()
    async with running(CellEngine(handover=handover, role="prefill")) as engine:
        found = await chunks(engine, request_of(range(6), max_tokens=1, n=3))
        assert [chunk.disaggregated_params for chunk in found if chunk.index] == [None, None]
        assert len(handover.held) == 1
        engine.release(handover.held[0])
        assert engine.batcher.pool.active == 0


async def test_a_cleanup_ends_what_runs_as_a_stop_does_and_the_steps_with_it() -> None:
    entered, may_go_on, ended = Event(), Event(), list[str]()

    def waits(plan: Any) -> None:
        entered.set()
        may_go_on.wait(5)

    engine, found = CellEngine(CellMachine(64, waits)), list[LLMEngineOutput]()

    async def steps() -> None:
        await engine.background()
        ended.append("background")

    async def ask() -> None:
        found.extend(await chunks(engine, request_of([1, 2], max_tokens=50)))
        may_go_on.set()

    await engine.start(1)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(steps)
            tasks.start_soon(ask)
            await anyio.to_thread.run_sync(entered.wait, 5)
            await engine.cleanup()
    assert [chunk.finish_reason for chunk in found] == [FinishReason.CANCELLED]
    assert ended == ["background"]
    with pytest.raises(EngineShutdown):
        await chunks(engine, request_of([1, 2]))


async def test_steps_that_fail_now_and_then_do_not_end_the_engine() -> None:
    def fails(plan: Any) -> None:
        if any(one.choice.tokens[0] == 99 for one in plan.chunks):
            raise RuntimeError("no memory")

    async with running(CellEngine(CellMachine(64, fails))) as engine:
        for _ in range(6):
            with pytest.raises(BackendUnknown, match="no memory"):
                await chunks(engine, request_of([99, 1], max_tokens=2))
            assert tokens(await chunks(engine, request_of([1], max_tokens=2))) == answer_to([1], 2)


async def test_the_load_is_published_as_it_changes_and_down_to_nothing() -> None:
    published = list[ComponentSnapshot]()

    class Publisher:
        def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
            assert rank == 0
            published.append(snapshot)

    async with running(CellEngine()) as engine:
        bindings = await engine.setup_metrics(CONTEXT)
        assert bindings.on_publisher_ready is not None
        bindings.on_publisher_ready(Publisher())  # type: ignore[arg-type]
        await chunks(engine, request_of(range(8), max_tokens=6))
        await anyio.wait_all_tasks_blocked()
    used = [snapshot.kv_used_blocks for snapshot in published]
    assert (max(used), used[-1]) == (3, 0)
    assert all(first != second for first, second in pairwise(published))


async def test_what_steps_take_is_published() -> None:
    """Each step takes as long as it has tokens, and 5 ms; the clock of the compute thread is that of the test."""
    published, now_ns = list[PassRates](), 0

    class Publisher:
        def publish(self, rank: int, snapshot: ComponentSnapshot) -> None: ...

        def publish_rates(self, rank: int, rates: PassRates) -> None:
            assert rank == 0
            published.append(rates)

    def take_time(plan: StepPlan) -> None:
        nonlocal now_ns
        now_ns += 5_000_000 + 10_000 * sum(chunk.count for chunk in plan.chunks)

    engine = CellEngine(CellMachine(128, take_time), max_num_batched_tokens=512)
    with patch.object(step_times, "perf_counter_ns", lambda: now_ns):
        async with running(engine):
            engine._keep_snapshots(Publisher())  # type: ignore[arg-type]
            for number in range(40):
                await chunks(engine, request_of(range(number, 6 * number + 1), max_tokens=3))
                await anyio.sleep(0.3)
    last = published[-1]
    assert last.prompt_token_ps == pytest.approx(10_000_000, rel=0.02)
    assert last.pass_ps == pytest.approx(5_000_000_000, rel=0.02)


def test_a_step_that_draws_nothing_is_not_measured_nor_the_one_after() -> None:
    """A device may still compute it when the call returns."""
    times, choice = StepTimes(), Choice(order=order(range(100)), index=0, receive=lambda news: None)
    part = StepPlan((Chunk(choice, 0, 50, ()),))
    whole = StepPlan((Chunk(choice, 50, 50, ()),))
    counts = list[int]()
    for plan in (part, whole, part, whole, whole, whole):
        times.step(plan, 1, 0)
        counts.append(times._meter._prompts.added[0])
    assert counts == [0, 0, 0, 0, 1, 2]


async def test_the_load_falls_when_a_hand_over_releases_its_blocks() -> None:
    published, handover = list[ComponentSnapshot](), FakeHandover()

    class Publisher:
        def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
            published.append(snapshot)

    async with running(CellEngine(handover=handover, role="prefill")) as engine:
        engine._keep_snapshots(Publisher())  # type: ignore[arg-type]
        await chunks(engine, request_of(range(8), max_tokens=1))
        await anyio.wait_all_tasks_blocked()
        assert published[-1].kv_used_blocks == 2
        engine.release(handover.held[0])
        await anyio.wait_all_tasks_blocked()
        assert published[-1].kv_used_blocks == 0


@pytest.mark.parametrize(("caches", "sources"), [(True, 1), (False, 0)])
async def test_an_engine_that_caches_nothing_has_no_events(caches: bool, sources: int) -> None:
    assert len(await CellEngine(caches_prefixes=caches).kv_event_sources()) == sources


async def test_two_engines_name_the_same_blocks_differently() -> None:
    names = []
    for _ in range(2):
        async with running(CellEngine()) as engine:
            await chunks(engine, request_of(range(8), max_tokens=1))
            names.append(engine.batcher.pool.names())
    assert not names[0] & names[1]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_for_no_tokens_gets_none(n: int) -> None:
    async with running(CellEngine()) as engine:
        found = await chunks(engine, request_of([1, 2], max_tokens=0, n=n))
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in found] == [([], FinishReason.LENGTH)] * n
    assert [chunk.index or 0 for chunk in found] == list(range(n))


async def test_each_choice_ends_by_itself_and_the_last_one_brings_the_usage() -> None:
    prompt = list(range(9))
    request = request_of(prompt, max_tokens=6, n=3)
    request.stop_conditions.stop_token_ids = [answer_to(prompt, 2, 1)[-1]]
    async with running(CellEngine()) as engine:
        found = await chunks(engine, request)
    assert [tokens(found, index) for index in range(3)] == [
        answer_to(prompt, 6),
        answer_to(prompt, 2, 1),
        answer_to(prompt, 6, 2),
    ]
    ends = {chunk.index: (chunk.finish_reason, chunk.stop_reason) for chunk in found if chunk.finish_reason}
    stopped = FinishReason.STOP, answer_to(prompt, 2, 1)[-1]
    assert ends == {0: (FinishReason.LENGTH, None), 1: stopped, 2: (FinishReason.LENGTH, None)}
    assert [chunk.completion_usage is not None for chunk in found] == [False] * 13 + [True]
    usage = found[-1].completion_usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 14, 23)


async def test_log_probabilities_add_up_for_each_choice_and_hold_the_drawn_token_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = CellMachine(64)
    runs: Callable[[Any], list[Drawn | None]] = machine.run

    def run(plan: Any) -> list[Drawn | None]:
        return [
            drawn
            and Drawn(
                drawn.token_id,
                -1.0 - chunk.choice.index,
                7,
                ((5, -0.1), (drawn.token_id, -1.0))[: 2 - chunk.choice.index],
            )
            for chunk, drawn in zip(plan.chunks, runs(plan), strict=True)
        ]

    monkeypatch.setattr(machine, "run", run)
    request = request_of(range(6), max_tokens=3, n=2)
    request.output_options = OutputOptions(logprobs=2)
    async with running(CellEngine(machine)) as engine:
        found = await chunks(engine, request)
    for index in range(2):
        own = [chunk for chunk in found if chunk.index == index]
        assert [chunk.log_probs for chunk in own] == [[-1.0 - index]] * 3
        assert [chunk.cum_log_probs for chunk in own] == [(-1.0 - index) * n for n in (1, 2, 3)]
        for chunk in own:
            assert chunk.top_logprobs is not None
            ranks = [(one.rank, one.token_id, one.logprob) for one in chunk.top_logprobs[0]]
            last = (2, chunk.token_ids[0], -1.0) if index == 0 else (7, chunk.token_ids[0], -2.0)
            assert ranks == [(1, 5, -0.1), last]


async def test_what_is_drawn_and_not_read_is_not_given_after_a_stop() -> None:
    async with running(CellEngine()) as engine:
        request = request_of([1, 2], max_tokens=6)
        context = Context(request)
        stream = engine.generate(request, GenerateContext(context))
        first = await anext(stream)
        await anyio.sleep(1)
        context.stop()
        rest = [chunk async for chunk in stream]
    assert first.token_ids == answer_to([1, 2], 1)
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in rest] == [([], FinishReason.CANCELLED)]
    assert rest[0].completion_usage is not None
    assert rest[0].completion_usage.completion_tokens == 1


@pytest.mark.slow
class TestContract:
    """In real time: a virtual clock gives the engine's thread no time to come to rest."""

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    async def test_it_holds_the_contract_of_engines(self) -> None:
        await run_conformance(CellEngine, bad_request=request_of([1000]))


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_request_that_waits_for_a_place_ends_at_once(how: str) -> None:
    handover, found = FakeHandover(), list[LLMEngineOutput]()
    async with running(CellEngine(CellMachine(4), handover=handover, role="prefill")) as engine:
        await chunks(engine, request_of(range(12), max_tokens=1))  # its blocks are held, so the next one waits
        request = request_of(range(50, 58), max_tokens=1)
        context = Context(request)

        async def ask() -> None:
            found.extend(await chunks(engine, request, context))

        with anyio.fail_after(1):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                assert len(engine.batcher.waiting) == 1
                getattr(context, how)()
        assert len(engine.batcher.waiting) == 0
        engine.release(handover.held[0])
    assert [chunk.finish_reason for chunk in found] == ([FinishReason.CANCELLED] if how == "stop" else [])


async def test_a_request_that_is_dropped_leaves_its_place_to_the_next() -> None:
    async with running(CellEngine(max_num_seqs=1)) as engine:
        request = request_of([1, 2], max_tokens=200)
        dropped = engine.generate(request, GenerateContext(Context(request)))
        await anext(dropped)
        await dropped.aclose()
        with anyio.fail_after(1):
            assert tokens(await chunks(engine, request_of([5], max_tokens=3))) == answer_to([5], 3)
        assert (engine.batcher.pool.active, engine.batcher.running) == (0, [])
