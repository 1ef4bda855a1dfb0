"""The routers of a standard graph: which worker gets a request, and when requests are refused.

    environment, config ──► PushRouter ◄── busy? ── BusyWatch ◄── reports of the workers, their cards
                                ├────────► KvPushRouter right above it, where the KV router chooses
                                └────────► Rejection, the gate at the top

Source: dynamo lib/llm/src/discovery/{model_manager,worker_monitor}.rs. Other than there, thresholds hold in every mode.

The prefill side of a standard graph: a pool of its own, hung off the graph by PrefillRouter.

request ──► PrefillRouter ──► decode router ──► decode workers
                 └──► prefill router ──► prefill workers
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, frozen

from engines import DisaggregationMode
from operators import (
    BusyThresholds,
    DeviceAware,
    KvPrefill,
    KvPushRouter,
    PrefillRouter,
    PrefillSettings,
    PushPrefill,
    PushRouter,
    Rejection,
)
from operators.kv import KvRouter, WorkerType
from operators.pool import (
    COOLDOWN,
    DEVICE_RATIO,
    OVERLOAD_STATUS,
    BusyWatch,
    PoolCards,
    WorkerLoads,
    cards_of,
    load_reports,
)
from operators.prefill import ConditionalDisaggregation, PrefillPool
from pipeline import Annotated, AsyncEngine, link
from pipeline.network import EndpointId, EndpointWorkers, Runtime, Workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.rx import BehaviorSubject
from pipeline.settings import Variable, from_environment, whole
from pipeline.telemetry import TracedEngine, traced

from ..routers import MODES
from .admission import Admission
from .config import GraphConfig, HostOptions
from .kv_routing import KvPool, kv_stage

if TYPE_CHECKING:
    from pipeline.telemetry import Tracer

T = TypeVar("T")

SILENCE: Variable[float | None] = Variable(
    "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS",
    None,
    "Seconds without an item after which a worker's stream is given up; a request as a whole fails after twice that.",
    whole(1, 10**9, unit=1.0),
)
_WAITS_FOR_BLOCKS_S = 2.0
"""More time for decode workers, which are silent while a prefill runs: the prefill must time out first, and then
`PrefillSettings.decode_patience_s` passes."""


@frozen
class Routing:
    """A pool of workers, the stages to them that end a graph, and the stage at its top if thresholds are set.

    `push` is the last of those stages, `stage` the one above it that chooses workers with the router `kv`.
    """

    endpoint: EndpointId
    workers: Workers[Any, Any]
    push: PushRouter[PreprocessedRequest, Annotated[LLMEngineOutput]]
    router: AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]
    stage: KvPushRouter | None = None
    rejection: Rejection | None = None

    @property
    def kv_router(self) -> KvRouter | None:
        """The router that selects workers with the router `kv`."""
        return None if self.stage is None else self.stage.router


@asynccontextmanager
async def routing_to(
    endpoint: EndpointId,
    config: GraphConfig,
    hosting: HostOptions,
    runtime: Runtime,
    worker_type: WorkerType = "aggregated",
    admission: Admission | None = None,
) -> AsyncIterator[Routing]:
    """Give the routing to the workers at an endpoint of the runtime; its subscriptions end with the block.

    `worker_type` is the role of the workers; with an admission only those it admits get requests. Raise as `kv_stage`
    with that router, which needs a worker at the start.
    """
    with (
        closing(workers_at(endpoint, runtime, Annotated[LLMEngineOutput], admission)) as workers,
        _pushing(endpoint, config, hosting.environment, runtime, workers, worker_type) as (push, watch),
    ):
        rejection = None if watch is None else Rejection(push, status=OVERLOAD_STATUS.of(hosting.environment))
        if config.router != "kv":
            yield Routing(endpoint, workers, push, push, None, rejection)
            return
        async with kv_stage(KvPool(endpoint, workers, push, worker_type), config, hosting, runtime) as stage:
            yield Routing(endpoint, workers, push, stage >> push, stage, rejection)


def workers_at(
    endpoint: EndpointId, runtime: Runtime, item_type: type[T], admission: Admission | None
) -> EndpointWorkers[Any, T]:
    """Return the workers at an endpoint, with an admission only those it admits. They are the caller's to close."""
    if admission is None:
        return runtime.workers(endpoint, item_type)
    instances = admission.instances(runtime, endpoint)
    return EndpointWorkers(
        endpoint,
        instances,
        lambda instance: runtime.requests.engine(instance, item_type),
        runtime.requests.keep_connected,
    )


