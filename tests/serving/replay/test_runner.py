"""A trace through real graphs: every request once, although workers fail."""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import pytest

from engines import EngineConfig, GenerateContext, LLMEngine
from operators.kv import KvRouterConfig
from pipeline import Annotated, AsyncEngine, Context, EngineShutdown, InvalidArgument, ResponseStream
from pipeline.errors import ResourceExhausted
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest
from pipeline.testing import bundled, run_in_virtual_time
from serving.deployment import GraphConfig
from serving.replay import Prompt, Report, Session, SyntheticLoad, Trace, Turn, parse_faults, run, run_config

ROUTINGS: dict[str, dict[str, Any]] = {
    "round robin": {"router": "round-robin"},
    "random": {"router": "random"},
    "two choices": {"router": "p2c"},
    "least loaded": {"router": "least-loaded"},
    "kv": {"router": "kv"},
    "approximate kv": {"router": "kv", "kv_router": KvRouterConfig(use_kv_events=False)},
}


def load(count: int = 24, output_tokens: int = 20, **more: Any) -> Trace:
    given: dict[str, Any] = {"arrival_interval_ms": 50.0, "shared_prefix_ratio": 0.5, "num_prefix_groups": 3} | more
    return SyntheticLoad(input_tokens=1024, output_tokens=output_tokens, request_count=count, **given).make()


def config(**more: Any) -> GraphConfig:
    given: dict[str, Any] = {"engine": "mocker", "workers": 3, "seed": 7} | more
    return GraphConfig(**given)


def all_came_whole(report: Report, trace: Trace) -> bool:
    assert report.per_request is not None
    lengths = {one.name: (one.output_length, one.requested_output_length) for one in report.per_request}
    return (
        len(lengths) == report.completed_requests == trace.requests
        and all(length == wanted for length, wanted in lengths.values())
        and report.total_output_tokens == trace.output_tokens
    )


@pytest.mark.parametrize("prefill_workers", [0, 2], ids=["aggregated", "with a prefill pool"])
@pytest.mark.parametrize("routing", ROUTINGS)
async def test_every_request_of_the_trace_is_answered_once_and_whole(routing: str, prefill_workers: int) -> None:
    trace = load()
    report = await run_config(config(**ROUTINGS[routing], prefill_workers=prefill_workers), trace, per_request=True)
    assert all_came_whole(report, trace)
    assert sum(one.requests for one in report.workers if one.role == "decode") == 24
    prefilled = [one for one in report.workers if one.role == "prefill"]
    assert (len(prefilled), sum(one.requests for one in prefilled)) == ((2, 24) if prefill_workers else (0, 0))
    assert report.kv_transfer.samples == (24 if prefill_workers else 0)
    assert report.per_request is not None
    prompts_at = "prefill_worker" if prefill_workers else "worker"
    assert len({getattr(one, prompts_at) for one in report.per_request}) > 1


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("engine_args", [{"engine_type": "trtllm"}, {"engine_type": "sglang"}, {"dp_size": "2"}])
async def test_prefill_pools_are_of_any_engine_and_of_several_ranks(engine_args: dict[str, str], meets: bool) -> None:
    """TensorRT-LLM and several ranks are replayed too. Both pools have one set of engine arguments."""
    given = engine_args | ({"bootstrap_port": "9000"} if meets else {})
    trace = load()
    report = await run_config(config(router="kv", prefill_workers=2, engine_args=given), trace, per_request=True)
    assert all_came_whole(report, trace)
    assert sum(one.requests for one in report.workers if one.role == "prefill") == 24


