"""Lifecycle: one engine's start, drain and cleanup, each done once, and the states between them.

    init ──start──► running ──────cleanup──► stopped
      │  └─fails──► start_failed ─cleanup──────▲
      └──cleanup, the engine's own not called──┘

Source: dynamo lib/backend-common/src/worker.rs, LifecycleState, start_engine and cleanup_once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import anyio

from pipeline import ContractViolation, EngineShutdown
from pipeline.foreign import raise_if_ours

from ..chunks import engine_error
from ..llm import EngineConfig, LLMEngine
from ..peers import Peers
from ..publishing import EngineMetrics, Step

if TYPE_CHECKING:
    from pipeline.rx import AnyIOScheduler


_log = logging.getLogger(__name__)


class WorkerState(StrEnum):
    """The state of a worker's engine."""

    INIT = "init"
    RUNNING = "running"
    START_FAILED = "start_failed"
    STOPPED = "stopped"


LifecycleEvent = Literal["started", "start_failed", "cleaned_up"]

TRANSITIONS: Mapping[tuple[WorkerState, LifecycleEvent], WorkerState] = {
    (WorkerState.INIT, "started"): WorkerState.RUNNING,
    (WorkerState.INIT, "start_failed"): WorkerState.START_FAILED,
    (WorkerState.INIT, "cleaned_up"): WorkerState.STOPPED,
    (WorkerState.RUNNING, "cleaned_up"): WorkerState.STOPPED,
    (WorkerState.START_FAILED, "cleaned_up"): WorkerState.STOPPED,
    (WorkerState.STOPPED, "cleaned_up"): WorkerState.STOPPED,
}
"""The state after each event that is possible in a state."""


def after(state: WorkerState, event: LifecycleEvent) -> WorkerState:
    """Return the state after an event. Raises ContractViolation for an event that is impossible in this state."""
    if (state, event) not in TRANSITIONS:
        raise ContractViolation(f"a worker that is {state} cannot have {event.replace('_', ' ')}")
    return TRANSITIONS[state, event]


def owes_cleanup(state: WorkerState) -> bool:
    """Return whether the engine's cleanup is still due: after its start, successful or not."""
    return state in (WorkerState.RUNNING, WorkerState.START_FAILED)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise errors of the tree as they are and foreign ones as a BackendError: see `engine_error`."""
    try:
        yield
    except BaseException as error:
        raise_if_ours(error)
        raised = engine_error(error)
        raise raised from raised.__cause__


class Lifecycle:
    """Drives one engine once. For one task, except that `state` may be read from anywhere."""

    def __init__(self, engine: LLMEngine) -> None:
        self.state = WorkerState.INIT
        self.load_time_s = 0.0
        self._engine = engine
        self._metrics = EngineMetrics()
        self.is_cleaning_up = False
        """True from the beginning of `clean_up` on."""

    async def start(self, worker_id: int, peers: Peers | None = None) -> EngineConfig:
        """Start the engine, with its peers if there are any. A foreign error is raised as a BackendError; `clean_up` is
        due then as well.

        Raises EngineShutdown the second time, and after `clean_up`; ContractViolation for an engine that returns no
        EngineConfig.
        """
        if self.state is not WorkerState.INIT:
            raise EngineShutdown(f"this worker is {self.state}: make another")
        began_s = anyio.current_time()
        happened: LifecycleEvent = "start_failed"
        try:
            with engine_errors():
                if peers is not None:
                    await self._engine.setup_peers(peers)
                config = await self._engine.start(worker_id)
            if not isinstance(config, EngineConfig):
                name, made = type(self._engine).__name__, type(config).__name__
                raise ContractViolation(f"{name}.start returned {made}, not EngineConfig")
            happened = "started"
        finally:
            self.state = after(self.state, happened)
        self.load_time_s = anyio.current_time() - began_s
        return config

    def measure(self, metrics: EngineMetrics) -> None:
        """Records the time of the start, and of what follows."""
        self._metrics = metrics
        metrics.took("model_load", self.load_time_s)

    async def drain(self) -> None:
        """Drains the engine, if it runs; what it raises is logged."""
        if self.state is WorkerState.RUNNING:
            await self._do("drain", self._engine.drain)

    async def clean_up(self) -> None:
        """Clean the engine up if that is due; the second call does nothing. What it raises is logged.

        The worker is stopped afterwards in any case, also if this is cancelled.
        """
        if self.is_cleaning_up:
            return
        self.is_cleaning_up = True
        try:
            if owes_cleanup(self.state):
                await self._do("cleanup", self._engine.cleanup)
        finally:
            self.state = after(self.state, "cleaned_up")

    async def _do(self, step: Step, work: Callable[[], Awaitable[None]]) -> None:
        began_s = anyio.current_time()
        try:
            await work()
        except BaseException as error:
            raise_if_ours(error)
            _log.exception("%s of %s failed", step, type(self._engine).__name__)
        finally:
            self._metrics.took(step, anyio.current_time() - began_s)


Work = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """A worker's tasks beside its requests: its idle probe, and calls of abort. What they raise is logged.

    There is no task group here: workers of one runtime may then be opened and closed in any order, by any task.
    """

    def __init__(self, scheduler: AnyIOScheduler) -> None:
        self._scheduler = scheduler
        self._running: dict[object, Callable[[], None]] = {}
        self._ended = anyio.Event()

    def run(self, work: Work) -> Callable[[], None]:
        """Start the work soon; return a function that cancels it."""
        key = object()

        async def task(scope: anyio.CancelScope) -> None:
            try:
                with scope:
                    await work()
            except BaseException as error:
                raise_if_ours(error)
                _log.exception("a background task of a worker failed")
            finally:
                self._running.pop(key, None)
                self._ended.set()

        spawned = self._scheduler.spawn(task)
        self._running[key] = spawned.dispose
        return spawned.dispose

    async def idle(self) -> None:
        """Returns when nothing runs."""
        while self._running:
            if self._ended.is_set():
                self._ended = anyio.Event()
            await self._ended.wait()

    def end(self) -> None:
        """Cancels what runs."""
        for cancel in list(self._running.values()):
            cancel()
