"""Workers that are announced and cannot be reached cost requests nothing, as long as others can be."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import count
from random import Random
from typing import Any, Literal, cast

import anyio
import pytest
from anyio.abc import TaskGroup, TaskStatus
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from operators import KvPushRouter, Migration, PushRouter
from operators.kv import KvRouterConfig, kv_router
from operators.pool import AllCoolingDown
from pipeline import Annotated, AsyncEngine, Context, EngineShutdown, PenstockError, ResponseStream, Unavailable, link
from pipeline.errors import TransportError
from pipeline.network import EndpointId, EndpointWorkers, Instance, Runtime
from pipeline.network.discovery import Discovery
from pipeline.network.tcp import Address, TcpOptions, TcpRequestPlane
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from tests.pipeline.network.memory_network import MemoryListener
from tests.pipeline.network.tcp.worlds import RawPeer
from tests.pipeline.network.worlds import WHERE, Deployment, deployment

LIMIT = 3
"""Replacement attempts of a request: the default of front ends."""
LENGTH = 10
"""Numbers that each answer counts up to, from the length of the prompt."""
Output = Annotated[LLMEngineOutput]


class Counting(AsyncEngine[PreprocessedRequest, Output]):
    """Counts from the length of the prompt up to LENGTH, a number each `step_s`; goes on with what it is given."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.requests = 0
        self.fails: PenstockError | None = None

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Output]:
        self.requests += 1
        return ResponseStream(self._count(request), request)

    async def _count(self, request: Context[PreprocessedRequest]) -> AsyncGenerator[Output, None]:
        for number in range(len(request.payload.token_ids), LENGTH):
            await anyio.sleep(self.step_s)
            if self.fails is not None:
                raise self.fails
            yield Annotated(LLMEngineOutput([number]))


@define(eq=False)
class Process:
    """A worker's process, which can be killed: it is announced for a lease more."""

    world: Deployment
    instance_id: int
    runtime: Runtime
    engine: Counting
    listener: MemoryListener | None = None
    """While its address refuses."""

    @property
    def plane(self) -> TcpRequestPlane:
        return cast(TcpRequestPlane, self.runtime.requests)

    def refuse(self) -> None:
        """Take no connections any more; those that are there stay."""
        if self.listener is None:
            self.listener = self.world.network.listeners.pop(Address.parse(self.plane.transport["tcp"]))

    def accept(self) -> None:
        """Take connections again."""
        if (listener := self.listener) is not None:
            self.world.network.listeners[listener.address] = listener
            self.listener = None

    def reset(self) -> None:
        """Reset the connections that are there."""
        for connection in list(self.plane._incoming):
            connection.abort()

    def kill(self) -> None:
        """Be gone without a word: its address refuses, its connections are reset, and its lease is left to lapse."""
        self.refuse()
        self.reset()
        for served in self.runtime.served.values():
            for lease in served.leases:
                lease.abandon()


