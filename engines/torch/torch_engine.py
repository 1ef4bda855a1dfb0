"""TorchEngine: a causal language model of transformers, computed in this process.

    request ──► order ──► Batcher ── plan ──► compute thread: one step ── draws ──► Batcher ──► chunks
                             └──► KV events, load, what steps take

All decisions are made in the event loop, between two steps; one thread computes. A request that is stopped, killed or
closed leaves the batch at once, also while a step runs with it: its blocks are free for the next step.

Source: vllm/v1/engine/core.py, EngineCore.step; vllm/v1/core/sched/scheduler.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from anyio import CancelScope, create_task_group, current_time

from pipeline import EngineShutdown, PenstockError
from pipeline.loop import Wakeup
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from ..chunks import engine_error
from ..llm import EngineConfig, GenerateContext, LLMEngine
from ..peers import Peers
from ..publishing import (
    ComponentSnapshot,
    KvEventPublisher,
    MetricsBindings,
    MetricsContext,
    PushSource,
    SnapshotPublisher,
)
from ..worker import health_payload
from .batching import Batcher
from .compute_thread import ComputeThread
from .delivery import Delivery, empty_chunks
from .loading import LoadedModel, LoadingProgress, ReportProgress
from .order import Order, order_of
from .planning import StepPlan
from .settings import TorchSettings
from .slots import Choice, HeldBlocks, KvBytes
from .step_times import StepTimes, timed

if TYPE_CHECKING:
    from .kv_store import KvStore
    from .machine import Machine

T = TypeVar("T")

Load = Callable[[ReportProgress], LoadedModel]
"""Loads the model, in the compute thread, with calls of the function it is given."""

FAILURES_MAX = 3
"""So many steps in a row that fail end the engine: the device is lost, or memory."""


class Handover(Protocol):
    """Moves the KV of a prompt from a prefill worker to a decode worker."""

    def offer(self, request: PreprocessedRequest, held: HeldBlocks) -> Any:
        """Return the `disaggregated_params` of a computed prompt; the blocks are the hand-over's from here on.

        Called in the event loop of a prefill worker, with the prompt's last chunk. The hand-over calls
        `TorchEngine.release` once: when the blocks were taken, or their lease is over.
        """
        ...

    async def take(self, request: PreprocessedRequest) -> KvBytes | None:
        """Return the KV of the prompt of a request with a `prefill_result`, or None: it is computed here.

        Called on a decode worker before the request is queued, and cancelled when that is stopped or killed.
        """
        ...

    async def start(self, engine: TorchEngine, peers: Peers | None) -> None:
        """Begin with an engine whose model is loaded; called before its `start` returns. None: it has no peers."""
        ...

    async def background(self) -> None:
        """Run beside the engine's steps; cancelled after `close`."""
        ...

    async def drain(self) -> None:
        """Wait, for a while, until what was offered is taken; called before `close` when the engine ends in order."""
        ...

    async def close(self) -> None:
        """Release all blocks and end what runs; called by `cleanup`, maybe twice."""
        ...


