"""Checks of an engine's life cycle, and of the rules of AsyncEngine (E1 to E13) behind the adapter of a host.

Each is a function that raises the ConformanceFailure it finds. Source: dynamo lib/backend-common/src/testing.rs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
from anyio import create_task_group

from pipeline.protocols import PreprocessedRequest

from ..adapter import RequestAdapter
from ..llm import EngineConfig, LLMEngine
from ..metrics import EngineMetrics, MetricsContext
from .answers import Baseline, Trial, limited
from .bounded_calls import bounded
from .failures import ConformanceFailure, failed

_TOKENS = 24
"""Of an answer: well more than may still come after a stop, where the engine ignores its end."""
_MOST_ABORTS = 1000
"""That may be due at the same time."""
_NEED_SAME = ("E7", "E10")
"""Rules that compare items with those of another run."""

Work = Callable[[], Coroutine[Any, Any, None]]


async def check_hosted(
    trial: Trial, known: Baseline, bad_request: PreprocessedRequest | None
) -> list[ConformanceFailure]:
    """What `check_engine` finds, each named by its rule."""
    from pipeline.testing import ENGINE_RULES, check_engine  # a tool of tests, which a worker does not need

    rules = [rule for rule in ENGINE_RULES if known.is_steady_by_chunk or rule not in _NEED_SAME]
    request = _request(trial, known)
    send, receive = anyio.create_memory_object_stream[Work](_MOST_ABORTS)
    adapter = RequestAdapter(trial.engine, spawn=send.send_nowait)

    async def abort() -> None:
        # In one task, begun before: tasks of their own would be taken for ones left over.
        async for work in receive:
            await work()

    found: list[ConformanceFailure] = []
    async with receive, create_task_group() as tasks:
        tasks.start_soon(abort)
        for rule in rules:
            begun_s = anyio.current_time()
            try:
                await check_engine(
                    lambda: adapter,
                    request=request,
                    bad_request=bad_request,
                    within_s=trial.deadline_s,
                    answer_within_s=trial.within_s,
                    settle_s=trial.deadline_s,
                    rules=[rule],
                )
            except ExceptionGroup as group:
                found += [failed(rule, str(each), cause=each) for each in group.exceptions]
                if anyio.current_time() - begun_s >= trial.within_s:
                    break  # the others would take as long
        send.close()
        tasks.cancel_scope.cancel()
    return found


def _request(trial: Trial, known: Baseline) -> PreprocessedRequest:
    """One with well more items than may still come after a stop, if the engine serves that."""
    is_affordable = min(trial.room(_TOKENS, trial.request), known.tokens_in(trial.within_s / 2)) >= _TOKENS
    if trial.goes_on and is_affordable:
        return limited(trial.request, ignore_eos=True, max_tokens=_TOKENS)
    return trial.request


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


async def _expect_stable(call: Callable[[], Awaitable[list[int]]], fails: str, changes: str, within_s: float) -> None:
    first = await bounded(fails, "the first call", call, within_s)
    if len(set(first)) < len(first):
        raise failed(fails, f"the ranks are {first}")
    if (second := await bounded(fails, "the second call", call, within_s)) != first:
        raise failed(changes, f"first {first}, then {second}")


async def drain(engine: LLMEngine, within_s: float) -> None:
    """Raises DrainFailed."""
    await bounded("DrainFailed", "drain", engine.drain, within_s)


async def clean_up(name: str, engine: LLMEngine, within_s: float) -> None:
    """Raises the failure of that name. Also runs where the kit itself is being cancelled."""
    await bounded(name, "cleanup", engine.cleanup, within_s, shield=True)
