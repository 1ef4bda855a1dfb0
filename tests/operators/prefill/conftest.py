"""A deployment of scripted prefill and decode workers with a PrefillRouter in front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from attrs import define

from operators import KvPrefill, KvPushRouter, PrefillRouter, PrefillSettings, PushPrefill, PushRouter
from operators.kv import KvRouterConfig, kv_router
from pipeline import Annotated, Context, ResponseStream, Segment
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig
from pipeline.rx import AnyIOScheduler, BehaviorSubject
from pipeline.testing import ScriptedEngine

PARAMS = {"handle": "h", "worker_id": {"prefill_worker_id": 2, "prefill_dp_rank": 0}}


def tokens(*counts: int) -> list[Annotated[LLMEngineOutput]]:
    return [Annotated(LLMEngineOutput(list(range(count)))) for count in counts]


def prefilled(params: Any = PARAMS, **fields: Any) -> Annotated[LLMEngineOutput]:
    """What a prefill worker answers."""
    return Annotated(LLMEngineOutput([1], disaggregated_params=params, **fields))


def meeting_at(port: int | None = 9000, **fields: Any) -> ModelRuntimeConfig:
    """A worker that waits for decode at h, if it has a port."""
    endpoint = DisaggregatedEndpoint("h", port)
    return ModelRuntimeConfig(disaggregated_endpoint=endpoint, **fields)


def everywhere() -> dict[int, ModelRuntimeConfig]:
    """All prefill workers wait for decode somewhere."""
    return {worker_id: meeting_at() for worker_id in (1, 2, 3)}


class Waited(ScriptedEngine):
    """Notes when it was asked, and how many of the others' items there were by then."""

    def __init__(self, script: Any, others: Mapping[int, ScriptedEngine]) -> None:
        super().__init__(script)
        self._others = others
        self.items_before: list[int] = []

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self.items_before.append(sum(other.delivered for other in self._others.values()))
        return await super().generate(request)


@define
class Deployment:
    """Workers 1, 2 and 3 prefill, and `decode` goes on."""

    engines: dict[int, ScriptedEngine]
    decode: Waited
    router: PrefillRouter
    pool: Any
    ids: BehaviorSubject[tuple[int, ...]]
    told: BehaviorSubject[Mapping[int, ModelRuntimeConfig]]
    graph: Segment[Any, Any]

    @property
    def prefills(self) -> list[Context[PreprocessedRequest]]:
        """The requests prefill workers were sent, worker by worker."""
        return [request for engine in self.engines.values() for request in engine.requests]

    @property
    def decodes(self) -> list[Context[PreprocessedRequest]]:
        return self.decode.requests

    async def ask(self, request: PreprocessedRequest | None = None, **context: Any) -> list[Any]:
        asked = Context(prompt() if request is None else request, **context)
        return await (await self.graph.generate(asked)).collect()

    def assert_idle(self) -> None:
        """No stream, task or phase is held."""
        assert [engine.open for engine in [*self.engines.values(), self.decode]] == [0] * (len(self.engines) + 1)
        assert self.router.prefills == len(self.router._tasks._of_request) == 0


def prompt(**fields: Any) -> PreprocessedRequest:
    plain = {"token_ids": list(range(8)), "stop_conditions": StopConditions(max_tokens=5)}
    return PreprocessedRequest(**{**plain, **fields})


@asynccontextmanager
async def open_deployment(
    mode: Any = "kv",
    script: Any = None,
    *,
    decode: Any = None,
    configs: Mapping[int, ModelRuntimeConfig] | None = None,
    workers: Sequence[int] = (1, 2, 3),
    present: Sequence[int] | None = None,
    conditional: Any = None,
    below: Any = None,
    **settings: Any,
) -> AsyncIterator[Deployment]:
    """`mode` kv or one of PushRouter's; `present` are the prefill workers known at the start, by default all."""
    engines = {i: ScriptedEngine([prefilled()] if script is None else script) for i in workers}
    pool: Any = static_workers(engines, name="prefill")
    if mode == "kv":
        kv = kv_router(
            pool, KvRouterConfig(use_kv_events=False), block_size_tokens=4, rng=Random(1), worker_type="prefill"
        )
        stage = KvPushRouter(kv)
        side: Any = KvPrefill(stage, stage >> PushRouter(pool))
    else:
        side = PushPrefill(PushRouter(pool, mode, Random(1)))
    ids = BehaviorSubject(tuple(workers if present is None else present))
    told: Any = BehaviorSubject(dict(configs or {}))
    async with AnyIOScheduler() as scheduler:
        router = PrefillRouter(
            side,
            ids,
            scheduler=scheduler,
            configs=told,
            settings=PrefillSettings(**settings),
            conditional=conditional,
            rng=Random(2),
        )
        goes_on = Waited(tokens(1, 1, 1) if decode is None else decode, engines)
        async with router:
            yield Deployment(
                engines, goes_on, router, side, ids, told, router >> (goes_on if below is None else below(goes_on))
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


@pytest.fixture
def slow() -> Any:
    """A pool whose workers take their time to take a request: `slow(pool)`."""
    return SlowToAnswer


@pytest.fixture
def in_line() -> Any:
    """A pool in whose router requests wait before they are sent: `in_line(pool)`."""
    return SlowToSend


@pytest.fixture
def deployment() -> Any:
    """Opens one: `async with deployment(mode, prefill_script, ...) as it`."""
    return open_deployment


@pytest.fixture
def made() -> Any:
    """What the tests are made of: `made.prompt(...)`, `made.prefilled(...)`, `made.tokens(...)`."""
    parts: list[Any] = [prompt, prefilled, tokens, meeting_at, everywhere]
    return SimpleNamespace(**{part.__name__: part for part in parts})