@define(eq=False)
class Cluster:
    """Processes of workers, each with one instance, and those that are only announced."""

    world: Deployment
    tasks: TaskGroup
    numbers: Iterator[int] = field(factory=lambda: count(1))

    async def worker(self, step_s: float = 0.0, port: int = 0) -> Process:
        """Start a worker; at a port that is free."""
        process: Process = await self.tasks.start(self._run_worker, Counting(step_s), port)
        return process

    async def successor(self, killed: Process) -> Process:
        """Start the next worker where one was killed, which is announced still."""
        return await self.worker(killed.engine.step_s, Address.parse(killed.plane.transport["tcp"]).port)

    async def _run_worker(self, engine: Counting, port: int, *, task_status: TaskStatus[Process]) -> None:
        options = TcpOptions(has_unix_socket=False, port=port)
        async with self.world.runtime(options=options, graceful_timeout_s=0) as runtime:
            process = Process(self.world, next(self.numbers), runtime, engine)
            await runtime.serve(WHERE, engine, instance_id=process.instance_id)
            task_status.started(process)
            await anyio.sleep_forever()

    async def announce_dead(self, instances: int, address: str = "dead") -> list[int]:
        """Announce instances whose processes are gone; at an address of one's own for each."""
        ids = [next(self.numbers) for _ in range(instances)]
        for one in ids:
            transport = {"tcp": f"{address}:{one}"}
            instance = evolve(Instance.of(EndpointId.parse(WHERE), one), transport=transport)
            await Discovery(self.world.store).register(instance)
        return ids

    @asynccontextmanager
    async def front_end(self, router: str = "round_robin", seed: int = 3) -> AsyncIterator[FrontEnd]:
        """Start a front end. At its end it has no connection any more."""
        before = len(self.world.network.links)
        async with self.world.runtime() as runtime:
            workers = runtime.workers(WHERE, Output)
            push: PushRouter[Any, Any] = PushRouter(
                workers, None if router == "kv" else cast(Any, router), Random(seed)
            )
            with ExitStack() as stack:
                if router == "kv":
                    config = KvRouterConfig(use_kv_events=False)
                    kv = stack.enter_context(kv_router(workers, config, block_size_tokens=4, health=push.health))
                    graph = link(Migration(LIMIT), KvPushRouter(kv), push)
                else:
                    graph = link(Migration(LIMIT), push)
                yield FrontEnd(workers, push, graph)
            workers.close()
        await anyio.sleep(0.01)
        assert len(self.world.network.links) <= before


@define(eq=False)
class FrontEnd:
    """A graph over the workers."""

    workers: EndpointWorkers[Any, Any]
    push: PushRouter[Any, Any]
    graph: AsyncEngine[Any, Any]

    def is_connected(self, process: Process) -> bool:
        """Return whether the process is known, and connected to."""
        view = self.push.health.view
        return process.instance_id in view.ids and process.instance_id not in view.reach.unconnected

    async def ask(self) -> PenstockError | None:
        """Send a request, and return its error, None for an answer that is exact."""
        numbers = list[int]()
        try:
            async with await self.graph.generate(Context(PreprocessedRequest([0]))) as stream:
                async for item in stream:
                    numbers += item.ok().data.token_ids
        except PenstockError as error:
            return error
        assert numbers == list(range(1, LENGTH))
        return None

    async def ask_in_turn(self, requests: int, results: list[PenstockError | None]) -> None:
        """Send requests one after the other, and add what became of each."""
        for _ in range(requests):
            results.append(await self.ask())

    async def ask_many(self, requests: int) -> list[PenstockError | None]:
        """Send requests at the same time, and return what became of each."""
        results = list[PenstockError | None]()

        async def one() -> None:
            results.append(await self.ask())

        async with anyio.create_task_group() as tasks:
            for _ in range(requests):
                tasks.start_soon(one)
        return results


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with deployment() as world, anyio.create_task_group() as tasks:
        yield Cluster(world, tasks)
        tasks.cancel_scope.cancel()


ROUTERS = pytest.mark.parametrize("router", ["round_robin", "random", "least_loaded", "kv"])


@ROUTERS
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
async def test_a_front_end_that_starts_among_dead_instances_fails_no_request(router: str, delay_s: float) -> None:
    async with cluster() as processes:
        await processes.announce_dead(6)
        living = [await processes.worker() for _ in range(2)]
        await processes.announce_dead(6)
        processes.world.network.delay_s = delay_s
        for seed in range(10):
            async with processes.front_end(router, seed) as front_end:
                await front_end.workers.wait_for_instances(14)
                assert await front_end.ask() is None
        async with processes.front_end(router) as front_end:
            await front_end.workers.wait_for_instances(14)
            assert await front_end.ask_many(50) == [None] * 50
            await anyio.sleep(0.5)
            assert front_end.push.health.view.routable == tuple(sorted(each.instance_id for each in living))
            before = processes.world.network.dialled
            assert await front_end.ask_many(50) == [None] * 50
            assert processes.world.network.dialled == before


