"""The pool a router sees, and the runtime that fills it."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import AsyncEngine, CannotConnect, Context, Disconnected, InvalidArgument, StreamClosed, Unavailable
from pipeline.network import EndpointId, EndpointWorkers, Instance, Runtime, Scope, Workers, static_workers
from pipeline.network.discovery import Added, Removed
from pipeline.network.inprocess import InProcessEventPlane, InProcessRequestPlane, InProcessStore
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.rx import AnyIOScheduler, Subject, ops
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, Wait

pytestmark = pytest.mark.anyio

WHERE = "ns/comp/ep"


def engine_of(*items: Any) -> AsyncEngine[Any, Any]:
    return ScriptedEngine(items)


def card(name: str) -> ModelDeploymentCard:
    return ModelDeploymentCard.named(name, kv_cache_block_size=16)


def watchers(runtime: Runtime) -> int:
    assert isinstance(runtime._store, InProcessStore)
    return runtime._store.watchers


def record_changes(workers: Workers[Any, Any]) -> tuple[list[Any], Any]:
    received: list[Any] = []
    return received, workers.changes().subscribe(received.append, on_completed=lambda: received.append("completed"))


async def test_a_pool_follows_what_is_served() -> None:
    """A new instance is there at once."""
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        received, _ = record_changes(workers)
        second = await runtime.serve(WHERE, engine_of("b"), instance_id=2)
        await runtime.serve(WHERE, engine_of("a"), instance_id=1)
        await runtime.serve("ns/comp/other", engine_of("c"), instance_id=3)
        assert workers.instance_ids() == (1, 2)
        assert await (await workers.engine(2).generate(Context(None))).collect() == ["b"]
        await second.close()
        assert workers.instance_ids() == (1,)
        with pytest.raises(CannotConnect, match="instance_id=2"):
            await workers.engine(2).generate(Context(None))
    assert received == [(), (2,), (1, 2), (1,), (), "completed"]


async def test_a_late_pool_begins_with_what_is_there() -> None:
    async with Runtime.in_process() as runtime:
        for instance_id in (3, 1, 2):
            await runtime.serve(WHERE, engine_of(), instance_id=instance_id)
        received, _ = record_changes(runtime.workers(WHERE))
        assert received == [(1, 2, 3)]


async def test_an_aborted_instance_vanishes() -> None:
    async with Runtime.in_process() as runtime:
        served = await runtime.serve(WHERE, engine_of())
        workers = runtime.workers(WHERE)
        served.abort()
        await anyio.sleep(0.1)
        assert workers.instance_ids() == ()
        assert watchers(runtime) == 1


async def test_aborting_after_the_runtime_is_left_does_nothing() -> None:
    async with Runtime.in_process() as runtime:
        served = await runtime.serve(WHERE, engine_of())
    served.abort()


async def test_an_instance_that_falls_silent_lapses() -> None:
    async with Runtime.in_process(lease_ttl_s=10) as runtime:
        served = await runtime.serve(WHERE, engine_of())
        workers = runtime.workers(WHERE)
        await anyio.sleep(100)
        assert len(workers.instance_ids()) == 1
        served.cut()
        for lease in served.leases:
            lease.abandon()
        await anyio.sleep(9)
        assert len(workers.instance_ids()) == 1
        await anyio.sleep(2)
        assert workers.instance_ids() == ()


async def test_a_closed_pool_still_serves_its_watchers() -> None:
    """And is released with the last of them."""
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        received, watching = record_changes(workers)
        workers.close()
        await runtime.serve(WHERE, engine_of(), instance_id=1)
        assert received == [(), (1,)]
        assert watchers(runtime) == 1
        watching.dispose()
        assert watchers(runtime) == 0
        assert workers.instance_ids() == ()
        assert record_changes(workers)[0] == ["completed"]


async def test_closing_a_pool_releases_its_watch() -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        record_changes(workers)[1].dispose()
        assert watchers(runtime) == 1
        workers.close()
        workers.close()
        assert watchers(runtime) == 0


async def test_waiting_ends_with_enough_instances() -> None:
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        workers = runtime.workers(WHERE)

        async def serve() -> None:
            for instance_id in (1, 2):
                await anyio.sleep(5)
                await runtime.serve(WHERE, engine_of(), instance_id=instance_id)

        tasks.start_soon(serve)
        start = anyio.current_time()
        assert await workers.wait_for_instances() == (1,)
        assert await workers.wait_for_instances(2) == (1, 2)
        assert anyio.current_time() - start == pytest.approx(10)


async def test_waiting_ends_when_the_pool_does() -> None:
    async def wait(workers: Workers[Any, Any]) -> None:
        with pytest.raises(Unavailable, match="closed before"):
            await workers.wait_for_instances()

    async with anyio.create_task_group() as tasks, Runtime.in_process() as runtime:
        tasks.start_soon(wait, runtime.workers(WHERE))
        await checkpoint()


async def test_closing_a_pool_ends_the_wait_for_it() -> None:
    async def wait(workers: Workers[Any, Any]) -> None:
        with pytest.raises(Unavailable, match="closed before"):
            await workers.wait_for_instances()

    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait, workers)
                await anyio.sleep(1)
                workers.close()
                assert watchers(runtime) == 0


async def test_waiting_goes_on_when_an_instance_has_left_before_the_waiters_turn() -> None:
    """The pool is as open as before: that is not the end of it."""
    where, got = EndpointId.parse(WHERE), list[Any]()
    watch = Subject[Added[Instance] | Removed[Instance]]()
    workers: EndpointWorkers[Any, Any] = EndpointWorkers(where, watch, lambda _: engine_of())

    async def wait() -> None:
        got.append(await workers.wait_for_instances())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(1)
        for happens in (Added, Removed):
            watch.on_next(happens(Instance.of(where, 1)))
        await anyio.sleep(1)
        assert got == []
        watch.on_next(Added(Instance.of(where, 2)))
    assert got == [(2,)]
    workers.close()
    assert not watch.observers


async def test_a_cancelled_wait_releases_its_watch() -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        with anyio.move_on_after(1):
            await workers.wait_for_instances()
        workers.close()
        assert watchers(runtime) == 0


async def test_a_static_pool_never_changes() -> None:
    workers: Workers[Any, Any] = static_workers({2: engine_of("b"), 1: engine_of("a")}, name="pool")
    assert workers.name == "pool"
    assert workers.instance_ids() == (1, 2) == await workers.wait_for_instances(2)
    assert record_changes(workers)[0] == [(1, 2)]
    assert await (await workers.engine(1).generate(Context(None))).collect() == ["a"]
    with pytest.raises(CannotConnect, match="instance_id=3 not found for endpoint pool"):
        await workers.engine(3).generate(Context(None))


async def test_an_empty_pool_has_the_reason() -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        assert workers.absence() == "none_yet"
        served = await runtime.serve(WHERE, engine_of())
        assert workers.absence() is None
        await served.close()
        assert workers.absence() == "all_left"
        workers.close()
        assert workers.absence() == "closed"
    assert static_workers({}).absence() == "none_yet"
    assert static_workers({1: engine_of()}).absence() is None


async def test_one_that_comes_back_is_another_arrival() -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        served = [await runtime.serve(WHERE, engine_of(), instance_id=instance_id) for instance_id in (2, 1)]
        arrivals = [workers.arrival(instance_id) for instance_id in (1, 2, 3)]
        assert arrivals[2] == -1
        assert len(set(arrivals)) == 3
        await served[0].unpublish()
        assert workers.arrival(2) == -1
        await served[0].publish()
        assert workers.arrival(2) > max(arrivals)
        assert workers.arrival(1) == arrivals[0]


async def test_one_that_is_published_anew_is_the_same_arrival() -> None:
    async with Runtime.in_process() as runtime:
        workers, where = runtime.workers(WHERE), EndpointId.parse(WHERE)
        await runtime.discovery.register(Instance.of(where, 7, device_type="cpu"))
        arrival, ids = workers.arrival(7), workers.instance_ids()
        assert workers.device_type(7) == "cpu"
        await runtime.discovery.register(Instance.of(where, 7, device_type="cuda"))
        assert (workers.arrival(7), workers.device_type(7)) == (arrival, "cuda")
        assert workers.instance_ids() is ids


async def test_a_pool_knows_what_its_instances_compute_on() -> None:
    workers = static_workers({1: engine_of(), 2: engine_of()}, device_types={1: "cpu"})
    assert [workers.device_type(instance_id) for instance_id in (1, 2, 3)] == ["cpu", None, None]
    assert [workers.arrival(instance_id) for instance_id in (1, 2, 3)] == [0, 1, -1]


async def test_an_endpoints_pool_is_a_pool() -> None:
    async with Runtime.in_process() as runtime:
        workers: Workers[str, int] = runtime.workers(WHERE)
        assert isinstance(workers, EndpointWorkers)
        assert workers.name == "dyn://ns.comp.ep"


async def test_a_listeners_error_keeps_no_other_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)

        def fail(ids: Any) -> None:
            if ids:
                raise LookupError("broken")

        workers.changes().subscribe(fail)
        received, _ = record_changes(workers)
        for instance_id in (1, 2):
            await runtime.serve(WHERE, engine_of(), instance_id=instance_id)
        assert received == [(), (1,), (1, 2)]
        assert "a listener failed" in caplog.text


async def test_a_listener_that_has_enough_at_once_is_released() -> None:
    async with Runtime.in_process() as runtime:
        workers, received = runtime.workers(WHERE), list[Any]()
        workers.changes().pipe(ops.take(1)).subscribe(received.append)
        runtime.discovery.watch().subscribe(received.append).dispose()
        workers.close()
        assert received == [()]
        assert watchers(runtime) == 0


async def test_the_request_plane_is_given_the_type_of_items() -> None:
    class Noting(InProcessRequestPlane):
        item_types: ClassVar[list[Any]] = []

        def engine(self, instance: Instance, item_type: Any) -> AsyncEngine[Any, Any]:
            self.item_types.append(item_type)
            return super().engine(instance, item_type)

    runtime = Runtime.in_process()
    runtime.requests = Noting()
    async with runtime:
        typed: Workers[str, int] = runtime.workers(WHERE, int)
        untyped = runtime.workers(WHERE)
        await runtime.serve(WHERE, engine_of(1), instance_id=1)
        assert Noting.item_types == [int, Any]
        for workers in (typed, untyped):
            assert await (await workers.engine(1).generate(Context(""))).collect() == [1]


# -- the runtime


async def test_an_engine_is_served_inside_the_runtimes_block_only() -> None:
    runtime = Runtime.in_process()
    with pytest.raises(StreamClosed, match="not open"):
        await runtime.serve(WHERE, engine_of())
    async with runtime:
        pass
    with pytest.raises(StreamClosed, match="not open"):
        await runtime.serve(WHERE, engine_of())
    assert not runtime.served
    with pytest.raises(StreamClosed, match="was left"):
        await runtime.__aenter__()


async def test_names_that_cannot_be_have_no_workers() -> None:
    async with Runtime.in_process() as runtime:
        with pytest.raises(InvalidArgument):
            runtime.workers("NameSpace/comp/ep")


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_what_takes_no_requests_is_not_published_again(how: str) -> None:
    async with Runtime.in_process() as runtime:
        served = await runtime.serve(WHERE, engine_of())
        if how == "close":
            await served.close()
        else:
            served.abort()
            await anyio.sleep(0.1)
        with pytest.raises(Unavailable):
            await served.publish()
        assert await runtime.discovery.instances() == []


async def test_an_instance_served_anew_outlives_its_predecessor(open_streams: OpenStreams) -> None:
    async with Runtime.in_process() as runtime, anyio.create_task_group() as tasks:
        first = await runtime.serve(WHERE, engine_of(1, Wait(5), 2), instance_id=1)
        workers = runtime.workers(WHERE)
        stream = await workers.engine(1).generate(Context(None))
        tasks.start_soon(first.close, 100)
        await anyio.sleep(1)
        second = await runtime.serve(WHERE, engine_of("new"), instance_id=1)
        assert await stream.collect() == [1, 2]
        await anyio.sleep(1)
        assert list(runtime.served.values()) == [second]
        assert workers.instance_ids() == (1,)
        assert await (await workers.engine(1).generate(Context(None))).collect() == ["new"]


async def test_an_instance_is_invisible_before_it_refuses() -> None:
    """A caller that sees it may call it."""
    async with Runtime.in_process() as runtime:
        plane = runtime.requests
        assert isinstance(plane, InProcessRequestPlane)
        served = await runtime.serve(WHERE, engine_of("x"))
        seen: list[tuple[int, int]] = []
        runtime.workers(WHERE).changes().subscribe(lambda ids: seen.append((len(ids), len(plane.serving))))
        await served.close()
        assert seen == [(1, 1), (0, 1)]
        assert not plane.serving


class Failing(InProcessStore):
    async def delete(self, key: str) -> None:
        raise Unavailable("no server")


async def test_leaving_is_orderly_though_discovery_fails(
    open_streams: OpenStreams, caplog: pytest.LogCaptureFixture
) -> None:
    rng, scheduler = Random(3), AnyIOScheduler()
    runtime = Runtime(
        Failing(scheduler, 10), InProcessRequestPlane(), InProcessEventPlane(lambda: 0, rng), scheduler, rng=rng
    )
    async with anyio.create_task_group() as tasks:
        answers: list[Any] = []
        async with runtime:
            for instance_id in (1, 2):
                await runtime.serve(WHERE, engine_of(1, Wait(3), 2), card=card("a"), instance_id=instance_id)
            stream = await runtime.workers(WHERE).engine(2).generate(Context(None))

            async def read() -> None:
                answers.extend(await stream.collect())

            tasks.start_soon(read)
        assert answers == [1, 2]
    assert not runtime.served
    assert caplog.text.count("could not be unpublished") == 2


async def test_runtimes_do_not_see_each_other() -> None:
    async with Runtime.in_process() as here, Runtime.in_process() as there:
        await here.serve(WHERE, engine_of(), instance_id=1)
        assert there.workers(WHERE).instance_ids() == ()
        with pytest.raises(CannotConnect):
            await there.workers(WHERE).engine(1).generate(Context(None))


async def test_instances_of_a_process_share_its_id_and_those_of_an_endpoint_do_not() -> None:
    async with Runtime.in_process(rng=Random(3)) as runtime:
        first = await runtime.serve(WHERE, engine_of())
        second = await runtime.serve(WHERE, engine_of())
        other = await runtime.serve("ns/comp/other", engine_of())
        assert first.instance_id == other.instance_id == runtime.instance_id
        assert second.instance_id != first.instance_id


class Repeating(Random):
    """Draws each number three times over."""

    drawn = 0

    def randint(self, a: int, b: int) -> int:
        self.drawn += 1
        return a + (self.drawn - 1) // 3


async def test_a_new_id_is_unique_whatever_is_drawn() -> None:
    async with Runtime.in_process(rng=Repeating()) as runtime:
        await runtime.serve(WHERE, engine_of(), instance_id=3)
        drawn = [runtime.new_instance_id() for _ in range(3)]
        assert (runtime.instance_id, drawn) == (1, [2, 4, 5])
        assert [(await runtime.serve(WHERE, engine_of())).instance_id for _ in range(2)] == [1, 6]


async def test_a_taken_id_is_refused_and_changes_nothing() -> None:
    async with Runtime.in_process() as runtime:
        first = await runtime.serve(WHERE, engine_of("first"), instance_id=1)
        with pytest.raises(InvalidArgument, match="served already"):
            await runtime.serve(WHERE, engine_of("second"), instance_id=1)
        workers = runtime.workers(WHERE)
        assert await (await workers.engine(1).generate(Context(None))).collect() == ["first"]
        await first.close()
        await runtime.serve(WHERE, engine_of("third"), instance_id=1)
        assert await (await workers.engine(1).generate(Context(None))).collect() == ["third"]


async def test_names_are_checked_before_anything_is_served() -> None:
    async with Runtime.in_process() as runtime:
        with pytest.raises(InvalidArgument):
            await runtime.serve("NameSpace/comp/ep", engine_of())
        for instance_id in (-1, 2**64):
            with pytest.raises(InvalidArgument, match="64 bits"):
                await runtime.serve(WHERE, engine_of(), instance_id=instance_id)
        assert not runtime.served


async def test_an_instance_whose_card_is_refused_is_not_served() -> None:
    async with Runtime.in_process() as runtime:
        await runtime.serve(WHERE, engine_of(), card=card("model-a"), instance_id=1)
        with pytest.raises(InvalidArgument, match="model-a"):
            await runtime.serve(WHERE, engine_of(), card=card("model-b"), instance_id=2)
        workers = runtime.workers(WHERE)
        assert workers.instance_ids() == (1,)
        with pytest.raises(CannotConnect):
            await workers.engine(2).generate(Context(None))
        assert [model.card.display_name for model in await runtime.discovery.models()] == ["model-a"]


async def test_a_card_comes_and_goes_with_its_instance() -> None:
    async with Runtime.in_process() as runtime:
        served = await runtime.serve(WHERE, engine_of(), card=card("model-a"))
        assert len(await runtime.discovery.models()) == 1
        await served.unpublish()
        assert not [*await runtime.discovery.models(), *await runtime.discovery.instances()]
        await served.publish()
        await served.publish()
        assert len(await runtime.discovery.models()) == 1
        await served.close()
        assert not [*await runtime.discovery.models(), *await runtime.discovery.instances()]


async def test_an_unpublished_instance_still_answers_callers_that_know_it() -> None:
    async with Runtime.in_process() as runtime:
        served = await runtime.serve(WHERE, engine_of("x"), instance_id=1)
        called = runtime.workers(WHERE).engine(1)
        await served.unpublish()
        assert await (await called.generate(Context(None))).collect() == ["x"]


async def test_leaving_waits_for_what_runs(open_streams: OpenStreams) -> None:
    async with anyio.create_task_group() as tasks:
        answers: list[Any] = []
        async with Runtime.in_process(graceful_timeout_s=100) as runtime:
            await runtime.serve(WHERE, engine_of(1, Wait(30), 2), instance_id=1)
            stream = await runtime.workers(WHERE).engine(1).generate(Context(None))

            async def read() -> None:
                answers.extend(await stream.collect())

            tasks.start_soon(read)
        assert answers == [1, 2]
        assert anyio.current_time() < 60


@pytest.mark.parametrize(("fails", "waits_s"), [(False, 20), (True, 0)])
async def test_leaving_cuts_what_outlasts_the_bound(fails: bool, waits_s: float, open_streams: OpenStreams) -> None:
    local, start = ScriptedEngine([1, Stall()]), anyio.current_time()
    runtime = Runtime.in_process(graceful_timeout_s=20)
    await runtime.__aenter__()
    await runtime.serve(WHERE, local, instance_id=1)
    stream = await runtime.workers(WHERE).engine(1).generate(Context(None))
    await stream.__anext__()
    await runtime.__aexit__(*((LookupError, LookupError(), None) if fails else (None, None, None)))
    assert anyio.current_time() - start == pytest.approx(waits_s)
    with pytest.raises(Disconnected):
        await stream.__anext__()
    assert local.open == 0


async def test_nothing_is_open_after_leaving() -> None:
    tasks_before = {task.id for task in anyio.get_running_tasks()}
    async with Runtime.in_process() as runtime:
        await runtime.serve(WHERE, engine_of(), card=card("a"))
        received, _ = record_changes(runtime.workers(WHERE))
        runtime.events.subscribe(Scope("ns"), "t", str).subscribe(received.append)
    assert watchers(runtime) == 0
    assert isinstance(runtime.events, InProcessEventPlane)
    assert runtime.events.subscriptions == 0
    assert not runtime.served
    assert {task.id for task in anyio.get_running_tasks()} == tasks_before


async def test_a_cancelled_block_leaves_nothing_open(open_streams: OpenStreams) -> None:
    local, runtime = ScriptedEngine([1, Stall()]), Runtime.in_process()
    with anyio.move_on_after(5):
        async with runtime:
            await runtime.serve(WHERE, local, instance_id=1)
            async with await runtime.workers(WHERE).engine(1).generate(Context(None)) as stream:
                async for _ in stream:
                    pass
    assert local.open == 0
    assert not runtime.served
    assert await runtime.discovery.instances() == []


async def test_events_are_dated_with_the_given_clock_else_the_loops() -> None:
    async with Runtime.in_process(wall_ms=lambda: 42) as dated, Runtime.in_process() as undated:
        await anyio.sleep(3)
        stamps: list[int] = []
        for runtime in (dated, undated):
            runtime.events.subscribe(Scope("ns"), "t", str).subscribe(lambda e: stamps.append(e.published_at_ms))
            runtime.events.publisher(Scope("ns"), "t").publish("x")
        assert stamps == [42, round(anyio.current_time() * 1000)]
