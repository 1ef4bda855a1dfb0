"""Ten thousand requests to instances that come and go, disturbed at random: each ends as it may, nothing is left."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any
from weakref import WeakSet

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import frozen
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pipeline import CannotConnect, Context, Disconnected, EngineShutdown, PenstockError, ResponseStream
from pipeline.network import Runtime, Served
from pipeline.network.inprocess import InProcessEventPlane, InProcessStore
from pipeline.network.tcp import TcpRequestPlane
from pipeline.telemetry import Metrics
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait, watch_streams
from tests.pipeline.network.memory_network import MemoryNetwork
from tests.pipeline.network.worlds import WORLDS, ProcessStore, WorldKind, two_runtimes

pytestmark = pytest.mark.slow

WHERE = "ns/comp/ep"
INSTANCES = (1, 2, 3, 4)
REQUESTS: dict[WorldKind, int] = {"in process": 10_000, "tcp": 6_000}
AT_ONCE = 100
ITEMS = 6
PATIENCE_S = 5.0
"""After this long a reader kills its request."""

ACTIONS = ("none", "none", "stop", "kill", "close", "drop", "cancel")
SCRIPTS: dict[str, Callable[[], list[Any]]] = {
    "quick": lambda: list(range(ITEMS)),
    "slow": lambda: [step for item in range(ITEMS) for step in (Wait(0.05), item)],
    "stalls": lambda: [0, 1, Stall()],
    # A new error each time, for an error keeps the frames it passed.
    "fails": lambda: [0, 1, Fail(EngineShutdown("broken"))],
    "fails at once": lambda: [Fail(LookupError("broken"))],
}


@frozen
class Plan:
    """What happens to one request; with `after_s` another task does it, else the reader after so many items."""

    script: str
    action: str
    after_items: int
    after_s: float | None
    instance_id: int

    @classmethod
    def draw(cls, rng: Random) -> Plan:
        after_s = rng.uniform(0, 0.5) if rng.random() < 0.5 else None
        return cls(rng.choice(list(SCRIPTS)), rng.choice(ACTIONS), rng.randrange(ITEMS), after_s, rng.choice(INSTANCES))


class Pool:
    """Instances of one endpoint, taken away and brought back at random."""

    def __init__(self, runtime: Runtime, rng: Random) -> None:
        self.engine = ScriptedEngine(lambda script: SCRIPTS[script]())
        self.engine.requests = Forgetful()
        self.ways_out: Counter[str] = Counter()
        self._runtime, self._rng = runtime, rng
        self._served: dict[int, Served] = {}

    async def serve(self) -> None:
        for instance_id in INSTANCES:
            self._served[instance_id] = await self._runtime.serve(WHERE, self.engine, instance_id=instance_id)

    async def come_and_go(self) -> None:
        while True:
            await anyio.sleep(self._rng.uniform(0, 0.1))
            instance_id, way_out = self._rng.choice(INSTANCES), self._rng.choice(["abort", "close", "falls silent"])
            self.ways_out[way_out] += 1
            if (network := network_of(self._runtime)) is not None and self._rng.random() < 0.2:
                network.cut()
            await self._take_away(self._served[instance_id], way_out)
            if self._rng.random() < 0.5:
                await anyio.sleep(self._rng.uniform(0, 0.1))
            self._served[instance_id] = await self._runtime.serve(WHERE, self.engine, instance_id=instance_id)

    async def _take_away(self, served: Served, way_out: str) -> None:
        if way_out == "abort":
            served.abort()
        elif way_out == "close":
            await served.close(self._rng.uniform(0, 0.1))
        else:
            served.cut()
            for lease in served.leases:
                lease.abandon()


class Forgetful(list[Context[Any]]):
    """Takes the engine's note of a request and drops it, so that the request may be freed."""

    def append(self, _: Context[Any]) -> None:
        pass