@ROUTERS
async def test_workers_that_are_killed_under_load_cost_a_request_no_more_than_the_one_it_was_at(router: str) -> None:
    async with cluster() as processes:
        results = list[PenstockError | None]()
        workers = [await processes.worker(step_s=0.1) for _ in range(8)]
        async with processes.front_end(router) as front_end, anyio.create_task_group() as tasks:
            await front_end.workers.wait_for_instances(8)

            for _ in range(16):
                tasks.start_soon(front_end.ask_in_turn, 10, results)
            await anyio.sleep(1.05)
            for each in workers[:6]:
                each.kill()
            async with processes.front_end(router) as restarted:
                await restarted.workers.wait_for_instances(8)
                assert await restarted.ask() is None
                assert await restarted.ask_many(20) == [None] * 20
        assert results == [None] * 160


@ROUTERS
async def test_workers_that_are_replaced_at_their_addresses_cost_a_request_no_more_than_that(router: str) -> None:
    """The killed ones are announced for a lease more, and what answers at their addresses does not serve them."""
    async with cluster() as processes:
        results, living = list[PenstockError | None](), list[Process]()
        workers = [await processes.worker(step_s=0.1) for _ in range(8)]
        async with processes.front_end(router) as front_end, anyio.create_task_group() as tasks:
            await front_end.workers.wait_for_instances(8)
            await anyio.sleep(1)

            for _ in range(16):
                tasks.start_soon(front_end.ask_in_turn, 10, results)
            await anyio.sleep(1.05)
            for each in workers[:6]:
                each.kill()
            living += [*workers[6:], *[await processes.successor(each) for each in workers[:6]]]
            await front_end.workers.wait_for_instances(14)
            await anyio.sleep(0.01)
            assert front_end.push.health.view.routable == tuple(sorted(each.instance_id for each in living))
            assert await front_end.ask_many(50) == [None] * 50
            async with processes.front_end(router) as restarted:
                await restarted.workers.wait_for_instances(14)
                assert await restarted.ask_many(50) == [None] * 50
                assert restarted.push.health.view.cooling_down == {}
        assert results == [None] * 160
        assert all(each.engine.requests for each in living)


async def test_a_request_tries_only_instances_that_may_be_there() -> None:
    """The instances of the processes that have refused are not tried, however few others there are."""
    async with cluster() as processes:
        await processes.announce_dead(5)
        async with processes.front_end() as front_end:
            await front_end.workers.wait_for_instances(5)
            await anyio.sleep(1)
            worker = await processes.worker()
            worker.refuse()
            await front_end.workers.wait_for_instances(6)
            worker.accept()
            assert await front_end.ask() is None


async def test_instances_that_do_not_answer_are_left_out() -> None:
    async with cluster() as processes:
        listener = await processes.world.network.listen(Address("silent", 1), RawPeer)
        for number in range(2, 7):
            processes.world.network.listeners[Address("silent", number)] = cast(MemoryListener, listener)
        await processes.announce_dead(6, "silent")
        worker = await processes.worker()
        async with processes.front_end() as front_end:
            await front_end.workers.wait_for_instances(7)
            await anyio.sleep(0.1)
            begun_s = anyio.current_time()
            assert await front_end.ask_many(30) == [None] * 30
            assert anyio.current_time() - begun_s < 0.1
            await anyio.sleep(30)
            assert await front_end.ask_many(30) == [None] * 30
            assert front_end.push.health.view.routable == (worker.instance_id,)


async def test_a_process_that_refuses_gets_requests_again_once_it_accepts() -> None:
    async with cluster() as processes:
        first, second = [await processes.worker() for _ in range(2)]
        async with processes.front_end() as front_end:
            await front_end.workers.wait_for_instances(2)
            await anyio.sleep(10)
            second.refuse()
            second.reset()
            await anyio.sleep(10)
            assert await front_end.ask_many(10) == [None] * 10
            assert second.engine.requests == 0
            incarnation = front_end.workers.incarnation(second.instance_id)
            second.accept()
            await anyio.sleep(6)
            assert await front_end.ask_many(10) == [None] * 10
            assert (first.engine.requests, second.engine.requests) == (15, 5)
            assert front_end.workers.incarnation(second.instance_id) == incarnation, "what is known of it holds"


