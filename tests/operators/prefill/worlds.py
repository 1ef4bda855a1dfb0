"""PrefillWorld: scripted prefill workers and a scripted decode worker, with a PrefillRouter in front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Literal

import anyio
from attrs import define

from operators import KvPrefill, KvPushRouter, PrefillRouter, PrefillSettings, PushPrefill, PushRouter
from operators.kv import KvRouter, KvRouterConfig, kv_router
from operators.pool.push_router import RouterMode
from operators.prefill import ConditionalDisaggregation
from pipeline import Annotated, AsyncEngine, Context, ResponseStream, Segment
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler
from pipeline.testing import ScriptedEngine
from tests.operators.kv.worlds import GivenHealth

Steps = list[Any] | Callable[[PreprocessedRequest], list[Any]]
"""The steps of a scripted worker, or how they follow from the payload."""

Mode = RouterMode | Literal["kv"]
"""How a pool of prefill workers is routed."""

MODES: list[Mode] = ["kv", "round_robin", "random", "power_of_two_choices", "least_loaded", "device_aware_weighted"]
"""All of them in which the router chooses."""

PARAMS = {"handle": "h", "worker_id": {"prefill_worker_id": 2, "prefill_dp_rank": 0}}


def tokens(*counts: int) -> list[Annotated[Any]]:
    """One item for each count, with so many tokens."""
    return [Annotated(LLMEngineOutput(list(range(count)))) for count in counts]


def prefilled(params: Any = PARAMS, **fields: Any) -> Annotated[Any]:
    """The item of a prefill worker's answer."""
    return Annotated(LLMEngineOutput([1], disaggregated_params=params, **fields))


def meeting_at(port: int | None = 9000, **fields: Any) -> ModelRuntimeConfig:
    """The settings of a worker that waits for decode at host h, if a port is given."""
    endpoint = DisaggregatedEndpoint("h", port)
    return ModelRuntimeConfig(disaggregated_endpoint=endpoint, **fields)


def everywhere() -> dict[int, ModelRuntimeConfig]:
    """Settings with which workers 1, 2 and 3 all wait for decode somewhere."""
    return {worker_id: meeting_at() for worker_id in (1, 2, 3)}


def present_workers(*worker_ids: int, configs: Mapping[int, ModelRuntimeConfig] | None = None) -> GivenHealth:
    """The views of a pool of these prefill workers, with these settings in their cards."""
    health = GivenHealth(*worker_ids)
    health.publish(configs or {})
    return health


class Waited(ScriptedEngine):
    """Records, for each request it gets, how many items the others had given by then."""

    def __init__(self, script: Steps, others: Mapping[int, ScriptedEngine]) -> None:
        super().__init__(script)
        self._others = others
        self.items_before: list[int] = []

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self.items_before.append(sum(other.delivered for other in self._others.values()))
        return await super().generate(request)


@define
class PrefillWorld:
    """Prefill workers, by default 1, 2 and 3, a decode worker, and the graph in front of both."""

    engines: dict[int, ScriptedEngine]
    """The prefill workers."""
    decode: Waited
    """The decode worker."""
    router: PrefillRouter
    pool: KvPrefill | PushPrefill
    health: GivenHealth
    """The prefill workers the router knows, with their settings; a test changes them."""
    graph: Segment[Any, Any]
    """The router above the decode worker."""

    @property
    def kv(self) -> KvRouter:
        """The KV router of the prefill workers."""
        assert isinstance(self.pool, KvPrefill)
        return self.pool.router

    @property
    def prefills(self) -> list[Context[Any]]:
        """The requests that prefill workers got, worker by worker."""
        return [request for engine in self.engines.values() for request in engine.requests]

    @property
    def decodes(self) -> list[Context[Any]]:
        """The requests that the decode worker got."""
        return self.decode.requests

    async def collect(self, request: PreprocessedRequest | None = None, **context: Any) -> list[Any]:
        """Send a request, by default `prompt()`, and return the items of its stream."""
        sent = Context(prompt() if request is None else request, **context)
        return await (await self.graph.generate(sent)).collect()

    def put_in_front(self, slow: type[SlowToAnswer]) -> None:
        """Have the pool answer, or send, only after three seconds."""
        slowed: Any = slow(self.pool)
        self.router._side.pool = slowed

    def assert_idle(self) -> None:
        """No stream, task or phase is held."""
        assert [engine.open for engine in [*self.engines.values(), self.decode]] == [0] * (len(self.engines) + 1)
        assert self.router.prefills == len(self.router._tasks._of_request) == 0


def prompt(**fields: Any) -> PreprocessedRequest:
    """A request of eight tokens that may have five more, with these fields changed."""
    plain = {"token_ids": list(range(8)), "stop_conditions": StopConditions(max_tokens=5)}
    return PreprocessedRequest(**{**plain, **fields})


@asynccontextmanager
async def prefill_world(
    mode: Mode = "kv",
    script: Steps | None = None,
    *,
    decode: Steps | None = None,
    configs: Mapping[int, ModelRuntimeConfig] | None = None,
    workers: Sequence[int] = (1, 2, 3),
    present: Sequence[int] | None = None,
    conditional: ConditionalDisaggregation | None = None,
    below: Callable[[ScriptedEngine], AsyncEngine[Any, Any]] | None = None,
    **settings: Any,
) -> AsyncIterator[PrefillWorld]:
    """Open a world for the block.

    mode: `kv`, or one of PushRouter's
    script: what each prefill worker does with a request; by default one item that hands over
    decode: what the decode worker does; by default three items of one token
    configs: the settings of the prefill workers; by default none has any
    workers: the prefill workers
    present: those the router knows at the start, by default all
    below: makes the graph below the router from the decode worker
    settings: fields of PrefillSettings
    """
    engines = {i: ScriptedEngine([prefilled()] if script is None else script) for i in workers}
    pool = static_workers(engines, name="prefill")
    if mode == "kv":
        kv = kv_router(
            pool, KvRouterConfig(use_kv_events=False), block_size_tokens=4, rng=Random(1), worker_type="prefill"
        )
        stage = KvPushRouter(kv)
        side: KvPrefill | PushPrefill = KvPrefill(stage, stage >> PushRouter(pool))
    else:
        side = PushPrefill(PushRouter(pool, mode, Random(1)))
    health = present_workers(*(workers if present is None else present), configs=configs)
    async with AnyIOScheduler() as scheduler:
        router = PrefillRouter(
            side,
            health.views,
            scheduler=scheduler,
            settings=PrefillSettings(**settings),
            conditional=conditional,
            rng=Random(2),
        )
        goes_on = Waited(tokens(1, 1, 1) if decode is None else decode, engines)
        async with router:
            yield PrefillWorld(
                engines,
                goes_on,
                router,
                side,
                health,
                router >> (goes_on if below is None else below(goes_on)),
            )


class SlowToAnswer:
    """A pool that sends at once; the worker takes three seconds to take the request."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def send(self, request: Any, reservation: Any) -> Any:
        stream = await self._pool.send(request, reservation)
        await anyio.sleep(3)
        return stream


class SlowToSend(SlowToAnswer):
    """A pool in whose router a request waits three seconds before it is sent, whatever happens to it meanwhile."""

    async def send(self, request: Any, reservation: Any) -> Any:
        await anyio.sleep(3)
        return await self._pool.send(request, reservation)
