"""The checks of the conformance kit on an engine's life and its undisturbed answers.

Each is a function that raises the ConformanceFailure it finds. Source: dynamo lib/backend-common/src/testing.rs. Other
than there an answer has to be what can be sent, and concurrent ones are checked as one alone is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from pipeline import InvalidArgument
from pipeline.errors import BackendInvalidArgument

from .conformance_answer import Trial, bounded
from .conformance_failure import ConformanceFailure, failed
from .engine_metrics import EngineMetrics, MetricsContext
from .llm import EngineConfig, LLMEngine

CONCURRENT = 8
"""Requests at the same time."""
CONCURRENTLY, AFTERWARDS = "ConcurrentGenerateFailed", "NotServedAfterwards"


async def start(engine: LLMEngine, within_s: float) -> EngineConfig:
    """Raises StartFailed."""
    config: Any = await bounded("StartFailed", "start", lambda: engine.start(0), within_s)
    if not isinstance(config, EngineConfig):
        raise failed("StartFailed", f"it gave {type(config).__name__}")
    return config


async def check_model(config: EngineConfig) -> None:
    """Raises EmptyModelInConfig."""
    if not config.model:
        raise failed("EmptyModelInConfig")


async def check_kv_event_sources(engine: LLMEngine, within_s: float) -> None:
    """Raises KvEventSourcesFailed and KvEventSourcesNotIdempotent."""

    async def ranks() -> list[int]:
        return [source.dp_rank for source in await engine.kv_event_sources()]

    await _expect_stable(ranks, "KvEventSourcesFailed", "KvEventSourcesNotIdempotent", within_s)


async def check_setup_metrics(engine: LLMEngine, within_s: float) -> None:
    """Raises SetupMetricsFailed and ComponentMetricsNotIdempotent."""
    context = MetricsContext("test-model", "test", 0.0, EngineMetrics())

    async def ranks() -> list[int]:
        return list((await engine.setup_metrics(context)).dp_ranks)

    await _expect_stable(ranks, "SetupMetricsFailed", "ComponentMetricsNotIdempotent", within_s)


async def _expect_stable(ask: Callable[[], Awaitable[list[int]]], fails: str, changes: str, within_s: float) -> None:
    first = await bounded(fails, "the first call", ask, within_s)
    if len(set(first)) < len(first):
        raise failed(fails, f"the ranks are {first}")
    if (second := await bounded(fails, "the second call", ask, within_s)) != first:
        raise failed(changes, f"first {first}, then {second}")


async def check_alone(trial: Trial) -> None:
    """One request. Raises GenerateFailed and whatever is wrong with a stream."""
    async with trial.answer() as (answer, _):
        await answer.drain("GenerateFailed", trial.within_s)
        answer.expect_some()
        answer.expect_complete()
        answer.expect_served()
        answer.expect_counted()


async def check_concurrent(
    trial: Trial, alone: ConformanceFailure | None, *, requests: int = CONCURRENT, name: str = CONCURRENTLY
) -> None:
    """Requests that take turns. Raises the failure of that name for what one alone did not show."""
    found = await gathered([lambda: check_alone(trial)] * requests)
    if news := [failure for failure in found if alone is None or failure.name != alone.name]:
        raise failed(name, f"{len(news)} of {requests}, one of them {news[0]}", cause=news[0])


async def gathered(checks: Sequence[Callable[[], Awaitable[object]]]) -> list[ConformanceFailure]:
    """Runs the checks at the same time; what they found."""
    found: list[ConformanceFailure] = []

    async def one(check: Callable[[], Awaitable[object]]) -> None:
        try:
            await check()
        except ConformanceFailure as failure:
            found.append(failure)

    async with anyio.create_task_group() as tasks:
        for check in checks:
            tasks.start_soon(one, check)
    return found


async def check_bad(trial: Trial) -> None:
    """A request that cannot be served. Raises BadRequestServed."""
    try:
        async with trial.answer() as (answer, _):
            await answer.begin(trial.within_s)
    except ConformanceFailure as failure:
        # What is raised as a ValueError or TypeError the adapter takes for this, too.
        cause = failure.__cause__
        if isinstance(cause, InvalidArgument | BackendInvalidArgument | ValueError | TypeError):
            return
        raise failed("BadRequestServed", str(failure), cause=failure) from failure
    raise failed("BadRequestServed", f"its first chunk is {answer.last!r}")


async def drain(engine: LLMEngine, within_s: float) -> None:
    """Raises DrainFailed."""
    await bounded("DrainFailed", "drain", engine.drain, within_s)


async def clean_up(name: str, engine: LLMEngine, within_s: float) -> None:
    """Raises the failure of that name. Also runs where the kit itself is being cancelled."""
    await bounded(name, "cleanup", engine.cleanup, within_s, shield=True)