@ROUTERS
async def test_where_no_process_can_be_reached_requests_fail_at_once_with_their_types(router: str) -> None:
    async with cluster() as processes:
        await processes.announce_dead(3)
        async with processes.front_end(router) as front_end:
            await front_end.workers.wait_for_instances(3)
            begun_s = anyio.current_time()
            for error in await front_end.ask_many(10):
                assert isinstance(error, (TransportError, Unavailable))
            await anyio.sleep(1)
            later = await front_end.ask()
            assert isinstance(later, Unavailable), "503"
            assert anyio.current_time() - begun_s < 1.5
            worker = await processes.worker()
            await front_end.workers.wait_for_instances(4)
            assert await front_end.ask() is None
            assert worker.engine.requests == 1


@ROUTERS
async def test_a_request_that_finds_no_process_has_the_only_one_tried_at_once(router: str) -> None:
    """After a long outage the next attempt would be up to 5 s away, and so would be the next answer."""
    async with cluster() as processes:
        worker = await processes.worker()
        async with processes.front_end(router) as front_end:
            await front_end.workers.wait_for_instances(1)
            assert await front_end.ask() is None
            worker.refuse()
            worker.reset()
            await anyio.sleep(58)
            worker.accept()
            refused = await front_end.ask()
            assert isinstance(refused, Unavailable)
            await anyio.sleep(0.01)
            assert await front_end.ask() is None
            worker.refuse()
            worker.reset()
            await anyio.sleep(58)
            before = processes.world.network.dialled
            for _ in range(20):
                assert all(isinstance(error, Unavailable) for error in await front_end.ask_many(10))
                await anyio.sleep(0.1)
            assert processes.world.network.dialled - before <= 5


async def test_the_refusal_of_a_pool_that_cannot_be_reached_names_the_reason() -> None:
    async with cluster() as processes:
        await processes.announce_dead(3)
        worker = await processes.worker()
        async with processes.front_end() as front_end:
            await front_end.workers.wait_for_instances(4)
            await anyio.sleep(1)
            assert front_end.push.refusal() is None
            worker.engine.fails = EngineShutdown("broken")
            assert await front_end.ask() is not None
            refusal = front_end.push.refusal()
            assert isinstance(refusal, AllCoolingDown)
            assert "3 of 4 cannot be reached, the others failed a moment ago" in str(refusal)
            assert refusal.retry_after_s == pytest.approx(5.0)
            worker.kill()
            await anyio.sleep(1)
            refusal = front_end.push.refusal()
            assert isinstance(refusal, AllCoolingDown)
            assert "none of the 4 can be reached" in str(refusal)
            assert refusal.retry_after_s == 1.0


@ROUTERS
async def test_resetting_all_connections_at_once_fails_no_request(router: str) -> None:
    async with cluster() as processes:
        results = list[PenstockError | None]()
        for _ in range(4):
            await processes.worker(step_s=0.1)
        async with processes.front_end(router) as front_end, anyio.create_task_group() as tasks:
            await front_end.workers.wait_for_instances(4)
            await anyio.sleep(10)

            for _ in range(8):
                tasks.start_soon(front_end.ask_in_turn, 20, results)
            processes.world.network.delay_s = 0.02
            for _ in range(3):
                await anyio.sleep(5.13)
                processes.world.network.cut()
        assert results == [None] * 160


async def test_a_fault_of_an_engine_still_has_its_worker_cool_down() -> None:
    async with cluster() as processes:
        first, second = [await processes.worker() for _ in range(2)]
        async with processes.front_end() as front_end:
            await front_end.workers.wait_for_instances(2)
            await anyio.sleep(1)
            first.engine.fails = EngineShutdown("broken")
            assert await front_end.ask_many(10) == [None] * 10
            assert front_end.push.health.view.routable == (second.instance_id,)
            processes.world.network.cut()
            await anyio.sleep(1)
            assert front_end.push.health.view.routable == (second.instance_id,), "a connection is no proof of an engine"
            await anyio.sleep(4.1)
            assert len(front_end.push.health.view.routable) == 2


