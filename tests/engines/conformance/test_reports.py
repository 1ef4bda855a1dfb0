"""The conformance kit: how it calls an engine, what it reports of a failing one, and that it leaves nothing open."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import (
    ConformanceFailure,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    MetricsBindings,
    MetricsContext,
    PushSource,
    run_conformance,
)
from pipeline import ContractViolation, Disconnected
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, PreprocessedRequest
from pipeline.wire.errors import error_from_plain, error_to_plain
from tests.engines.conformance.worlds import RECORDED, TOKEN_S, Chunks, Sevens, Unhurried, failures_of, names_of


class GoesOn(Sevens):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.stop()
        yield LLMEngineOutput.token(1)


class Miscounts(Sevens):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                is_wrong = chunk.finish_reason == FinishReason.LENGTH and request.stop_conditions.max_tokens is None
                yield chunk.with_usage(CompletionUsage.of(len(request.token_ids), 5)) if is_wrong else chunk


async def test_a_wrong_count_is_reported_with_both_figures() -> None:
    (failure,) = await failures_of(Miscounts)
    assert (failure.counted_tokens, failure.reported_tokens, failure.rule) == (4, 5, "L4")


async def test_a_missed_deadline_is_reported_with_its_length() -> None:
    (failure,) = await failures_of(Unhurried, deadline_s=1.0)
    assert (failure.name, failure.after_s, failure.rule) == ("CancellationNotObserved", 1.0, "L2")


async def test_an_engine_that_breaks_several_rules_gets_a_report_of_all() -> None:
    class Several(GoesOn):
        async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
            raise RuntimeError

        async def kv_event_sources(self) -> Sequence[PushSource]:
            raise RuntimeError

        async def cleanup(self) -> None:
            if self.calls:
                raise RuntimeError

    names = ["KvEventSourcesFailed", "SetupMetricsFailed", "ChunkAfterTerminal", "CleanupFailed"]
    assert await names_of(Several) == names


async def test_the_engines_own_error_is_the_cause() -> None:
    class Raises(Sevens):
        async def cleanup(self) -> None:
            raise Disconnected("lost the device")

    first, second = await failures_of(Raises)
    assert (first.name, second.name) == ("CleanupFailed", "CleanupWithoutStartFailed")
    assert isinstance(first, ContractViolation)
    assert isinstance(first.__cause__, Disconnected)


async def test_after_a_failed_start_the_engine_is_cleaned_up_and_gets_no_request() -> None:
    class StartRaises(Sevens):
        async def start(self, worker_id: int) -> EngineConfig:
            await super().start(worker_id)
            raise RuntimeError

    assert await names_of(StartRaises) == ["StartFailed"]
    assert [engine.calls for engine in RECORDED] == [["start", "cleanup", "cleanup"], ["cleanup"]]
    assert RECORDED[0].requests == []


async def test_an_engine_that_serves_no_request_costs_the_bound_once() -> None:
    class GenerateHangs(Sevens):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
            await anyio.sleep_forever()

    began = anyio.current_time()
    assert await names_of(GenerateHangs, within_s=50.0) == ["GenerateFailed"]
    assert 50 <= anyio.current_time() - began < 51


async def test_a_wait_that_swallows_its_cancellation_is_dropped_and_named() -> None:
    class NeverGivesUp(Sevens):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            while True:
                with suppress(BaseException):
                    await anyio.sleep(1)
            yield LLMEngineOutput.stop()

    began = anyio.current_time()
    (failure,) = await failures_of(NeverGivesUp)
    assert failure.name == "GenerateFailed"
    assert "the first chunk took more than 30 s" in str(failure)
    assert 30 <= anyio.current_time() - began < 35


async def test_a_cleanup_that_swallows_its_cancellation_is_dropped_and_named() -> None:
    class NeverEnds(Sevens):
        async def cleanup(self) -> None:
            while self.calls:
                with suppress(BaseException):
                    await anyio.sleep(1)

    (failure,) = await failures_of(NeverEnds)
    assert failure.name == "CleanupFailed"
    assert "cleanup took more than 30 s" in str(failure)


@pytest.mark.slow
async def test_a_turn_without_end_is_ended_by_the_clock_on_the_wall() -> None:
    class Spins(Sevens):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            yield LLMEngineOutput.token(1)
            while not context.is_stopped:
                pass
            yield LLMEngineOutput.cancelled()

    (failure,) = await failures_of(Spins, within_s=0.5)
    assert failure.name == "LoopBlocked"
    assert "the next chunk" in str(failure)


@pytest.mark.slow
async def test_a_wait_in_which_no_virtual_time_passes_is_ended_by_the_clock_on_the_wall() -> None:
    class Polls(Sevens):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            while not context.is_stopped:
                await checkpoint()
            yield LLMEngineOutput.cancelled()

    (failure,) = await failures_of(Polls, within_s=0.5)
    assert (failure.name, failure.after_s) == ("GenerateFailed", 0.5)


async def test_an_engine_that_exits_is_reported_and_ends_nothing_else() -> None:
    class Exits(Sevens):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            yield LLMEngineOutput.token(1)
            raise SystemExit(3)

    (failure,) = await failures_of(Exits)
    assert isinstance(failure.__cause__, SystemExit)


async def test_every_stream_is_closed_also_after_a_failure() -> None:
    open_now = 0

    class Counted(GoesOn):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            nonlocal open_now
            open_now += 1
            try:
                async with aclosing(super().generate(request, context)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                open_now -= 1

    await failures_of(Counted)
    assert open_now == 0


async def test_a_cancelled_kit_still_cleans_up() -> None:
    with anyio.move_on_after(TOKEN_S * 1.5):
        await run_conformance(Sevens)
    assert [engine.calls for engine in RECORDED] == [["start", "cleanup"]]


async def test_a_failure_travels_with_its_class_and_rule() -> None:
    (failure,) = await failures_of(GoesOn)
    back = error_from_plain(error_to_plain(failure))
    assert isinstance(back, ConformanceFailure)
    assert (str(back), back.rule) == (str(failure), "L1")


# -- how the kit calls the engine


async def test_one_engine_is_started_and_cleaned_up_twice_and_a_fresh_one_only_cleaned_up() -> None:
    await run_conformance(Sevens)
    assert [engine.calls for engine in RECORDED] == [["start", "cleanup", "cleanup"], ["cleanup"]]


async def test_what_an_engine_runs_beside_its_requests_runs_from_its_start_until_its_cleanup() -> None:
    class Scheduled(Sevens):
        async def background(self) -> None:
            self.calls.append("background")
            try:
                await anyio.sleep_forever()
            finally:
                self.calls.append("cancelled")

        async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
            await checkpoint()
            return MetricsBindings()

    await run_conformance(Scheduled)
    assert RECORDED[0].calls == ["start", "background", "cleanup", "cleanup", "cancelled"]
    assert RECORDED[1].calls == ["cleanup"]


async def test_a_factory_may_be_a_coroutine() -> None:
    async def make() -> LLMEngine:
        await checkpoint()
        return Sevens()

    await run_conformance(make)


async def test_the_engine_gets_copies_of_the_given_request() -> None:
    mine = PreprocessedRequest([4, 5], model="mine")
    await run_conformance(Sevens, request=mine)
    received = RECORDED[0].requests
    assert {(tuple(request.token_ids), request.model) for request in received} == {((4, 5), "mine")}
    assert {None, 1, 10_000} <= {request.stop_conditions.max_tokens for request in received}
    assert id(mine.token_ids) not in {id(request.token_ids) for request in received}
    assert mine == PreprocessedRequest([4, 5], model="mine")


async def test_without_a_request_the_prompt_is_one_two_three_for_the_engines_model() -> None:
    await run_conformance(Sevens)
    assert RECORDED[0].requests[0] == PreprocessedRequest([1, 2, 3], model="sevens")