@contextmanager
def _pushing(
    endpoint: EndpointId,
    config: GraphConfig,
    environment: Mapping[str, str],
    runtime: Runtime,
    workers: Workers[Any, Any],
    worker_type: WorkerType,
) -> Iterator[tuple[PushRouter[Any, Any], BusyWatch | None]]:
    """Give the router that sends, and the watch for busy workers if a threshold is set.

    Without a threshold there is no subscription to load reports: no mode of routing uses them.
    """
    cards = BehaviorSubject(PoolCards(configs={}))
    with cards_of(runtime.discovery.watch_models(endpoint.path)).subscribe(cards):
        if not reads_loads(config, environment):
            yield router_of(workers, config, environment, worker_type, cards=cards), None
            return
        loads = WorkerLoads(workers)
        with (
            loads.follow(load_reports(runtime.events, endpoint), scheduler=runtime.scheduler),
            closing(BusyWatch(loads, _thresholds(config, environment), cards)) as watch,
        ):
            busy = watch.changes()
            yield router_of(workers, config, environment, worker_type, cards=cards, loads=loads, busy=busy), watch


def busy_thresholds(environment: Mapping[str, str]) -> BusyThresholds:
    """Return the thresholds that the environment sets; one that cannot be read, or is out of range, is not set."""
    return BusyThresholds(**from_environment(BusyThresholds, environment))


def _thresholds(config: GraphConfig, environment: Mapping[str, str]) -> BusyThresholds:
    return busy_thresholds(environment).updated(config.busy)


def reads_loads(config: GraphConfig, environment: Mapping[str, str]) -> bool:
    """Return whether a router reads the loads that workers report: if it leaves out busy ones."""
    return _thresholds(config, environment) != BusyThresholds()


def acts_on_tokens(config: GraphConfig, environment: Mapping[str, str]) -> bool:
    """Return whether a router acts on each token as it comes, or on the time since the last one."""
    return SILENCE.of(environment) is not None or (
        config.router == "kv" and bool(config.kv_router.router_track_output_blocks)
    )


def router_of(
    workers: Workers[Any, Any],
    config: GraphConfig,
    environment: Mapping[str, str],
    worker_type: WorkerType = "aggregated",
    **judging: Any,
) -> PushRouter[Any, Any]:
    """Return the router as configured; `judging` are the arguments of PushRouter about cards and busy workers."""
    silence_timeout_s = SILENCE.of(environment)
    if silence_timeout_s is not None and worker_type == "decode":
        silence_timeout_s += _WAITS_FOR_BLOCKS_S
    return PushRouter(
        workers,
        MODES.get(config.router),
        rng=None if config.seed is None else Random(config.seed),
        pick=DeviceAware(DEVICE_RATIO.of(environment)) if config.router == "device-aware" else None,
        cooldown_s=COOLDOWN.of(environment),
        silence_timeout_s=silence_timeout_s,
        **judging,
    )


@asynccontextmanager
async def prefill_stage(
    decode: Routing,
    config: GraphConfig,
    hosting: HostOptions,
    runtime: Runtime,
    endpoint: EndpointId | None = None,
    admission: Admission | None = None,
) -> AsyncIterator[PrefillRouter]:
    """Give the stage above the decode router once all prefill workers are known; both pools have the same router.

    They are at the endpoint, by default `prefill_endpoint`; with an admission those it admits. The end of the block
    waits for prefills under way. Raise as `routing_to`.
    """
    endpoint, conditional = endpoint or prefill_endpoint(decode.endpoint), None
    if decode.kv_router is not None and config.kv_router.conditional_disagg_enabled:  # only it knows what is cached
        conditional = ConditionalDisaggregation(config.kv_router, decode.kv_router)
    async with routing_to(endpoint, config, hosting, runtime, "prefill", admission) as prefill:
        await prefill.workers.wait_for_instances(config.prefill_workers)
        async with PrefillRouter(
            _pool(prefill, hosting.tracer),
            prefill.push.health.changes(),
            scheduler=runtime.scheduler,
            settings=PrefillSettings(enforce_disagg=True) if config.enforce_disagg else None,
            conditional=conditional,
            rng=None if config.seed is None else Random(config.seed),
            tracer=hosting.tracer,
        ) as stage:
            yield stage


def _pool(prefill: Routing, tracer: Tracer | None) -> PrefillPool:
    """Return the prefill workers behind their router; with a tracer its stages have spans."""
    if prefill.stage is None:
        return PushPrefill(prefill.push, None if tracer is None else TracedEngine(prefill.push, tracer))
    graph = prefill.router if tracer is None else traced(link(prefill.router), tracer=tracer)
    return KvPrefill(prefill.stage, graph)


def prefill_endpoint(endpoint: EndpointId) -> EndpointId:
    """Return the endpoint of the prefill workers of the workers at an endpoint."""
    return evolve(endpoint, component=DisaggregationMode.PREFILL.component)
