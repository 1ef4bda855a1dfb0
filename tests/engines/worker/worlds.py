"""A worker around an engine whose every step is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio

from engines import (
    EngineConfig,
    GenerateContext,
    LLMEngine,
    MetricsBindings,
    MetricsContext,
    PushSource,
    ShutdownTimes,
    Worker,
)
from pipeline import Annotated, Context
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

WHERE = "dynamo/backend/generate"
"""The path of an aggregated worker's endpoint, unless its config names another."""
TIMES = ShutdownTimes(grace_s=2.0, timeout_s=10.0)
PROBED = {"DYN_HEALTH_CHECK_ENABLED": "1", "DYN_CANARY_WAIT_TIME": "4"}
"""The environment of a worker that is probed after 4 idle seconds."""
BROKEN = LookupError("broken")
HANG: Final = "hang"
"""A step that never returns."""
ALL_STEPS = ["start", "setup_metrics", "kv_event_sources", "drain", "cleanup"]
"""The calls of an orderly life."""

Step = float | str | Exception | None


class ScriptedSteps(LLMEngine):
    """An engine whose steps, by keyword, raise an error, take a number of seconds, or HANG.

    `tokens` is the length of each answer, with `each_s` seconds before each token.
    """

    def __init__(self, *, config: Any = None, tokens: int = 3, each_s: float = 1.0, **steps: Step) -> None:
        self.config = config or EngineConfig(model="m")
        self.steps, self.tokens, self.each_s = steps, tokens, each_s
        self.calls: list[str] = []
        """The steps called, in order."""
        self.at_s: dict[str, float] = {}
        """When each step was called last, by the loop's clock."""
        self.aborted: list[str] = []
        """The ids of aborted requests."""
        self.open = 0
        """Answers under way."""
        self.sources: Sequence[PushSource] = ()
        self.bindings = MetricsBindings()
        self.metrics_context: MetricsContext | None = None
        self.worker_id = 0

    async def start(self, worker_id: int) -> EngineConfig:
        self.worker_id = worker_id
        await self._do("start")
        return self.config

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.open += 1
        try:
            for token in range(self.tokens):
                with anyio.move_on_after(self.each_s):
                    await context.stopped()
                if context.is_stopped:
                    yield LLMEngineOutput.cancelled()
                    return
                yield LLMEngineOutput([token])
            yield LLMEngineOutput.stop()
        finally:
            self.open -= 1

    async def abort(self, context: GenerateContext) -> None:
        self.aborted.append(context.id)

    async def drain(self) -> None:
        await self._do("drain")

    async def cleanup(self) -> None:
        await self._do("cleanup")

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        self.metrics_context = context
        await self._do("setup_metrics")
        return self.bindings

    async def kv_event_sources(self) -> Sequence[PushSource]:
        await self._do("kv_event_sources")
        return self.sources

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        self.at_s[name] = anyio.current_time()
        step = self.steps.get(name)
        if step is HANG:
            await anyio.sleep_forever()
        elif isinstance(step, float):
            await anyio.sleep(step)
        elif isinstance(step, Exception):
            raise step


@asynccontextmanager
async def hosted(engine: LLMEngine, runtime: Runtime | None = None, **settings: Any) -> AsyncIterator[Worker]:
    """Enter a worker of the engine with an empty environment and TIMES; `settings` are arguments of `Worker`."""
    async with Worker(engine, runtime=runtime, environment={}, **{"times": TIMES, **settings}) as worker:
        yield worker


async def collect(worker: Worker, request: Context[PreprocessedRequest] | None = None) -> list[list[int]]:
    """Return the tokens of each chunk that the worker answers across its runtime; by default to the prompt [1]."""
    called = worker.runtime.workers(worker.endpoint, Annotated[LLMEngineOutput]).engine(worker.worker_id)
    async with await called.generate(request or Context(PreprocessedRequest([1]))) as stream:
        return [item.data.token_ids for item in [item async for item in stream] if item.data is not None]
