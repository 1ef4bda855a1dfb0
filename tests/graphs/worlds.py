"""A disaggregated deployment in one process, whose mock workers can crash, stall and come back; and chats to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from random import Random
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup, TaskStatus
from attrs import define, evolve, field

from engines import DisaggregationMode, EngineConfig, GenerateContext, Worker
from engines.mocker import MockEngine, MockEngineArgs, PolynomialTiming, TransferExchange
from operators import PrefillRouter
from operators.kv import KvRouter, KvRouterConfig
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from serving.deployment import GraphConfig, HostOptions, StandardGraph, event_log, line, routing_to
from serving.deployment.routing import prefill_endpoint, prefill_stage

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
ENVIRONMENT = {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "2", "DYN_RUNTIME_INHIBITED_DURATION_SECS": "1"}
ARGS = MockEngineArgs(
    num_gpu_blocks=64,
    block_size=4,
    max_num_batched_tokens=64,
    kv_bytes_per_token=100_000,
    kv_transfer_bandwidth=1.0,
)
"""A cache of 256 tokens, of which some half a dozen requests have enough."""

Half = Literal["prefill", "decode"]
Way = Literal["abort", "fail", "drain"]
"""How a worker ends: by a crash, by a failure of its engine, or in order."""


class Timing(PolynomialTiming):
    """The times of the polynomial model; a test can make one step longer."""

    stall_ms = 0.0
    """What the next step takes longer, in milliseconds; 0 again once it has begun."""
    last_step_s = 0.0
    """When the last step began that computed anything."""

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        return super().prefill_ms(batch, mean_prompt_tokens, mean_cached_tokens) + self._stall()

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        return super().decode_ms(batch, active_kv_tokens, total_kv_tokens, mean_context_tokens) + self._stall()

    def _stall(self) -> float:
        self.last_step_s = anyio.current_time()
        stall_ms, self.stall_ms = self.stall_ms, 0.0
        return stall_ms


class FragileEngine(MockEngine):
    """A mock engine whose background task can be made to fail, and whose next step can be made to stall.

    Without `stops_prefills` its card does not promise that its prefills may be stopped.
    """

    def __init__(self, args: MockEngineArgs, exchange: TransferExchange, *, stops_prefills: bool = True) -> None:
        self.timing = Timing()
        super().__init__(args, timing=self.timing, exchange=exchange, token_ids=range(97, 123))
        self._stops_prefills = stops_prefills
        self._broken = anyio.Event()
        self.requests = 0
        """How many requests it has got."""
        self.stopped = 0
        """How many of them were stopped."""

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        config.stops_prefills &= self._stops_prefills
        return config

    def fail(self) -> None:
        """Make the background task raise, which ends the worker."""
        self._broken.set()

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.requests += 1
        try:
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.stopped += context.is_stopped

    async def background(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(super().background)
            await self._broken.wait()
            raise LookupError("the engine broke")


@define(eq=False)
class Host:
    """One worker in a task of its own."""

    half: Half
    """The pool that it belongs to."""
    engine: FragileEngine
    worker: Worker
    gone: anyio.Event = field(factory=anyio.Event)
    """Set once the worker has ended."""

    @property
    def worker_id(self) -> int:
        return self.worker.worker_id

    def crash(self) -> None:
        """Vanish from discovery and end, without draining."""
        self.worker.abort()
        self.worker.shutdown()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Host the worker until it ends."""
        try:
            async with self.worker:
                task_status.started()
                await self.worker.wait()
        finally:
            self.gone.set()


