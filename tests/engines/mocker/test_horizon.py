"""An engine that runs ahead: the same tokens at the same times, the same events and loads, in fewer pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import anyio
import pytest
from attrs import define, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import KvEventPublisher, as_engine
from engines.mocker import (
    Horizon,
    InterpolatedTiming,
    MockEngine,
    MockEngineArgs,
    PolynomialTiming,
    TimedOutput,
    TimingModel,
)
from engines.mocker.scheduling import Scheduler, StepResult
from engines.mocker.timing import DECODE_MS, PREFILL_MS
from pipeline import Context
from pipeline.loop import Timer
from pipeline.protocols import OutputOptions, PreprocessedRequest, SamplingOptions, StopConditions
from pipeline.protocols.kv import PassRates
from pipeline.testing import run_in_virtual_time

ARGS: tuple[dict[str, Any], ...] = (
    {},
    {"engine_type": "sglang", "block_size": 16},
    {"engine_type": "trtllm"},
    {"dp_size": 2},
    {"num_gpu_blocks": 24},
    {"max_num_seqs": 3},
    {"max_num_batched_tokens": 24},
    {"enable_prefix_caching": False},
    {"aic_nextn": 1},
    {"worker_type": "decode"},
)


class CountedTiming:
    """A model of time with a state: it may not be called for a step that has not begun."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        return 20.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        self.calls.append(anyio.current_time())
        return 5.0 + len(self.calls) % 3


def round_steps() -> TimingModel:
    """Return whole multiples of a time: many steps and arrivals coincide."""
    return InterpolatedTiming([1.0, 1e6], [20.0, 20.0], [0.0, 1e6], [0.0, 1e6], [[10.0, 10.0], [10.0, 10.0]])


@frozen
class Row:
    """A token, or the end, of a choice."""

    index: int | None
    what: int | str
    time_s: float
    more: Any


@define
class Played:
    """What an engine did: every token of each request with its time, its end, and the events and loads."""

    answers: dict[int, list[Any]] = field(factory=dict)
    changes: list[Any] = field(factory=list)
    items: int = 0
    bundles: int = 0

    def publish(self, rank: int, snapshot: Any) -> None:
        self.changes.append((anyio.current_time(), rank, snapshot))

    def publish_rates(self, rank: int, rates: Any) -> None:
        self.changes.append((anyio.current_time(), rank, rates))

    def event(self, event: Any) -> None:
        self.changes.append((anyio.current_time(), event))


def request_of(rng: Random) -> PreprocessedRequest:
    prompt = [rng.randrange(3)] * rng.choice((4, 16, 40)) + [rng.randrange(1000) for _ in range(rng.randrange(8))]
    request = PreprocessedRequest(prompt, stop_conditions=StopConditions(max_tokens=rng.choice((1, 2, 40, 120, 200))))
    if rng.random() < 0.2:
        request.sampling_options = SamplingOptions(n=2)
    if rng.random() < 0.2:
        request.output_options = OutputOptions(logprobs=1)
    return request


