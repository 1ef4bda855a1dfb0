"""TorchEngine under faults: steps that fail, loads that are given up, requests that leave during a step."""

from __future__ import annotations

from threading import Event
from typing import Any

import anyio
import pytest

from engines import EngineConfig, GenerateContext, as_engine
from engines.torch import LoadingProgress, PeerHandover, TorchEngine
from pipeline import Context, EngineShutdown, InvalidArgument
from pipeline.errors import BackendUnknown
from pipeline.llm import block_hashes
from pipeline.protocols import FinishReason
from pipeline.protocols.kv import KvEventData, KvStored

from .tiny_model import answers_of, chunks_of, loader, plain_answer, tiny_engine, tiny_model, tokens_of
from .worlds import request_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    tiny_model()


def broken_steps(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, *, fails: Any) -> None:
    """Let the steps of a started engine fail for which `fails(plan)` is true."""
    machine = engine._machine
    assert machine is not None
    runs = machine.run

    def run(plan: Any) -> Any:
        if fails(plan):
            raise RuntimeError("out of memory")
        return runs(plan)

    monkeypatch.setattr(machine, "run", run)


async def test_a_step_that_fails_ends_its_requests_and_later_ones_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_engine()
    async with as_engine(made) as engine:
        broken_steps(made, monkeypatch, fails=lambda plan: any(99 in one.choice.tokens for one in plan.chunks))
        with pytest.raises(BackendUnknown, match="out of memory"):
            await chunks_of(engine, request_of([99, 1], max_tokens=5))
        assert await tokens_of(engine, request_of([1, 2], max_tokens=5)) == plain_answer([1, 2], 5)
        assert made.batcher.pool.active == 0
        made.batcher.pool.check()


async def test_steps_that_keep_failing_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made, failures = tiny_engine(), list[BaseException]()

    async def ask_again_and_again() -> None:
        async with as_engine(made) as engine:
            broken_steps(made, monkeypatch, fails=lambda plan: True)
            for _ in range(5):
                try:
                    await chunks_of(engine, request_of([1, 2], max_tokens=5))
                except BackendUnknown as error:
                    failures.append(error)

    with pytest.raises(ExceptionGroup) as ended, anyio.fail_after(5):
        await ask_again_and_again()
    assert len(failures) == 3
    assert ended.group_contains(BackendUnknown)


async def test_logits_that_are_no_numbers_are_an_error_and_not_a_token() -> None:
    torch: Any = pytest.importorskip("torch")
    model = tiny_model(seed=9)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    async with as_engine(tiny_engine(model)) as engine:
        with pytest.raises(BackendUnknown, match="no numbers"):
            await chunks_of(engine, request_of([1, 2], max_tokens=5))


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_request_leaves_while_a_step_runs_with_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, entered, may_go_on = tiny_engine(), Event(), Event()
    context, items = Context(request_of([1, 2, 3], max_tokens=50)), list[Any]()

    def waits(plan: Any) -> bool:
        entered.set()
        return not may_go_on.wait(10)

    async with as_engine(made) as engine:
        broken_steps(made, monkeypatch, fails=waits)

        async def read() -> None:
            async with await engine.generate(context) as stream:
                items.extend([item async for item in stream])

        try:
            with anyio.fail_after(5):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(read)
                    assert await anyio.to_thread.run_sync(entered.wait, 5)
                    getattr(context, how)()
            assert made.batcher.pool.active == 0
        finally:
            may_go_on.set()
        finishes = [item.data.finish_reason for item in items if item.data]
        assert finishes == ([FinishReason.CANCELLED] if how == "stop" else [])
        assert await tokens_of(engine, request_of([1, 2], max_tokens=5)) == plain_answer([1, 2], 5)


