"""Worker: hosts one engine, from its start over its registration to its orderly end.

    check ──► start ──► metrics, KV events ──► card ──► serve, register ──► wait
    cleanup ◄── cut what still runs ◄── drain ◄── grace ◄── unregister ◄──── shutdown

As a program: `await Worker(MyEngine()).run()`. Inside another, also many at once:

    async with Worker(MyEngine(), config, runtime=runtime) as worker: ...

Source: dynamo lib/backend-common/src/worker.rs, Worker. Left out are its admin routes and its RL endpoint. Other than
there a second signal ends the process at once, a worker nobody ever saw has no grace period, and requests that outlast
grace and drain are cut before the cleanup, so that their callers go on elsewhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from pipeline import AsyncEngine, Control, PenstockError, StreamClosed
from pipeline.errors import BackendCancelled
from pipeline.foreign import raise_if_ours
from pipeline.protocols.kv import KV_EVENTS_TOPIC
from pipeline.settings import Variable, switch
from pipeline.telemetry import Tracer, with_labels

from ..adapter import RequestAdapter
from ..kv_events import KvEventLogs, MakeKvEventLog
from ..llm import EngineConfig, LLMEngine
from ..metrics import EngineMetrics, MetricsBindings, MetricsContext
from .card import card_of, model_folder
from .config import ShutdownTimes, WorkerConfig, served_name
from .health import SystemHealth, WorkerHealth
from .lifecycle import Background, Lifecycle, WorkerState, engine_errors
from .probe import IdleProbeSettings, choose_payload
from .process_watch import Exit, ProcessWatch
from .publishing import attach_kv_events, attach_snapshots, worker_labels
from .signals import Signals, run_until_signalled, termination_signals

if TYPE_CHECKING:
    from pipeline.network import Runtime, Served
    from pipeline.protocols.card import ModelDeploymentCard
    from pipeline.telemetry import Metrics

_log = logging.getLogger(__name__)

DETAILS = Variable("OTEL_EXPORT_ENABLED", False, "Whether spans are exported.", switch)
CLEANUP_S = 5.0
"""What a cleanup is given at least, also where the time for the end is over."""
_SETTLE_S = 1.0
"""What requests that were cut, and their aborts, are given before the cleanup."""
_DEFAULTS = WorkerConfig()


class Worker:
    """One engine at one endpoint. An async context manager, once; or a program by `run`.

    Entering starts the engine and returns when it is registered; a failure on the way cleans up and is raised: the
    engine's own errors, foreign ones as BackendError, InvalidArgument for a wrong config before anything is started.
    Leaving makes it invisible, serves on for the grace period, drains, cuts what still runs (callers get Disconnected)
    and cleans up. A block that failed or was cancelled has no grace period. All of that has `times.deadline_s`: what
    hangs then is cancelled and logged, and the cleanup gets `CLEANUP_S` more. An engine that wants its requests to end
    before waits for them in its `drain`.

    An engine whose `background` fails cannot be reached from then on, and what runs gets Disconnected. While the worker
    is entered that is raised there; later `wait` returns, `failure` says why, and `run` raises it once all is released.

    The runtime is a given one, which must be open and outlive the worker, or one of its own. `worker_id` is drawn from
    the runtime, unique in it, unless given. `metrics` are of the component family. `environment` is the process's
    unless given, and so are `times`. `health` may be shared by the workers of a process. `signals`, `exit` and `watch`
    are for `run` only. `kv_event_log` makes the log of a worker id and rank: with it the worker answers routers that
    missed KV events, unless its mode or settings keep it from that. `tracer` makes the spans of its requests.
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
        from pipeline.network import EndpointId, Runtime  # reactivex is loaded by those who host an engine

        environment = os.environ if environment is None else environment
        self.engine = engine
        self.config = config
        self.endpoint = EndpointId(config.namespace, config.component, config.endpoint)
        self.runtime = Runtime.in_process(metrics=metrics) if runtime is None else runtime
        self.worker_id = self.runtime.new_instance_id() if worker_id is None else worker_id
        self.health = SystemHealth.from_environment(environment) if health is None else health
        self.times = ShutdownTimes.from_environment(environment) if times is None else times
        self.engine_config: EngineConfig | None = None
        """What the engine says of itself, once it has started."""
        self.failure: PenstockError | None = None
        """What its background raised; None while it works."""
        self.card: ModelDeploymentCard | None = None
        self.served: Served | None = None
        """Its registration; None until there is one, and for a worker that was told to end before."""
        self._owns_runtime = runtime is None
        self._environment = environment
        self._metrics, self._signals, self._exit, self._watch = metrics, signals, exit, watch
        self._tracer = tracer
        self._lifecycle = Lifecycle(engine)
        self._asked = Control()
        self._background = Background(self.runtime.scheduler)
        self._engine_task = Background(self.runtime.scheduler)
        self._bindings = MetricsBindings()
        may_answer = config.enable_local_indexer and config.disaggregation_mode.may_index
        self._kv_logs = KvEventLogs(kv_event_log if may_answer else None, self.endpoint, self.worker_id)
        self._labels: dict[str, str] = {}
        self._own_health = WorkerHealth(self.health, f"{self.endpoint.path}/{self.worker_id}")
        self._cut_opening: Callable[[], None] = lambda: None
        self._exits: AsyncExitStack | None = None
        self._is_used = False
        self._slack_s = 0.0
        """As a program it does not cut short what hangs before the process is ended for it."""

    def __str__(self) -> str:
        return f"{type(self.engine).__name__} at {self.endpoint.path}/{self.worker_id:x}"

    @property
    def state(self) -> WorkerState:
        return self._lifecycle.state

    def shutdown(self) -> None:
        """Asks for an orderly end; from any thread, at any time. Before the start the engine is never started.

        During the start it waits for that. What ends it then is the end of `run` or of the block, see `wait`.
        """
        self._asked.stop()

    async def wait(self) -> None:
        """Returns once `shutdown` was called, or the engine's background has failed."""
        await self._asked.stopped()

    async def run(self) -> None:
        """Serves until a signal, `shutdown` or a cancellation, then ends in order; returns when all is released.

        The first SIGINT or SIGTERM asks for an orderly end, also while the engine starts, which is not cancelled by it.
        A second one ends the process at once with 128 and its number, as a shell shows a program ended by it. An end
        that takes longer than `times.deadline_s` from the first signal, or from `shutdown`, ends the process with 911
        (143 for who sees eight bits of it). If `exit` returns, what hangs is cancelled instead. Raises Unknown if
        signals cannot be heard, as outside of the main thread; otherwise as entering does, and the engine's `failure`.

        Both hold where the engine blocks the event loop: a `ProcessWatch` sees to it until `run` returns, or the given
        `watch`, which must have been started, as long as its owner wants.
        """
        self._check()
        self._slack_s = CLEANUP_S
        deadline_s, watch = self.times.deadline_s, self._watch
        with ExitStack() as stack:
            if watch is None and self._signals is termination_signals:
                watch = stack.enter_context(ProcessWatch(deadline_s, exit=self._exit))
            await run_until_signalled(
                self._host, self._asked, self._signals, exit=self._exit, deadline_s=deadline_s, watch=watch
            )

    def native_metrics(self) -> str:
        """The engine's own metrics as whole lines of Prometheus text, with the worker's labels; empty if it has none.

        An engine that fails to give them has none; that is logged.
        """
        if self._bindings.native_text is None:
            return ""
        try:
            text = with_labels(self._bindings.native_text(), dict(self.config.metrics_labels) | self._labels)
        except BaseException as error:  # the page has the metrics of others to show
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
        if self._asked.is_stopped:
            return
        config = self.engine_config = await self._lifecycle.start(self.worker_id)
        name = served_name(self.config, config)
        self._labels = worker_labels(self.endpoint, self.worker_id, model=config.model, model_name=name)
        metrics = EngineMetrics(self._metrics, self._labels)
        self._lifecycle.measure(metrics)
        with anyio.CancelScope() as scope:
            self._cut_opening = scope.cancel
            self._engine_task.run(self._run_engine)
            await self._publish(config, metrics)
            if not self._asked.is_stopped:
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
        attach_snapshots(self._bindings, self.worker_id, metrics, self._connect)

    def _connect(self, topic: str) -> Callable[[object], None]:
        from pipeline.network import Scope

        scope = Scope(self.config.namespace, self.config.component)
        publisher = self.runtime.events.publisher(scope, topic)
        if topic == KV_EVENTS_TOPIC:
            self._kv_logs.publisher_id = publisher.publisher_id
        return publisher.publish

    async def _register(self, config: EngineConfig, name: str) -> None:
        self.card = await self._make_card(config)
        self.card.runtime_config.enable_local_indexer = self._kv_logs.answers
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
        if self._asked.is_stopped:
            return
        await self._serve(self._own_health.watched(adapter, payload, settings))
        if self.served is not None:
            self._own_health.begin(self._background.run)
            _log.info("%s serves %s", self, name)

    async def _make_card(self, config: EngineConfig) -> ModelDeploymentCard:
        if model_folder(self.config) is None and self.config.custom_jinja_template is None:
            return card_of(self.config, config, self._environment)
        # Its files are read whole, which other workers of this loop should not wait for.
        return await anyio.to_thread.run_sync(card_of, self.config, config, self._environment)

    async def _serve(self, engine: AsyncEngine[Any, Any]) -> None:
        """Serves and registers, unless a shutdown is quicker."""
        with anyio.CancelScope() as scope:
            forget = self._asked.on_stop(scope.cancel)
            try:
                await self._kv_logs.serve(self.runtime)  # first, for routers ask as soon as they see the worker
                self.served = await self.runtime.serve(
                    self.endpoint, engine, card=self.card, instance_id=self.worker_id
                )
            finally:
                forget()

    # -- closing

    async def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        may_serve_on = kind is None and self.served is not None and self.failure is None
        grace_s = self.times.grace_s if may_serve_on else 0.0
        deadline_s = anyio.current_time() + self.times.timeout_s + grace_s + self._slack_s
        try:
            # An orderly end may be cancelled; one that is an end of a failed block must not be at once.
            with anyio.CancelScope(deadline=deadline_s, shield=kind is not None) as scope:
                await self._withdraw(grace_s)
                if kind is None or self.card is not None:  # an engine that never came so far has nothing to drain
                    await self._lifecycle.drain()
            if scope.cancelled_caught:
                _log.error("%s did not drain in time and was cut short", self)
        finally:
            await self._release(deadline_s)

    async def _withdraw(self, grace_s: float) -> None:
        """Makes it invisible, serves on for the grace period, then takes nothing new."""
        self._own_health.end()
        if self.served is None:
            return
        try:
            await self.served.unpublish()
        except Exception:
            _log.warning("%s could not be unregistered", self, exc_info=True)
        await self._kv_logs.withdraw()
        await anyio.sleep(grace_s)
        await self.served.withdraw()

    async def _release(self, deadline_s: float) -> None:
        """Ends what still runs, then cleans up; takes its time even where it is cancelled."""
        now_s = anyio.current_time()
        self._own_health.forget()
        self._kv_logs.cut()
        try:
            if self.served is not None:
                self.served.cut()
                await _bounded(self.served.drained, now_s + _SETTLE_S)
            await _bounded(self._kv_logs.withdraw, now_s + _SETTLE_S)  # of a failed start, or a cancelled end
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
            _log.exception("%s failed in the background", self)
            self._give_up(failure)
        except anyio.get_cancelled_exc_class():
            self._give_up(BackendCancelled("the engine's background was cancelled"))
            raise

    def _give_up(self, failure: PenstockError) -> None:
        """As if it had crashed: nobody can reach it any more, and it asks for its end."""
        if self._lifecycle.is_cleaning_up:  # by then it may well fail, and nobody misses it
            return
        self.failure = failure
        self._own_health.end()
        if self.served is not None:
            self.served.abort()
        self._kv_logs.abort()
        self.shutdown()
        self._cut_opening()


async def _bounded(work: Callable[[], Awaitable[object]], until_s: float) -> bool:
    """Does the work even where the task is cancelled, but not for ever; whether it was done in time."""
    with anyio.CancelScope(deadline=until_s, shield=True) as scope:
        await work()
    return not scope.cancelled_caught