async def play(
    args: MockEngineArgs,
    timing: Callable[[], TimingModel],
    horizon: Horizon | None,
    seed: int,
    *,
    stops: bool,
    is_watched: bool = True,
) -> Played:
    """Send requests at random times to an engine, some of which are stopped; unless watched, no event or load shows."""
    rng, played = Random(seed), Played()
    engine = MockEngine(args, timing=timing(), horizon=horizon)

    async def one(number: int, request: PreprocessedRequest, at_s: float, stop_s: float | None) -> None:
        await anyio.sleep_until(at_s)
        context, answer = Context(request, id=str(number)), played.answers.setdefault(number, [])
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                assert stop_s is not None
                await anyio.sleep(stop_s)
                context.control.stop()

            if stop_s is not None:
                tasks.start_soon(stop)
            async with await served.generate(context) as stream:
                async for item in stream:
                    chunk = item.ok().data
                    assert chunk is not None
                    played.items += 1
                    times_s: list[float] = [anyio.current_time()] * len(chunk.token_ids)
                    if isinstance(chunk, TimedOutput):
                        played.bundles += 1
                        assert list(chunk.token_times_s) == sorted(chunk.token_times_s)
                        times_s = list(chunk.token_times_s)
                    probabilities: Sequence[Any] = chunk.log_probs or [None] * len(chunk.token_ids)
                    tokens = zip(chunk.token_ids, times_s, probabilities, strict=True)
                    answer += [Row(chunk.index, *token) for token in tokens]
                    if chunk.finish_reason is not None:
                        usage = chunk.completion_usage
                        counts = None if usage is None else (usage.completion_tokens, usage.prompt_tokens_details)
                        answer.append(Row(chunk.index, str(chunk.finish_reason), anyio.current_time(), counts))
            tasks.cancel_scope.cancel()

    async with as_engine(engine) as served:
        for rank in engine.ranks if is_watched else ():
            rank.publish_to(KvEventPublisher(1, rank.dp_rank, played.event))
            rank.reports.snapshots = played  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
            rank.reports.measure(played)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        async with anyio.create_task_group() as tasks:
            for number in range(rng.choice((1, 4, 12))):
                stop_s = rng.uniform(0.01, 1.5) if stops and rng.random() < 0.3 else None
                tasks.start_soon(one, number, request_of(rng), rng.choice((0.0, rng.randrange(30) / 20)), stop_s)
        for rank in engine.ranks:
            assert rank.scheduler.is_idle
            assert not rank.scheduler.pool.active
            rank.scheduler.pool.check()
    return played


def by_choice(played: Played) -> dict[tuple[int, Any], list[Any]]:
    """Return what came for each choice of each request; the choices of one step may come in any order."""
    found: dict[tuple[int, Any], list[Any]] = {}
    for number, rows in played.answers.items():
        for row in rows:
            found.setdefault((number, row.index), []).append(row)
    return found


def play_both(
    args: MockEngineArgs, timing: Callable[[], TimingModel], seed: int, stops: bool, is_watched: bool = True
) -> tuple[Played, Played]:
    async def main(horizon: Horizon | None) -> Played:
        return await play(args, timing, horizon, seed, stops=stops, is_watched=is_watched)

    steps, ahead = (run_in_virtual_time(main, horizon, backend="asyncio") for horizon in (None, Horizon()))
    assert by_choice(ahead) == by_choice(steps)
    assert ahead.changes == steps.changes
    assert steps.bundles == 0
    return steps, ahead


@settings(max_examples=30)
@given(
    st.integers(0, 2**32),
    st.sampled_from(ARGS),
    st.sampled_from([PolynomialTiming, round_steps]),
    st.booleans(),
    st.booleans(),
)
def test_tokens_events_and_loads_have_the_times_of_the_steps(
    seed: int, given_args: dict[str, Any], timing: Callable[[], TimingModel], stops: bool, is_watched: bool
) -> None:
    wanted: dict[str, Any] = {"block_size": 8, "num_gpu_blocks": 4096} | given_args
    args = MockEngineArgs(**wanted)
    play_both(args, timing, seed, stops and timing is PolynomialTiming, is_watched)