async def test_an_instance_that_its_process_serves_no_more_cools_down() -> None:
    async with cluster() as processes:
        first, second = [await processes.worker() for _ in range(2)]
        async with processes.front_end() as front_end:
            await front_end.workers.wait_for_instances(2)
            await anyio.sleep(1)
            for serving in list(first.plane.serving.values()):
                serving.cut()
            assert await front_end.ask_many(10) == [None] * 10
            assert front_end.push.health.view.routable == (second.instance_id,)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.1, 0.15, 0.2, 1.0, 7.0])
async def test_a_pool_that_is_closed_leaves_no_attempt_behind(after_s: float) -> None:
    async with cluster() as processes:
        await processes.announce_dead(3)
        await processes.worker()
        network = processes.world.network
        network.delay_s = 0.05
        async with processes.world.runtime() as runtime:
            workers = runtime.workers(WHERE, Output)
            PushRouter(workers)
            await anyio.sleep(after_s)
            workers.close()
            await anyio.sleep(1)
            dialled = network.dialled
            await anyio.sleep(60)
            assert network.dialled == dialled
        assert network.links == []


async def test_a_pool_without_a_router_opens_no_connection() -> None:
    async with cluster() as processes:
        await processes.worker()
        async with processes.world.runtime() as runtime:
            await runtime.workers(WHERE, Output).wait_for_instances()
            await anyio.sleep(10)
            assert processes.world.network.dialled == 0


# -- any order of events


Step = tuple[Literal["start", "announce", "refuse", "accept", "reset", "kill", "replace", "cut all", "wait"], int]
STEPS = st.tuples(
    st.sampled_from(["start", "announce", "refuse", "accept", "reset", "kill", "replace", "cut all", "wait", "wait"]),
    st.integers(0, 7),
)


@given(st.lists(STEPS, max_size=25), st.sampled_from(["round_robin", "kv"]))
@settings(max_examples=settings().max_examples // 2)
async def test_whatever_comes_refuses_accepts_and_vanishes_a_request_finds_a_worker_that_is_there(
    steps: Sequence[Step], router: str
) -> None:
    """After each step a request succeeds if a process was connected before and accepts connections. At the end all are
    connected that accept, and these are routable. Requests that cannot succeed fail soon, with a type."""
    async with cluster() as processes:
        workers, replaced = list[Process](), list[Process]()
        async with processes.front_end(router) as front_end:
            for what, value in steps:
                steady = [each for each in workers if front_end.is_connected(each)]
                at_address = [each for each in workers if each not in replaced]
                chosen = at_address[value % len(at_address)] if at_address else None
                if what == "start" and len(workers) < 8:
                    workers.append(await processes.worker())
                elif what == "replace" and chosen is not None:
                    chosen.kill()
                    replaced.append(chosen)
                    workers.append(await processes.successor(chosen))
                elif what == "announce":
                    await processes.announce_dead(value % 3)
                elif what == "cut all":
                    processes.world.network.cut()
                elif what == "wait":
                    await anyio.sleep([0.001, 0.06, 0.3, 1.0, 2.0, 6.0, 11.0, 25.0][value])
                elif chosen is not None and what in ("refuse", "accept", "reset", "kill"):
                    getattr(chosen, what)()
                begun_s, result = anyio.current_time(), await front_end.ask()
                # The connection that breaks may be that of the request, which then goes on with another worker.
                needed = 2 if what in ("reset", "replace", "cut all") else 1
                present = front_end.workers.instance_ids()
                if sum(each.listener is None and each.instance_id in present for each in steady) >= needed:
                    assert result is None, (what, result)
                assert anyio.current_time() - begun_s < 1
            await anyio.sleep(20)
            for each in workers:
                is_there = each.instance_id in front_end.workers.instance_ids()
                assert front_end.is_connected(each) or each.listener is not None or not is_there
            connected = {each.instance_id for each in workers if front_end.is_connected(each)}
            assert set(front_end.push.health.view.routable) == connected
