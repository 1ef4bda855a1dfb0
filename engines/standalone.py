"""as_engine: one LLMEngine as an AsyncEngine, without a worker around it.

async with as_engine(MyEngine()) as engine:
    async with await engine.generate(Context(request)) as stream: ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from pipeline import Annotated, AsyncEngine, Context, EngineShutdown, ResponseStream
from pipeline.foreign import raise_if_ours
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from .adapter import RequestAdapter
from .chunks import engine_error
from .llm import EngineConfig, LLMEngine
from .roles import DisaggregationMode

_log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


class StandaloneEngine(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """Started and cleaned up by its own `async with`; outside of the block requests raise EngineShutdown.

    Leaving the block, by a cancellation too, drains and cleans up, however long that takes; what it raises is logged. A
    start that fails is cleaned up, and its error is raised. The caller ends its streams before. An engine whose
    `background` fails ends the block with an ExceptionGroup, of the block's own error too if there is one.
    """

    config: EngineConfig
    """The engine's own config, set by the start."""

    def __init__(
        self,
        engine: LLMEngine,
        *,
        worker_id: int = 0,
        mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        may_prefill: bool = False,
    ) -> None:
        self.engine = engine
        self._worker_id = worker_id
        self._adapter = RequestAdapter(engine, mode=mode, spawn=self._run_soon, may_prefill=may_prefill)
        self._tasks: TaskGroup | None = None
        self._due: list[Work] = []

    def __str__(self) -> str:
        return f"as_engine({self._adapter})"

    async def __aenter__(self) -> Self:
        try:
            with _exceptions_only():
                self.config = await self.engine.start(self._worker_id)
        except BaseException:
            await self._clean_up()
            raise
        self._is_due = anyio.Event()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._run_engine)
        self._tasks.start_soon(self._run_due, self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None, "left without having been entered"
        try:
            with anyio.CancelScope(shield=kind is not None):
                await self._drain()
        finally:
            await self._clean_up()
            tasks.cancel_scope.cancel()
            if isinstance(error, Exception):  # the block's own error is neither the group's to wrap nor to swallow
                await _ended(tasks, beside=error)
                ended = None
            else:
                ended = await tasks.__aexit__(kind, error, trace)
        return ended

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        if self._tasks is None:
            raise EngineShutdown(f"{self._adapter} is not started: use it inside its `async with` block")
        return await self._adapter.generate(request)

    def _run_soon(self, work: Work) -> None:
        # A stop from another thread comes here as a plain callback of the loop, which may not start a task itself.
        self._due.append(work)
        self._is_due.set()

    async def _run_due(self, tasks: TaskGroup) -> None:
        while True:
            await self._is_due.wait()
            self._is_due = anyio.Event()
            due, self._due = self._due, []
            for work in due:
                tasks.start_soon(work)

    async def _run_engine(self) -> None:
        with _exceptions_only():
            await self.engine.background()

    async def _drain(self) -> None:
        try:
            await self.engine.drain()
        except BaseException as error:
            raise_if_ours(error)
            _log.exception("%s failed to drain", self._adapter)

    async def _clean_up(self) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self.engine.cleanup()
            except BaseException as error:
                raise_if_ours(error)
                _log.exception("%s failed to clean up", self._adapter)


@contextmanager
def _exceptions_only() -> Iterator[None]:
    """Raise an engine's Exceptions as they are; an error that would end the loop becomes a BackendError."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise_if_ours(error)
        raise engine_error(error) from error


async def _ended(tasks: TaskGroup, *, beside: Exception) -> None:
    """Wait for the tasks; raise their errors together with the error beside them."""
    try:
        await tasks.__aexit__(None, None, None)
    except ExceptionGroup as group:
        raise ExceptionGroup("the block failed, and the engine's background", [beside, *group.exceptions]) from None


def as_engine(
    engine: LLMEngine,
    *,
    worker_id: int = 0,
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
    may_prefill: bool = False,
) -> StandaloneEngine:
    """Return the engine as an AsyncEngine, started by `async with`."""
    return StandaloneEngine(engine, worker_id=worker_id, mode=mode, may_prefill=may_prefill)