def test_a_long_answer_comes_in_few_pieces() -> None:
    args = MockEngineArgs(block_size=64, num_gpu_blocks=4096)
    steps, ahead = play_both(args, PolynomialTiming, 3, False)
    assert ahead.bundles
    assert ahead.items * 4 < steps.items


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_stretch_crosses_the_borders_of_blocks(is_watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence fills and takes 25 blocks; the steps that begin and end requests are the only single ones."""
    counts: list[int] = []
    run_step = Scheduler.run_step

    def counted(scheduler: Scheduler) -> StepResult:
        counts[-1] += 1
        return run_step(scheduler)

    monkeypatch.setattr(Scheduler, "run_step", counted)
    request = PreprocessedRequest([1] * 8, stop_conditions=StopConditions(max_tokens=200))

    async def main(horizon: Horizon | None) -> None:
        counts.append(0)
        engine = MockEngine(MockEngineArgs(block_size=8), horizon=horizon)
        async with as_engine(engine) as served:
            events: list[Any] = []
            if is_watched:
                engine.ranks[0].publish_to(KvEventPublisher(1, 0, events.append))
            await (await served.generate(Context(request))).collect()
            assert len(events) == (25 if is_watched else 0)

    for horizon in (None, Horizon()):
        run_in_virtual_time(main, horizon, backend="asyncio")
    assert counts[0] >= 200
    assert counts[1] <= 5


def test_a_model_of_time_that_may_have_a_state_is_called_as_each_step_begins() -> None:
    models: list[CountedTiming] = []

    def model() -> CountedTiming:
        models.append(CountedTiming())
        return models[-1]

    play_both(MockEngineArgs(block_size=8), model, 5, False)
    assert models[0].calls == models[1].calls != []


def test_an_engine_does_not_run_ahead_beyond_a_cut() -> None:
    """There it may end abruptly: what it made until then has been delivered."""

    async def tokens_until(cut_s: float, horizon: Horizon | None) -> int:
        count = 0
        request = PreprocessedRequest([1] * 8, stop_conditions=StopConditions(max_tokens=500))
        context = Context(request)

        async def read() -> None:
            nonlocal count
            async with await served.generate(context) as stream:
                async for item in stream:
                    assert item.data is not None
                    count += len(item.data.token_ids)

        engine = MockEngine(MockEngineArgs(), horizon=horizon)
        async with as_engine(engine) as served, anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep_until(cut_s)
            tasks.cancel_scope.cancel()
        return count

    for cut_s in (0.5, 1.001, 2.0):
        counts = [
            run_in_virtual_time(tokens_until, cut_s, horizon, backend="asyncio") for horizon in (None, Horizon([cut_s]))
        ]
        assert counts[0] == counts[1] > 0
        assert run_in_virtual_time(tokens_until, cut_s, Horizon(), backend="asyncio") < counts[0]


async def test_only_virtual_time_on_asyncio_is_run_ahead() -> None:
    played = await play(MockEngineArgs(), PolynomialTiming, Horizon(), 3, stops=False)
    assert bool(played.bundles) == Timer().is_exact


@pytest.mark.parametrize(("dp_size", "is_watched"), [(1, True), (2, False)])
def test_what_steps_take_is_reported_alike_whether_a_rank_runs_ahead(dp_size: int, is_watched: bool) -> None:
    """Requests come for 20 seconds, so that rates are fitted again and again, also in the midst of stretches."""
    args = MockEngineArgs(block_size=8, num_gpu_blocks=60_000, dp_size=dp_size, max_num_batched_tokens=512)

    async def main(horizon: Horizon | None) -> list[Any]:
        rng, played = Random(5), Played()
        engine = MockEngine(args, horizon=horizon)

        async def one(number: int) -> None:
            await anyio.sleep(rng.uniform(0, 20))
            prompt = [number] * rng.randrange(8, 2000)
            request = PreprocessedRequest(prompt, stop_conditions=StopConditions(max_tokens=rng.randrange(1, 300)))
            await (await served.generate(Context(request, id=str(number)))).collect()

        async with as_engine(engine) as served:
            for rank in engine.ranks:
                if is_watched:
                    rank.publish_to(KvEventPublisher(1, rank.dp_rank, played.event))
                rank.reports.measure(played)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            async with anyio.create_task_group() as tasks:
                for number in range(160):
                    tasks.start_soon(one, number)
        return [change for change in played.changes if isinstance(change[-1], PassRates)]

    steps, ahead = (run_in_virtual_time(main, horizon, backend="asyncio") for horizon in (None, Horizon()))
    assert ahead == steps
    for rank in range(dp_size):
        last = [change[-1] for change in steps if change[1] == rank][-1]
        assert last.pass_ps == pytest.approx(PREFILL_MS.c * 1e9, rel=0.1)
        assert last.prompt_token_ps == pytest.approx(PREFILL_MS.b * 1e9, rel=0.1)
        assert last.step_ps == pytest.approx(DECODE_MS.c * 1e9, rel=0.1)
        assert last.held_token_ps == pytest.approx(DECODE_MS.b * 1e9 / (60_000 * 8), rel=0.1)