class Ticking(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """A token each millisecond."""

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        async def ticks() -> AsyncIterator[Annotated[LLMEngineOutput]]:
            for token_id in range(request.payload.stop_conditions.max_tokens or 0):
                await anyio.sleep(0.001)
                yield Annotated(LLMEngineOutput([token_id]))
            yield Annotated(LLMEngineOutput.stop())

        return ResponseStream(ticks(), request)


@pytest.mark.parametrize("size", [1, 7, None])
async def test_tokens_of_one_item_count_each(size: int | None) -> None:
    load = SyntheticLoad(input_tokens=8, output_tokens=49, request_count=7, arrival_interval_ms=100.0).make()
    report = await run(lambda: nullcontext(bundled(Ticking(), size)), load, per_request=True)
    assert all_came_whole(report, load)
    assert report.itl.samples == 7 * 48


async def test_times_of_whole_milliseconds_are_reported_as_such() -> None:
    """Subtracting times of the clock gives 48.99999999997817."""
    load = SyntheticLoad(input_tokens=8, output_tokens=49, request_count=7, arrival_interval_ms=1000 / 3).make()
    report = await run(lambda: nullcontext(Ticking()), load, per_request=True)
    for one in report.per_request or ():
        assert (one.ttft_ms, one.ttst_ms, one.tpot_ms, one.e2e_latency_ms) == (1, 1, 1, 49)
    assert len(report.per_request or ()) == report.completed_requests == 7
    for figures, value in ((report.ttft, 1), (report.e2e_latency, 49), (report.itl, 1)):
        assert (figures.min, figures.median, figures.max) == (value, value, value)
    rates = report.output_token_throughput_per_user
    assert (rates.min, rates.max) == (1000, 1000)


async def test_a_router_that_knows_the_caches_reuses_more() -> None:
    trace = load(60, num_prefix_groups=6, shared_prefix_ratio=0.9, trace_block_size=64)
    reused = {
        name: (await run_config(config(**ROUTINGS[name]), trace)).prefix_cache_reused_ratio
        for name in ("round robin", "kv")
    }
    assert reused["kv"] > reused["round robin"]


SCRIPT = (
    "worker 1 dies at 0.3 s, returns at 0.6 s",
    "prefill worker 0 dies at 0.4 s, returns at 0.7 s",
    "all restart at 0.8 s, every 100 ms, down 50 ms",
)


@pytest.mark.parametrize("routing", ROUTINGS)
async def test_nothing_is_lost_while_workers_die_return_and_restart_one_after_the_other(routing: str) -> None:
    trace = load(40, 60)
    report = await run_config(
        config(**ROUTINGS[routing], prefill_workers=2), trace, faults=parse_faults(SCRIPT), per_request=True
    )
    assert all_came_whole(report, trace)
    seconds = {(one.role, one.worker): one.worker_seconds for one in report.workers}
    assert seconds["decode", 1] <= report.duration_ms / 1000 - 0.3 + 1e-9
    assert seconds["prefill", 0] <= report.duration_ms / 1000 - 0.3 + 1e-9
    assert seconds["prefill", 1] == pytest.approx(report.duration_ms / 1000)


class Positions(LLMEngine):
    """Each token is its position in the whole answer, one each 100 ms: a lost or repeated one shows."""

    startup_s = 0.0

    async def start(self, worker_id: int) -> EngineConfig:
        await anyio.sleep(self.startup_s)
        return EngineConfig(model="positions", context_length=100_000)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        begin, count = len(request.token_ids), request.stop_conditions.max_tokens or 0
        for position in range(begin, begin + count):
            await anyio.sleep(0.1)
            if context.is_stopped:
                yield LLMEngineOutput.cancelled().with_usage(CompletionUsage.of(begin, position - begin))
                return
            yield LLMEngineOutput.token(position)
        yield LLMEngineOutput.length().with_usage(CompletionUsage.of(begin, count))

    async def cleanup(self) -> None:
        pass


class SlowToStart(Positions):
    """The first workers start at once."""

    made = 0

    def __init__(self) -> None:
        SlowToStart.made += 1
        self.startup_s = 5.0 if SlowToStart.made > 2 else 0.0


class FailsLater(Positions):
    """The third one cannot start."""

    made = 0

    def __init__(self) -> None:
        FailsLater.made += 1
        self.number = FailsLater.made

    async def start(self, worker_id: int) -> EngineConfig:
        if self.number > 2:
            raise InvalidArgument("has had enough", field="volume")
        return await super().start(worker_id)


@pytest.fixture(autouse=True)
def engines_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowToStart.made = FailsLater.made = 0
    names = {"Positions": Positions, "SlowToStart": SlowToStart, "FailsLater": FailsLater}
    monkeypatch.setitem(sys.modules, "replayed_engines", SimpleNamespace(**names))


def hosted(name: str = "Positions", **more: Any) -> GraphConfig:
    given: dict[str, Any] = {"engine": f"replayed_engines:{name}", "workers": 2, "seed": 7} | more
    return GraphConfig(**given)


@pytest.mark.parametrize("prompt_block", [64, 512])
async def test_the_answers_of_a_replay_with_faults_are_those_without(
    prompt_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token: none is lost or repeated where a worker died."""
    from serving.replay import driver

    answers: defaultdict[str, list[int]] = defaultdict(list)
    answered = driver.LoadDriver._answered

    async def listening(self: Any, request: Context[PreprocessedRequest], *rest: Any) -> Any:
        tokens, status = await answered(self, request, *rest)
        answers[request.id] += tokens
        return tokens, status

    monkeypatch.setattr(driver.LoadDriver, "_answered", listening)
    trace = load(8, 30, trace_block_size=prompt_block)
    script = parse_faults(["worker 0 dies at 1.05, returns at 2", "worker 1 dies at 2.15, returns at 2.5"])
    report = await run_config(hosted(), trace, faults=script)
    assert report.migrations > 2
    assert dict(answers) == {turn.name: list(range(1024, 1054)) for one in trace.sessions for turn in one.turns}


async def test_a_worker_that_dies_while_it_starts_never_was_there() -> None:
    trace = load(4, 30, arrival_interval_ms=4000.0)
    script = parse_faults(["worker 0 dies at 1, returns at 2, dies at 4, returns at 8"])
    report = await run_config(hosted("SlowToStart"), trace, faults=script)
    assert report.completed_requests == 4
    first = report.workers[0]
    assert first.worker_seconds == pytest.approx(1.0 + report.duration_ms / 1000 - 13.0)


async def test_a_worker_that_cannot_come_back_ends_the_replay_with_its_error() -> None:
    with pytest.raises(InvalidArgument, match="had enough"):
        await run_config(hosted("FailsLater"), load(4, 50), faults=parse_faults(["worker 0 dies at 1, returns at 1.5"]))


async def test_faults_after_the_last_request_do_not_delay_the_end() -> None:
    """A worker may also still be leaving, for an hour, when the last request ends elsewhere."""
    script = parse_faults(["worker 0 leaves at 0.31", "worker 1 dies at 2 h"])
    report = await run_config(hosted(), load(4, 30), faults=script)
    assert report.completed_requests == 4
    assert anyio.current_time() < 60


async def test_an_interrupted_replay_reports_what_was_done() -> None:
    async def enough() -> None:
        await anyio.sleep(0.52)

    script = parse_faults(["worker 0 dies at 100 ms", "worker 1 dies at 9000 s"])
    report = await run_config(config(), load(), faults=script, stop_when=enough, settings={"by": "hand"})
    assert report.settings == {"by": "hand", "interrupted": True}
    assert report.duration_ms == pytest.approx(520.0)
    # One each 50 ms from the beginning on.
    assert (report.num_requests, report.unsent_requests) == (11, 13)
    assert report.completed_requests > 0
    assert report.completed_requests + report.unfinished_requests == 11


async def test_an_invalid_script_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidArgument, match="no worker 5"):
        await run_config(hosted(), load(1), faults=parse_faults(["worker 5 dies at 1"]))


async def test_a_closed_loop_has_so_many_sessions_at_a_time() -> None:
    trace = load(12, 10, turns=2, inter_turn_delay_ms=100.0)
    report = await run_config(hosted(), trace, sessions_at_a_time=3, per_request=True)
    assert report.completed_requests == 24
    # twelve sessions, three at a time: four rounds of two turns of a second each, and the thought between them
    assert report.duration_ms == pytest.approx(4 * 2100.0)
    assert report.series is not None
    assert max(report.series.running) <= 3 + 1e-9


async def test_a_prompt_that_no_worker_can_hold_is_rejected_and_its_session_continues() -> None:
    small = config(workers=1, engine_args={"num_gpu_blocks": "4", "block_size": "64"})
    report = await run_config(small, load(3, 5, turns=2))
    assert (report.num_requests, report.rejected_requests, report.unsent_requests) == (6, 6, 0)
    assert (report.ttft.samples, report.request_throughput_rps) == (0, 0.0)


async def test_a_prompt_counts_as_reused_where_it_was_computed() -> None:
    """The prefill worker had cached two prompts of 1,024 tokens but for the last block, which it computes for its
    answer; the decode workers had cached nothing."""
    trace = load(2, 5, shared_prefix_ratio=1.0, num_prefix_groups=1, arrival_interval_ms=1000.0)
    given = {"engine_args": {"block_size": "64"}, "workers": 2, "prefill_workers": 1}
    report = await run_config(config(**given), trace, per_request=True)
    assert report.prefix_cache_reused_ratio == report.first_admission_prefix_cache_reused_ratio == 960 / 2048
    assert {(one.role, one.hit_rate) for one in report.workers} == {("prefill", 960 / 2048), ("decode", None)}


def test_a_closed_loop_takes_the_times_of_another_simulator() -> None:
    """Six requests, two at a time, in the offline replay of Dynamo 1.2.1: the successor of a request that ended with a
    pass is in the next pass. The figures are those of Dynamo, in its unit of nanoseconds."""
    blocks = ((number, 100 * number, 5 + number) for number in range(1, 7))
    turns = [
        Turn(f"line:{number}", number, Prompt.of(array("I", [number]), 512, tokens), output)
        for number, tokens, output in blocks
    ]
    trace = Trace(tuple(Session(turn.name, (turn,), 0.0, is_named=False) for turn in turns))
    for workers, sessions, ttft_ms, duration_ms in (
        (1, 2, 28.193363, 269.452705),
        (2, 4, 30.007567, 154.091593),
    ):
        given = config(workers=workers, engine_args={"block_size": "64"}, router="round-robin")
        report = run_in_virtual_time(partial(run_config, given, trace, sessions_at_a_time=sessions), backend="asyncio")
        assert report.ttft.mean == pytest.approx(ttft_ms, abs=1e-4)
        assert report.duration_ms == pytest.approx(duration_ms, abs=1e-4)


async def test_arrivals_are_as_recorded_or_so_many_times_as_fast() -> None:
    for speed_up, last_ms in ((1.0, 23 * 50.0), (10.0, 23 * 5.0)):
        report = await run_config(config(), load(), speed_up=speed_up, per_request=True)
        assert report.per_request is not None
        assert report.per_request[-1].arrival_time_ms == pytest.approx(last_ms)


# -- a graph of one's own


class Echo(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """An engine without workers or router: a token each second. It counts calls and open answers."""

    def __init__(self, failure: Exception | None = None, fails_at: int = 3) -> None:
        self.failure, self.fails_at = failure, fails_at
        self.calls = self.open = 0
        self.is_closed = False

    @asynccontextmanager
    async def graph(self) -> AsyncIterator[Echo]:
        try:
            yield self
        finally:
            self.is_closed = True

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        self.calls += 1
        if self.failure is not None and self.calls == self.fails_at:
            raise self.failure
        return ResponseStream(self._answer(request), request)

    async def _answer(self, request: Context[PreprocessedRequest]) -> AsyncIterator[Annotated[LLMEngineOutput]]:
        self.open += 1
        try:
            for _ in range(request.payload.stop_conditions.max_tokens or 0):
                await anyio.sleep(1.0)
                yield Annotated(LLMEngineOutput.token(1))
        finally:
            self.open -= 1


async def test_a_graph_of_ones_own_is_driven_and_closed() -> None:
    echo, ended = Echo(), list[int]()
    report = await run(
        echo.graph, load(4, 3, arrival_interval_ms=500.0), on_progress=ended.append, settings={"by": "hand"}
    )
    assert (report.completed_requests, report.total_output_tokens, report.settings) == (4, 12, {"by": "hand"})
    assert report.ttft.mean == pytest.approx(1000.0)
    assert report.tpot.mean == pytest.approx(1000.0)
    assert report.duration_ms == pytest.approx(4500.0)
    assert (ended, echo.open, echo.is_closed) == ([1, 2, 3, 4], 0, True)


async def test_a_penstock_error_counts_and_the_replay_continues() -> None:
    for failure, counted in (
        (ResourceExhausted("busy"), "rejected"),
        (InvalidArgument("too long"), "rejected"),
        (EngineShutdown("gone"), "failed"),
    ):
        report = await run(Echo(failure).graph, load(4, 3))
        assert (report.completed_requests, getattr(report, f"{counted}_requests")) == (3, 1)


async def test_any_other_error_ends_the_replay_as_itself_and_leaves_nothing_open() -> None:
    echo = Echo(ZeroDivisionError("a mistake"))
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        await run(echo.graph, load(4, 3))
    assert (echo.open, echo.is_closed) == (0, True)


async def test_a_cancelled_replay_closes_open_streams() -> None:
    echo = Echo()
    with anyio.move_on_after(2.5) as scope:
        await run(echo.graph, load(4, 30))
    assert scope.cancelled_caught
    assert (echo.calls, echo.open, echo.is_closed) == (4, 0, True)


async def test_an_answer_with_a_cancelled_or_failed_finish_is_not_completed() -> None:
    class Failing(Echo):
        async def _answer(self, request: Context[PreprocessedRequest]) -> AsyncIterator[Annotated[LLMEngineOutput]]:
            yield Annotated(LLMEngineOutput.token(1))
            yield Annotated(LLMEngineOutput.cancelled() if self.calls == 1 else LLMEngineOutput.error("broke"))

    report = await run(Failing().graph, load(2, 3))
    assert (report.completed_requests, report.cancelled_requests, report.failed_requests) == (0, 1, 1)


# -- the same again

BACKENDS: tuple[Literal["asyncio", "trio"], ...] = ("asyncio", "asyncio", "trio")


@pytest.fixture
def again() -> dict[str, Any]:
    return {"faults": parse_faults(SCRIPT[::2]), "per_request": True}


@pytest.mark.parametrize("routing", ["random", "kv"])
def test_both_loops_count_the_same_and_one_gives_the_same_bytes_again(routing: str, again: dict[str, Any]) -> None:
    trace = load()
    reports = [
        run_in_virtual_time(lambda: run_config(config(**ROUTINGS[routing]), trace, **again), backend=backend)
        for backend in BACKENDS
    ]
    assert reports[0].to_json() == reports[1].to_json()
    counts = [
        (one.num_requests, one.completed_requests, one.total_input_tokens, one.total_output_tokens) for one in reports
    ]
    assert counts[0] == counts[2] == (24, 24, trace.input_tokens, trace.output_tokens)