class TorchEngine(LLMEngine):
    """Serves one model: continuous batches, prompts in parts, a cache of prefixes in blocks with KV events.

    `load` makes the model, in the compute thread, when the engine starts; the progress it reports goes to `on_progress`
    in that thread. `handover` moves prompts between workers, by the role in the `settings`. `adapters` are folders of
    LoRA adapters by name, which peft loads; a request names one in its routing.

    Refused by name are: embeddings and media as prompt, other adapters, guided decoding, beam search, `best_of` other
    than `n`, log probabilities of prompts. Stop strings are the work of `Detokenize`. A request without a seed gets a
    random one.

    After a stop one chunk with finish reason cancelled follows, after a kill nothing; neither waits for the step that
    is being computed. A step that raises ends its requests with BackendError; three in a row end the engine. `cleanup`
    ends running requests as a stop does, and then the thread, which finishes its step first; a model that is still
    being loaded is given up at its next report.
    """

    ends_on_kill: ClassVar[bool] = True

    def __init__(
        self,
        load: Load,
        settings: TorchSettings | None = None,
        *,
        handover: Handover | None = None,
        adapters: Mapping[str, Path] | None = None,
        on_progress: ReportProgress | None = None,
    ) -> None:
        self.settings = TorchSettings() if settings is None else settings
        self.handover = handover
        self.is_closing = False
        self._load, self._on_progress = load, on_progress
        self._adapters = dict(adapters or {})
        self._peers: Peers | None = None
        self._thread: ComputeThread | None = None
        self._machine: Machine | None = None
        self._batcher = Batcher(self.settings, 0, salt=0)
        self._deliveries: set[Delivery] = set()
        self._snapshots: SnapshotPublisher | None = None
        self._published: ComponentSnapshot | None = None
        self._times = StepTimes()

    @property
    def batcher(self) -> Batcher:
        """The state of the batch; without blocks before the start."""
        return self._batcher

    @property
    def model_name(self) -> str:
        """Name of the model. Raise EngineShutdown unless it was started."""
        return self._running().name

    @property
    def store(self) -> KvStore:
        """The tensors of the cache, for functions given to `compute`. Raise EngineShutdown unless it was started."""
        return self._running().store

    async def setup_peers(self, peers: Peers) -> None:
        self._peers = peers

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model. A failed start leaves a thread, which `cleanup` ends.

        Raise what `load` raises, InvalidArgument for a model that cannot be served, and EngineShutdown if the engine
        was started or closed before, or is closed meanwhile.
        """
        if self._thread is not None or self.is_closing:
            raise EngineShutdown("a torch engine starts once")
        self._work = Wakeup()
        self._thread = ComputeThread(f"torch-{worker_id}")
        machine = await self._thread.run(self._make)
        self._check_open()
        self._machine = machine
        self._batcher = Batcher(self.settings, machine.store.blocks, salt=randbits(64))
        if self.handover is not None:
            await self.handover.start(self, self._peers)
            if self.is_closing:  # there was nothing to close before
                await self.handover.close()
        self._check_open()
        return EngineConfig(
            model=machine.name,
            context_length=machine.facts.capacity_tokens,
            kv_cache_block_size=self.settings.block_size_tokens,
            total_kv_blocks=machine.store.blocks,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            stops_prefills=self.settings.role == "prefill",
        )

    def _make(self) -> Machine:
        from .machine import Machine  # loads torch, which takes seconds

        return Machine(self._load(self._report), self.settings, self._adapters)

    def _check_open(self) -> None:
        if self.is_closing:
            raise EngineShutdown("the engine was closed while its model was loaded")

    def _report(self, progress: LoadingProgress) -> None:
        self._check_open()
        if self._on_progress is not None:
            self._on_progress(progress)

    async def background(self) -> None:
        """Compute steps, beside the hand-over's own work. Raise as `_compute_steps`."""
        if self.handover is None:
            await self._compute_steps()
            return
        async with create_task_group() as tasks:
            tasks.start_soon(self.handover.background)
            await self._compute_steps()
            tasks.cancel_scope.cancel()

    async def _compute_steps(self) -> None:
        """Compute steps as long as there is something to compute. Raise the error of a step if steps keep failing."""
        failures = 0
        while not self.is_closing:
            plan = self._batcher.plan()
            if plan is None:
                self._publish_load()
                await self._work.wait()
                continue
            error = await self._step(plan)
            failures = 0 if error is None else failures + 1
            if error is not None and failures == FAILURES_MAX:
                raise error

    async def _step(self, plan: StepPlan) -> PenstockError | None:
        """Compute a step and deliver what it draws; return its error if it failed."""
        machine, held_tokens = self._running(), self._batcher.pool.active * self.settings.block_size_tokens
        try:
            drawn, time_ns = await self.compute(lambda: timed(lambda: machine.run(plan)))
        except Exception as raised:
            error = engine_error(raised)
            self._batcher.fail(plan, error)
            return error
        self._times.step(plan, time_ns, held_tokens)
        self._batcher.apply(plan, drawn)
        self._publish_load()
        if self._snapshots is not None:
            self._times.publish(self._snapshots, current_time())
        return None

    async def compute(self, work: Callable[[], T]) -> T:
        """Return what a function returns in the compute thread, between two steps; as `ComputeThread.run`."""
        if self._thread is None:
            raise EngineShutdown("the torch engine is not running")
        return await self._thread.run(work)

    def release(self, held: HeldBlocks) -> None:
        """Release blocks that were offered. Call it once, in the event loop."""
        self._batcher.release_held(held)
        self._work.wake()

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Raise InvalidArgument for a request that cannot be served, EngineShutdown unless started."""
        order = order_of(request, self._running().facts, seed=randbits(63))
        imported = await self._taken(request, context)
        if context.is_stopped:
            if not context.is_killed:
                yield LLMEngineOutput.cancelled()
            return
        if not order.limits.max_tokens:
            for chunk in empty_chunks(order.choices):
                yield chunk
            return
        async with aclosing(self._answered(request, order, context, imported)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _taken(self, request: PreprocessedRequest, context: GenerateContext) -> KvBytes | None:
        """Return the KV that was computed elsewhere; a stop ends the wait for it."""
        if self.handover is None or self.settings.role != "decode" or request.prefill_result is None:
            return None
        with CancelScope() as waiting:
            forget = context.control.on_stop(waiting.cancel)
            try:
                return await self.handover.take(request)
            finally:
                forget()
        return None

    async def _answered(
        self, request: PreprocessedRequest, order: Order, context: GenerateContext, imported: KvBytes | None
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self._running()
        hands_over = self.handover is not None and self.settings.role == "prefill"
        offers = partial(self._offer, request) if hands_over else None
        delivery = Delivery(order, context.control, imported=imported, offers=offers, offer_token=context.offer_token)
        self._deliveries.add(delivery)
        try:
            for choice in delivery.choices:
                self._batcher.add(choice)
            self._work.wake()
            async with aclosing(delivery.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._deliveries.discard(delivery)
            self._remove(delivery.choices)

    def _offer(self, request: PreprocessedRequest, choice: Choice) -> Any:
        assert self.handover is not None
        return self.handover.offer(request, self._batcher.take_held(choice))

    def _remove(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._batcher.remove(choice)
        self._work.wake()  # what waited for their blocks may begin

    async def drain(self) -> None:
        if self.handover is not None:
            await self.handover.drain()

    async def cleanup(self) -> None:
        self.is_closing = True
        for delivery in list(self._deliveries):
            delivery.control.stop()
        if self._thread is not None:
            self._work.wake()
            if self.handover is not None:
                await self.handover.close()
            await self._thread.close()
        self._machine = None

    async def kv_event_sources(self) -> Sequence[PushSource]:
        return [PushSource(self._publish_events)] if self.settings.caches_prefixes else ()

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        return MetricsBindings([0], self._keep_snapshots)

    async def health_check_payload(self) -> Mapping[str, Any]:
        return health_payload()

    def _running(self) -> Machine:
        if self._machine is None or self.is_closing:
            raise EngineShutdown("the torch engine is not running")
        return self._machine

    def _publish_events(self, publisher: KvEventPublisher) -> None:
        self._batcher.pool.on_event = publisher.publish

    def _keep_snapshots(self, publisher: SnapshotPublisher) -> None:
        self._snapshots = publisher

    def _publish_load(self) -> None:
        if self._snapshots is None:
            return
        pool = self._batcher.pool
        snapshot = ComponentSnapshot(pool.active, pool.capacity, pool.active / pool.capacity)
        if snapshot != self._published:
            self._published = snapshot
            self._snapshots.publish(0, snapshot)
