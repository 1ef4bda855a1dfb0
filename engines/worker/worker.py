"""Worker: hosts one engine, from its start and registration to its orderly end.

    check ──► start ──► metrics, KV events ──► card ──► serve, register ──► wait
    cleanup ◄── cut what still runs ◄── drain ◄── grace ◄── unregister ◄──── shutdown

As a program: `await Worker(MyEngine()).run()`. Inside another program, also many at once:

    async with Worker(MyEngine(), config, runtime=runtime) as worker: ...

Source: dynamo lib/backend-common/src/worker.rs, Worker. Left out are its admin routes and its RL endpoint. Other than
there a second signal ends the process at once, a worker that was never registered has no grace period, and requests
that outlast grace and drain are cut before the cleanup, so that their callers can migrate.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from pipeline import Control, PenstockError, StreamClosed
from pipeline.errors import BackendCancelled
from pipeline.foreign import raise_if_ours
from pipeline.protocols.kv import KV_EVENTS_TOPIC, LOADS_EVERY_S
from pipeline.settings import Variable, switch
from pipeline.telemetry import Tracer, with_labels

from ..adapter import RequestAdapter
from ..llm import EngineConfig, LLMEngine
from ..peers import WorkerPeers
from ..publishing import (
    EngineMetrics,
    KvEventLogs,
    MakeKvEventLog,
    MetricsBindings,
    MetricsContext,
    SnapshotPublisher,
)
from .config import ShutdownTimes, WorkerConfig, served_name
from .health import SystemHealth, WorkerHealth
from .lifecycle import Background, Lifecycle, WorkerState, engine_errors
from .probe import IdleProbeSettings, choose_payload
from .registration import Registration, attach_kv_events, attach_snapshots, worker_labels
from .signals import Exit, ProcessWatch, Signals, run_until_signalled, termination_signals

if TYPE_CHECKING:
    from pipeline.network import Runtime, Served
    from pipeline.protocols.card import ModelDeploymentCard
    from pipeline.telemetry import Metrics

_log = logging.getLogger(__name__)

DETAILS = Variable("OTEL_EXPORT_ENABLED", False, "Whether spans are exported.", switch)
CLEANUP_S = 5.0
"""Least time for a cleanup, in seconds, also when the time for the end is over."""
_SETTLE_S = 1.0
"""Time for requests that were cut, and their aborts, before the cleanup."""
_DEFAULTS = WorkerConfig()


class Worker:
    """One engine at one endpoint. An async context manager, once; or a program by `run`.

    Entering starts the engine and returns when it is registered; a failure on the way cleans up and is raised: the
    engine's own errors, foreign ones as BackendError, InvalidArgument for a wrong config before anything is started.
    Leaving removes it from discovery, serves on for the grace period, drains, cuts what still runs (callers get
    Disconnected) and cleans up. A block that failed or was cancelled has no grace period. All of that may take
    `times.deadline_s`: what hangs then is cancelled and logged, and the cleanup gets `CLEANUP_S` more. An engine whose
    requests should end first waits for them in its `drain`.

    A worker whose engine's `background` fails is unreachable from then on, and its requests get Disconnected. While the
    worker is entered the error is raised there; later `wait` returns, `failure` is set, and `run` raises it in the end.

    `config` are the worker's own settings. `runtime` must be open and outlive the worker; None: the worker makes its
    own. `worker_id` is unique in the runtime; None: drawn from it. `metrics` are of the component family; None: no
    metrics. `environment` replaces the process's; `times` replaces the shutdown times in it. `health` may be shared by
    the workers of a process; None: the worker's own. `kv_event_log` makes the log of a worker id and rank: with it the
    worker answers routers that missed KV events, unless its mode or settings forbid it. `tracer` makes the spans of its
    requests. `signals`, `exit` and `watch` are for `run` only.
    """

    def __init__(
        self,
        engine: LLMEngine,
        config: WorkerConfig = _DEFAULTS,
        *,
        runtime: Runtime | None = None,
        worker_id: int | None = None,
        metrics: Metrics | None = None,
        environment: Mapping[str, str] | None = None,
        health: SystemHealth | None = None,
        times: ShutdownTimes | None = None,
        kv_event_log: MakeKvEventLog | None = None,
        tracer: Tracer | None = None,
        signals: Signals = termination_signals,
        exit: Exit = os._exit,
        watch: ProcessWatch | None = None,
    ) -> None:
        from pipeline.network import EndpointId, Runtime  # loads reactivex, which only a host of an engine needs

        environment = os.environ if environment is None else environment
        self.engine = engine
        self.config = config
        self.endpoint = EndpointId(config.namespace, config.component, config.endpoint)
        self.runtime = Runtime.in_process(metrics=metrics) if runtime is None else runtime
        self.worker_id = self.runtime.new_instance_id() if worker_id is None else worker_id
        self.health = SystemHealth.from_environment(environment) if health is None else health
        self.times = ShutdownTimes.from_environment(environment) if times is None else times
        self.engine_config: EngineConfig | None = None
        """The engine's own config, set by its start."""
        self.failure: PenstockError | None = None
        """The error of its background; None while that works."""
        self._owns_runtime = runtime is None
        self._environment = environment
        self._metrics, self._signals, self._exit, self._watch = metrics, signals, exit, watch
        self._tracer = tracer
        self._lifecycle = Lifecycle(engine)
        self._shutdown = Control()
        self._background = Background(self.runtime.scheduler)
        self._engine_task = Background(self.runtime.scheduler)
        self._bindings = MetricsBindings()
        may_answer = config.enable_local_indexer and config.disaggregation_mode.may_index
        self._kv_logs = KvEventLogs(kv_event_log if may_answer else None, self.endpoint, self.worker_id)
        self._peers = WorkerPeers(self.runtime, self.endpoint, self.worker_id)
        self._registration = Registration(self.runtime, self.endpoint, self.worker_id, self._kv_logs, self._shutdown)
        self._labels: dict[str, str] = {}
        self._own_health = WorkerHealth(self.health, f"{self.endpoint.path}/{self.worker_id}")
        self._cut_opening: Callable[[], None] = lambda: None
        self._end_repeating: Callable[[], None] = lambda: None
        self._exits: AsyncExitStack | None = None
        self._is_used = False
        self._slack_s = 0.0
        """Added to the deadline of a program: the process is ended before anything is cut short."""

    def __str__(self) -> str:
        return f"{type(self.engine).__name__} at {self.endpoint.path}/{self.worker_id:x}"

    @property
    def state(self) -> WorkerState:
        return self._lifecycle.state

    @property
    def card(self) -> ModelDeploymentCard | None:
        """Its card, once it is made."""
        return self._registration.card

    @property
    def served(self) -> Served | None:
        """Its served endpoint; None before the registration, and for a worker that was shut down before."""
        return self._registration.served

    def shutdown(self) -> None:
        """Begin an orderly end; from any thread, at any time. Before the start, the engine is never started.

        During the start it takes effect after it. `run` then ends; a block ends by its own code: see `wait`.
        """
        self._shutdown.stop()

    def abort(self) -> None:
        """Disappear at once, as in a crash, from discovery too; requests and calls of peers are cut.

        The engine goes on until the end, which is still the caller's to begin. A second call does nothing.
        """
        self._registration.abort()
        self._peers.abort()

    async def announce_adapters(self, names: Collection[str]) -> None:
        """Have front ends see these LoRA adapters, and no others, from now on; nothing before it is registered.

        For one task at a time. Raise Unavailable if discovery cannot be reached.
        """
        await self._registration.announce_adapters(names)

    async def wait(self) -> None:
        """Return once `shutdown` was called, or the engine's background has failed."""
        await self._shutdown.stopped()

    async def run(self) -> None:
        """Serve until a signal, `shutdown` or a cancellation, then end in order; return when all is released.

        The first SIGINT or SIGTERM begins an orderly end, also while the engine starts, which is not cancelled by it. A
        second one ends the process at once with 128 and its number, as a shell reports it. An end that takes longer
        than `times.deadline_s` from the first signal, or from `shutdown`, ends the process with 911 (143 in the eight
        bits of a shell). If `exit` returns, what hangs is cancelled instead. Raises Unknown if signals cannot be
        received, as outside of the main thread; otherwise as entering does, and the engine's `failure`.

        Both hold while the engine blocks the event loop: by a `ProcessWatch` until `run` returns, or by the given
        `watch`, which must have been started, as long as its owner keeps it.
        """
        self._check()
        self._slack_s = CLEANUP_S
        deadline_s, watch = self.times.deadline_s, self._watch
        with ExitStack() as stack:
            if watch is None and self._signals is termination_signals:
                watch = stack.enter_context(ProcessWatch(deadline_s, exit=self._exit))
            await run_until_signalled(
                self._host, self._shutdown, self._signals, exit=self._exit, deadline_s=deadline_s, watch=watch
            )

    def native_metrics(self) -> str:
        """Return the engine's own metrics as whole lines of Prometheus text, with the worker's labels.

        Empty if it has none, and if it fails, which is logged.
        """
        if self._bindings.native_text is None:
            return ""
        try:
            text = with_labels(self._bindings.native_text(), dict(self.config.metrics_labels) | self._labels)
        except BaseException as error:  # the page shows other metrics as well
            raise_if_ours(error)
            _log.exception("%s has no metrics", self)
            return ""
        return text if text.endswith("\n") else text + "\n"

    async def __aenter__(self) -> Self:
        self._check()
        self._is_used = True
        async with AsyncExitStack() as exits:
            if self._owns_runtime:
                await exits.enter_async_context(self.runtime)
            exits.push_async_exit(self._close)
            await self._open()
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        exits, self._exits = self._exits, None
        assert exits is not None, "left without having been entered"
        return await exits.__aexit__(kind, error, trace)

    async def _host(self) -> None:
        async with self:
            await self.wait()
        if self.failure is not None:
            raise self.failure

    def _check(self) -> None:
        if self._is_used:
            raise StreamClosed("this worker was used: make another")
        self.config.checked()
        self.endpoint.checked()

    # -- opening

    async def _open(self) -> None:
        if self._shutdown.is_stopped:
            return
        config = self.engine_config = await self._lifecycle.start(self.worker_id, self._peers)
        name = served_name(self.config, config)
        self._labels = worker_labels(self.endpoint, self.worker_id, model=config.model, model_name=name)
        metrics = EngineMetrics(self._metrics, self._labels)
        self._lifecycle.measure(metrics)
        with anyio.CancelScope() as scope:
            self._cut_opening = scope.cancel
            self._engine_task.run(self._run_engine)
            await self._publish(config, metrics)
            if not self._shutdown.is_stopped:
                await self._register(config, name)
        if self.failure is not None:
            raise self.failure

    async def _publish(self, config: EngineConfig, metrics: EngineMetrics) -> None:
        context = MetricsContext(config.model, self.config.component, self._lifecycle.load_time_s, metrics)
        with engine_errors():
            self._bindings = await self.engine.setup_metrics(context) or self._bindings
        if not self.config.enable_kv_routing:
            return
        with engine_errors():
            sources = await self.engine.kv_event_sources()
        attach_kv_events(sources, config.kv_cache_block_size, self.worker_id, self._connect, self._kv_logs.log_of)
        snapshots = attach_snapshots(self._bindings, self.worker_id, metrics, self._connect)
        if snapshots is not None:
            self._end_repeating = self._background.run(partial(_repeat, snapshots))

    def _connect(self, topic: str) -> Callable[[object], None]:
        from pipeline.network import Scope

        scope = Scope(self.config.namespace, self.config.component)
        publisher = self.runtime.events.publisher(scope, topic)
        if topic == KV_EVENTS_TOPIC:
            self._kv_logs.publisher_id = publisher.publisher_id
        return publisher.publish

    async def _register(self, config: EngineConfig, name: str) -> None:
        await self._registration.make_card(self.config, config, self._environment)
        details = DETAILS.of(self._environment)
        adapter = RequestAdapter(
            self.engine,
            mode=self.config.disaggregation_mode,
            model=name,
            spawn=self._background.run,
            may_prefill=self.config.may_prefill,
            details=details,
            tracer=self._tracer,
        )
        payload = await choose_payload(self.config.health_check_payload, self._environment, self.engine)
        settings = IdleProbeSettings.from_environment(self._environment)
        if self._shutdown.is_stopped:
            return
        watched = self._own_health.watched(adapter, payload, settings)
        await self._registration.serve(watched, self.config.adapters)
        if self.served is not None:
            self._own_health.begin(self._background.run)
            _log.info("%s serves %s", self, name)

    # -- closing

    async def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        may_serve_on = kind is None and self.served is not None and self.failure is None
        grace_s = self.times.grace_s if may_serve_on else 0.0
        deadline_s = anyio.current_time() + self.times.timeout_s + grace_s + self._slack_s
        try:
            # An orderly end may be cancelled; that of a failed block must not be, at once.
            with anyio.CancelScope(deadline=deadline_s, shield=kind is not None) as scope:
                self._own_health.end()
                await self._registration.withdraw(grace_s)
                if kind is None or self.card is not None:  # without a card there were no requests to drain
                    await self._lifecycle.drain()
            if scope.cancelled_caught:
                _log.error("%s did not drain in time and was cut short", self)
        finally:
            await self._release(deadline_s)

    async def _release(self, deadline_s: float) -> None:
        """End what still runs, then clean up; shielded from cancellation."""
        now_s = anyio.current_time()
        self._own_health.forget()
        self._end_repeating()
        self._kv_logs.cut()
        self._peers.cut()
        try:
            if self.served is not None:
                self.served.cut()
                await _bounded(self.served.drained, now_s + _SETTLE_S)
            await _bounded(self._kv_logs.withdraw, now_s + _SETTLE_S)  # of a failed start, or a cancelled end
            await _bounded(self._peers.withdraw, now_s + _SETTLE_S)
            await _bounded(self._background.idle, now_s + _SETTLE_S)
        finally:  # asyncio's own cancel, as of a second Ctrl-C, knows no shield
            await self._clean_up(max(deadline_s, now_s + CLEANUP_S))

    async def _clean_up(self, until_s: float) -> None:
        tasks = (self._background, self._engine_task)
        try:
            if not await _bounded(self._lifecycle.clean_up, until_s):
                _log.error("%s did not clean up in time and was cut short", self)
        finally:
            for each in tasks:
                each.end()
        for each in tasks:
            if not await _bounded(each.idle, anyio.current_time() + _SETTLE_S):
                _log.error("%s has tasks that do not end when they are cancelled", self)

    # -- the engine's own task

    async def _run_engine(self) -> None:
        try:
            with engine_errors():
                await self.engine.background()
        except PenstockError as failure:
            # Another worker would do: a connection or a device is lost, and its stack explains nothing.
            stack = None if failure.facts.retry else failure
            _log.error("%s failed in the background: %s", self, failure.render(), exc_info=stack)
            self._give_up(failure)
        except anyio.get_cancelled_exc_class():
            self._give_up(BackendCancelled("the engine's background was cancelled"))
            raise

    def _give_up(self, failure: PenstockError) -> None:
        """Disappear as in a crash, and begin the end."""
        if self._lifecycle.is_cleaning_up:  # from then on a failure has no effect
            return
        self.failure = failure
        self._own_health.end()
        self.abort()
        self.shutdown()
        self._cut_opening()


async def _repeat(snapshots: SnapshotPublisher) -> None:
    """Repeat the loads for routers that missed them, until cancelled."""
    while True:
        await anyio.sleep(LOADS_EVERY_S)
        snapshots.repeat()


async def _bounded(work: Callable[[], Awaitable[object]], until_s: float) -> bool:
    """Do the work, shielded from cancellation, until a time at most; return whether it was done."""
    with anyio.CancelScope(deadline=until_s, shield=True) as scope:
        await work()
    return not scope.cancelled_caught