async def test_a_load_is_given_up_when_the_engine_is_closed() -> None:
    began, reports = Event(), list[LoadingProgress]()

    def load(report: Any) -> Any:
        for done in range(10_000):
            report(LoadingProgress("loading weights", done, 10_000))
            began.set()
            Event().wait(0.001)
        raise AssertionError("it was loaded to its end")

    engine = TorchEngine(load, on_progress=reports.append)
    outcome: list[BaseException] = []

    async def start() -> None:
        try:
            await engine.start(1)
        except EngineShutdown as error:
            outcome.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        assert await anyio.to_thread.run_sync(began.wait, 5)
        await engine.cleanup()
    assert len(outcome) == 1
    assert 0 < len(reports) < 10_000


async def test_a_start_whose_engine_is_closed_meanwhile_leaves_nothing_open() -> None:
    """Closed behind the last report of the load, and while the hand-over starts."""
    steps = list[str]()

    class Handover(PeerHandover):
        async def start(self, engine: Any, peers: Any) -> None:
            steps.append("start")
            await engine.cleanup()

        async def close(self) -> None:
            steps.append("close")

    def load(report: Any) -> Any:
        began.set()
        may_end.wait(5)
        return loader()(report)

    began, may_end = Event(), Event()
    engine = TorchEngine(load, handover=Handover(prefills=True))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(raises_shutdown, engine)
        assert await anyio.to_thread.run_sync(began.wait, 5)
        tasks.start_soon(engine.cleanup)
        await anyio.wait_all_tasks_blocked()
        may_end.set()
    assert steps == ["close"]
    await raises_shutdown(TorchEngine(loader(), handover=Handover(prefills=True)))
    assert steps == ["close", "start", "close", "close"]


async def raises_shutdown(engine: TorchEngine) -> None:
    with pytest.raises(EngineShutdown):
        await engine.start(1)
    assert engine.batcher.pool.active == 0
    with pytest.raises(EngineShutdown):
        assert engine.store


async def test_a_load_that_fails_is_raised_by_the_start() -> None:
    def fails(report: Any) -> Any:
        raise InvalidArgument("no such model", field="model_path")

    with pytest.raises(InvalidArgument, match="no such model"):
        async with as_engine(TorchEngine(fails)):
            pytest.fail("it started")


async def test_an_engine_that_is_not_running_refuses_requests() -> None:
    engine = tiny_engine()
    with pytest.raises(EngineShutdown):
        await anext(engine.generate(request_of([1]), GenerateContext(Context(request_of([1])))))
    await engine.cleanup()
    with pytest.raises(EngineShutdown):
        await engine.start(1)


async def test_a_cache_without_room_for_a_block_is_refused() -> None:
    engine = TorchEngine(loader(), tiny_engine().settings.__class__(kv_cache_bytes=1))
    with pytest.raises(InvalidArgument, match="no room"):
        async with as_engine(engine):
            pytest.fail("it started")


async def test_the_config_names_what_the_model_and_the_cache_allow() -> None:
    made = tiny_engine(kv_cache_blocks=20, max_num_seqs=3)
    async with as_engine(made) as engine:
        assert engine.config == EngineConfig(
            model="tiny",
            context_length=160,
            kv_cache_block_size=8,
            total_kv_blocks=20,
            max_num_seqs=3,
            max_num_batched_tokens=32,
        )
        with pytest.raises(InvalidArgument, match="there is room for 159"):
            await chunks_of(engine, request_of([1] * 160))
        full = await chunks_of(engine, request_of([1] * 150))
    assert [len(full), full[-1].finish_reason] == [10, FinishReason.LENGTH]


async def test_events_name_the_blocks_of_prompt_and_answer_as_routers_do() -> None:
    made, events = tiny_engine(), list[KvEventData]()

    class Publisher:
        publish = events.append

    prompt = list(range(20))
    async with as_engine(made) as engine:
        for source in await made.kv_event_sources():
            source.on_ready(Publisher())  # type: ignore[arg-type]
        answer = await tokens_of(engine, request_of(prompt, max_tokens=8))
        await answers_of(engine, [request_of(prompt, max_tokens=8)])
    stored = [block for event in events if isinstance(event, KvStored) for block in event.blocks]
    assert [block.tokens_hash for block in stored] == block_hashes([*prompt, *answer], 8)
    assert len({block.block_hash for block in stored}) == 3