class Run:
    """All requests of one test, and what became of them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.requests: WeakSet[Context[Any]] = WeakSet()
        self.endings: Counter[str] = Counter()

    async def one(self, plan: Plan) -> None:
        request = Context(plan.script)
        self.requests.add(request)
        ending = "cancelled"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_disturb_later, request, plan, tasks.cancel_scope)
            try:
                ending = await self._read(request, plan)
            except PenstockError as error:
                ending = error.type_name
            tasks.cancel_scope.cancel()
        self.endings[ending] += 1

    async def _read(self, request: Context[Any], plan: Plan) -> str:
        view = self.runtime.workers(WHERE)
        try:
            stream = await view.engine(plan.instance_id).generate(request)
        finally:
            view.close()
        if plan.action == "drop":
            return await _drop(stream, plan)
        async with stream:
            return await _read(stream, request, plan)


async def _read(stream: ResponseStream[Any], request: Context[Any], plan: Plan) -> str:
    items: list[int] = []
    while True:
        if plan.after_s is None and len(items) == plan.after_items:
            if plan.action == "close":
                return "closed"
            _disturb(request, plan.action)
        was_killed = request.is_killed
        try:
            items.append(await stream.__anext__())
        except StopAsyncIteration:
            break
        assert not was_killed, "an item followed a kill"
        assert items == list(range(len(items)))
    assert request.is_stopped or len(items) == ITEMS, "a short answer"
    return "ended"


async def _drop(stream: ResponseStream[Any], plan: Plan) -> str:
    for _ in range(plan.after_items):
        if await anext(stream, None) is None:
            return "ended"
    return "dropped"


async def _disturb_later(request: Context[Any], plan: Plan, reader: anyio.CancelScope) -> None:
    await anyio.sleep(PATIENCE_S if plan.after_s is None else plan.after_s)
    if plan.action == "cancel":
        reader.cancel()
    else:
        _disturb(request, plan.action)
    await anyio.sleep(PATIENCE_S)
    request.kill()


def _disturb(request: Context[Any], action: str) -> None:
    if action in ("stop", "kill"):
        getattr(request, action)()


def task_ids() -> set[int]:
    return {task.id for task in anyio.get_running_tasks()}


async def settle() -> None:
    """Lets dropped streams be released."""
    for _ in range(3):
        gc.collect()
        await anyio.sleep(0.1)
        await checkpoint()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # streams are dropped on purpose
@pytest.mark.parametrize("world", WORLDS)
async def test_nothing_is_left_of_requests_to_instances_that_come_and_go(world: WorldKind) -> None:
    rng, reader = Random(20261121), InMemoryMetricReader()
    metrics = Metrics(MeterProvider([reader], shutdown_on_exit=False).get_meter("test"), family="component")
    with watch_streams() as streams:
        async with two_runtimes(world, rng=rng, metrics=metrics, lease_ttl_s=0.2) as (runtime, caller):
            run, pool = Run(caller), Pool(runtime, rng)
            await pool.serve()
            await checkpoint()
            before = task_ids()
            await send(run, pool, [Plan.draw(rng) for _ in range(REQUESTS[world])])
            await settle()
            assert streams.open == []
            assert pool.engine.open == 0
            assert {served.running for served in runtime.served.values()} <= {0}
            assert task_ids() == before
            assert len(run.requests) == 0
            assert watching(runtime) == watching(caller) == 0
            assert len(runtime.scheduler._timers) <= 128
            assert open_calls(caller) == open_calls(runtime) == 0
        assert runtime.served == {}
        assert runtime.requests.serving == {}  # type: ignore[attr-defined]
    counted = totals(reader)
    assert counted["dynamo_component_inflight_requests"] == 0
    assert counted["dynamo_component_requests_total"] == pool.engine.started
    assert sum(run.endings.values()) == REQUESTS[world]
    assert set(run.endings) == {
        "ended", "closed", "dropped", "cancelled",
        *(kind.type_name for kind in (CannotConnect, Disconnected, EngineShutdown)), "Unknown",
    }  # fmt: skip
    assert min(pool.ways_out.values()) > 10


async def send(run: Run, pool: Pool, plans: list[Plan]) -> None:
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def limited(plan: Plan) -> None:
        async with limiter:
            await run.one(plan)

    async with anyio.create_task_group() as comings:
        comings.start_soon(pool.come_and_go)
        async with anyio.create_task_group() as tasks:
            for plan in plans:
                tasks.start_soon(limited, plan)
        comings.cancel_scope.cancel()


def watching(runtime: Runtime) -> int:
    store = runtime._store.shared if isinstance(runtime._store, ProcessStore) else runtime._store
    assert isinstance(store, InProcessStore)
    assert isinstance(runtime.events, InProcessEventPlane)
    return store.watchers + runtime.events.subscriptions


def network_of(runtime: Runtime) -> MemoryNetwork | None:
    network = getattr(runtime.requests, "_network", None)
    return network if isinstance(network, MemoryNetwork) else None


def open_calls(runtime: Runtime) -> int:
    """Return the streams that connections of the runtime still have."""
    return runtime.requests.open_calls if isinstance(runtime.requests, TcpRequestPlane) else 0


def totals(reader: InMemoryMetricReader) -> dict[str, int]:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: sum(getattr(point, "value", 0) for point in metric.data.data_points) for metric in metrics}