@define(eq=False)
class Fleet:
    """Workers that come and go, and the graph that routes to them."""

    stops_prefills: bool = field(default=True, kw_only=True)
    """Whether the cards of prefill workers promise that a prefill may be stopped."""

    runtime: Runtime
    config: GraphConfig
    hosting: HostOptions
    tasks: TaskGroup
    rng: Random
    args: MockEngineArgs
    exchange: TransferExchange = field(factory=TransferExchange)
    hosts: list[Host] = field(factory=list)
    """The workers that are there now."""
    engines: list[FragileEngine] = field(factory=list)
    """The engines of all workers that were ever there."""
    graph: StandardGraph = field(init=False)
    prefill: PrefillRouter = field(init=False)
    kv_routers: list[KvRouter] = field(init=False)
    """The router of the prefill pool and that of the decode pool; empty unless the config's router is `kv`."""

    async def add(
        self,
        half: Half,
        worker_id: int | None = None,
        *,
        meets: bool = True,
        there: tuple[Runtime, TaskGroup] | None = None,
    ) -> Host:
        """Start one more worker, if given with the id of one that is gone.

        With `meets` a prefill worker publishes the address at which decode can join its transfer. `there` is another
        process, by its runtime and tasks: the worker then has an exchange of its own.
        """
        port = 9000 + len(self.engines) if half == "prefill" and meets else None
        args = evolve(self.args, worker_type=half, bootstrap_port=port)
        runtime, tasks = (self.runtime, self.tasks) if there is None else there
        exchange = self.exchange if there is None else TransferExchange()
        engine = FragileEngine(args, exchange, stops_prefills=self.stops_prefills)
        worker = Worker(
            engine,
            self.config.worker_settings(self.config.load_model(), DisaggregationMode(half)),
            runtime=runtime,
            worker_id=worker_id,
            environment=self.hosting.environment,
            times=self.hosting.times,
            kv_event_log=event_log if self.config.needs_event_logs else None,
        )
        host = Host(half, engine, worker)
        self.engines.append(engine)
        await tasks.start(host.run)
        self.hosts.append(host)
        return host

    def of(self, half: Half) -> list[Host]:
        """The workers of one pool that are there now."""
        return [host for host in self.hosts if host.half == half]

    def remove(self, hosts: Iterable[Host], way: Way = "abort") -> None:
        """End these workers: by a crash, by a failure of the engine, or in order."""
        for host in list(hosts):
            self.hosts.remove(host)
            {"abort": host.crash, "fail": host.engine.fail, "drain": host.worker.shutdown}[way]()

    @property
    def blocks_held(self) -> int:
        """Active blocks of all engines there ever were."""
        return sum(rank.scheduler.pool.active for engine in self.engines for rank in engine.ranks)

    def assert_idle(self) -> None:
        """Assert that nothing is booked, queued, running or holds a block, here or on a worker that is gone."""
        for kv in self.kv_routers:
            assert (len(kv.loads), len(kv.queue)) == (0, 0)
        assert self.prefill.prefills == len(self.prefill._tasks._of_request) == 0
        for engine in self.engines:
            assert engine.exchange is not None
            assert (engine.exchange.waiting, engine.exchange.sessions) == (0, 0)
            assert engine._answers == {}
            for rank in engine.ranks:
                rank.scheduler.pool.check()
                assert (rank.scheduler.pool.active, rank.live, rank.scheduler.is_idle) == (0, 0, True)
        assert {served.running for served in self.runtime.served.values()} <= {0}


@asynccontextmanager
async def open_fleet(
    prefill_workers: int = 2,
    workers: int = 4,
    *,
    seed: int = 1,
    meets: bool = True,
    args: MockEngineArgs = ARGS,
    environment: dict[str, str] | None = None,
    stops_prefills: bool = True,
    **fields: Any,
) -> AsyncIterator[Fleet]:
    """The standard graph over workers that can be taken away; all of them end with the block.

    `meets` is that of `Fleet.add`, `fields` are those of the graph's config, whose router is `kv` unless they name
    another one. `environment` is ENVIRONMENT unless given.
    """
    wanted: dict[str, Any] = {"router": "kv", "kv_router": KvRouterConfig(router_queue_threshold=1.0)}
    config = GraphConfig(
        engine="mocker", workers=workers, prefill_workers=prefill_workers, seed=seed, **wanted | fields
    )
    hosting = HostOptions(ENVIRONMENT if environment is None else environment)
    rng = Random(seed)
    async with Runtime.in_process(rng=rng) as runtime, anyio.create_task_group() as tasks:
        fleet = Fleet(runtime, config, hosting, tasks, rng, args, stops_prefills=stops_prefills)
        for half, count in (("prefill", prefill_workers), ("decode", workers)):
            for _ in range(count):
                await fleet.add(half, meets=meets)  # type: ignore[arg-type]
        async with AsyncExitStack() as stages:
            await build(fleet, stages)
            yield fleet
        fleet.remove(fleet.hosts, "drain")


async def build(fleet: Fleet, stages: AsyncExitStack) -> None:
    """Make the fleet's graph, which ends with the stack."""
    config, hosting = fleet.config, fleet.hosting
    endpoint = fleet.of("decode")[0].worker.endpoint
    assert fleet.of("prefill")[0].worker.endpoint == prefill_endpoint(endpoint)
    parts = (config, hosting, fleet.runtime)
    routing = await stages.enter_async_context(routing_to(endpoint, *parts, "decode"))
    await routing.workers.wait_for_instances(config.workers)
    fleet.prefill = await stages.enter_async_context(prefill_stage(routing, *parts))
    pool: Any = fleet.prefill._side.pool
    fleet.kv_routers = [] if routing.kv_router is None else [pool.router, routing.kv_router]
    fleet.graph = line(config.load_model(), routing, config, hosting, fleet.prefill)
