"""The pool of workers that a router sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve

from pipeline import AsyncEngine, CannotConnect, Context, Unavailable
from pipeline.network import EndpointId, EndpointWorkers, Instance, Reach, Runtime, Workers, static_workers
from pipeline.network.discovery import Added, Removed
from pipeline.network.inprocess import InProcessRequestPlane
from pipeline.network.requests import Connectivity, KeptConnection
from pipeline.rx import Subject, ops
from tests.pipeline.network.worlds import WHERE, engine_of, record_changes, watchers


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


async def test_an_instance_that_comes_back_is_another_incarnation() -> None:
    async with Runtime.in_process() as runtime:
        workers = runtime.workers(WHERE)
        served = [await runtime.serve(WHERE, engine_of(), instance_id=instance_id) for instance_id in (2, 1)]
        incarnations = [workers.incarnation(instance_id) for instance_id in (1, 2, 3)]
        assert incarnations[2] == -1
        assert len(set(incarnations)) == 3
        await served[0].unpublish()
        assert workers.incarnation(2) == -1
        await served[0].publish()
        assert workers.incarnation(2) > max(incarnations)
        assert workers.incarnation(1) == incarnations[0]


async def test_an_instance_that_is_published_anew_is_the_same_incarnation() -> None:
    async with Runtime.in_process() as runtime:
        workers, where = runtime.workers(WHERE), EndpointId.parse(WHERE)
        await runtime.discovery.register(Instance.of(where, 7, device_type="cpu"))
        incarnation, ids = workers.incarnation(7), workers.instance_ids()
        assert workers.device_type(7) == "cpu"
        await runtime.discovery.register(Instance.of(where, 7, device_type="cuda"))
        assert (workers.incarnation(7), workers.device_type(7)) == (incarnation, "cuda")
        assert workers.instance_ids() is ids


async def test_a_pool_knows_the_device_types_of_its_instances() -> None:
    workers = static_workers({1: engine_of(), 2: engine_of()}, device_types={1: "cpu"})
    assert [workers.device_type(instance_id) for instance_id in (1, 2, 3)] == ["cpu", None, None]
    assert [workers.incarnation(instance_id) for instance_id in (1, 2, 3)] == [0, 1, -1]


async def test_an_endpoints_pool_is_a_pool() -> None:
    async with Runtime.in_process() as runtime:
        workers: Workers[str, int] = runtime.workers(WHERE)
        assert isinstance(workers, EndpointWorkers)
        assert workers.name == "dyn://ns.comp.ep"


async def test_an_error_of_one_subscriber_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_subscriber_that_completes_at_once_is_released() -> None:
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


# -- connections


class Connecting:
    """A plane whose connections are as the test has them, and which notes which are kept."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []

    def keep(self, instance: Instance, on_change: Callable[[], object]) -> KeptConnection:
        self.kept.append(_Kept(self, instance, on_change))
        return self.kept[-1]

    def become(self, instance_id: int, state: Connectivity, losses: int = 0) -> None:
        """Have the connection to an instance be in this state."""
        for one in self.kept:
            if one.instance.instance_id == instance_id:
                one.now, one.lost = state, losses
                one.on_change()


class _Kept(KeptConnection):
    def __init__(self, plane: Connecting, instance: Instance, on_change: Callable[[], object]) -> None:
        self.plane, self.instance, self.on_change = plane, instance, on_change
        self.now: Connectivity = "connecting"
        self.lost = self.retried = 0

    @property
    def state(self) -> Connectivity:
        return self.now

    @property
    def losses(self) -> int:
        return self.lost

    def retry(self) -> None:
        self.retried += 1

    def close(self) -> None:
        self.plane.kept.remove(self)


def connecting(*instance_ids: int) -> tuple[Connecting, Subject[Any], EndpointWorkers[Any, Any]]:
    plane, watch = Connecting(), Subject[Any]()
    workers = EndpointWorkers(EndpointId.parse(WHERE), watch, lambda _: engine_of(), plane.keep)
    for instance_id in instance_ids:
        watch.on_next(Added(one(instance_id)))
    return plane, watch, workers


def one(instance_id: int, address: str = "") -> Instance:
    return evolve(Instance.of(EndpointId.parse(WHERE), instance_id), transport={"tcp": address})


async def test_connections_are_kept_from_when_that_is_wanted_to_the_end_of_the_pool() -> None:
    plane, watch, workers = connecting(1, 2)
    assert (plane.kept, workers.reach()) == ([], Reach())
    workers.keep_connected(lambda: None)
    workers.keep_connected(lambda: None)
    watch.on_next(Added(one(3)))
    assert [each.instance.instance_id for each in plane.kept] == [1, 2, 3]
    assert workers.reach() == Reach(frozenset({1, 2, 3}))
    watch.on_next(Removed(one(2)))
    assert [each.instance.instance_id for each in plane.kept] == [1, 3]
    assert workers.reach() == Reach(frozenset({1, 3}))
    workers.close()
    assert (plane.kept, workers.reach()) == ([], Reach())
    workers.keep_connected(lambda: None)
    assert plane.kept == []


async def test_changes_of_connections_are_seen_and_change_no_members() -> None:
    plane, _, workers = connecting(1, 2)
    seen, changes = list[Reach](), list[Any]()
    workers.keep_connected(lambda: seen.append(workers.reach()))
    workers.changes().subscribe(changes.append)
    plane.become(1, "connected")
    plane.become(2, "unreachable")
    plane.become(2, "unreachable")
    plane.become(1, "connecting", losses=1)
    both, two = frozenset({1, 2}), frozenset({2})
    assert seen == [Reach(two), Reach(two, two), Reach(both, two)]
    assert [workers.losses(i) for i in (1, 2, 3)] == [1, 0, 0]
    assert changes == [(1, 2)]


async def test_what_cannot_be_reached_is_tried_again_twice_a_second_however_many_requests_come() -> None:
    plane, watch, workers = connecting(1, 2, 3)
    workers.retry_unreachable()
    workers.keep_connected(lambda: None)
    plane.become(1, "connected")
    plane.become(2, "unreachable")
    await anyio.sleep(1)
    for _ in range(100):
        workers.retry_unreachable()
        await anyio.sleep(0.0125)
    assert [each.retried for each in plane.kept] == [0, 3, 0]
    watch.on_next(Removed(one(2)))
    await anyio.sleep(1)
    workers.retry_unreachable()


async def test_an_instance_that_is_published_again_is_connected_to_where_it_is_now() -> None:
    plane, watch, workers = connecting(1)
    seen = list[Reach]()
    workers.keep_connected(lambda: seen.append(workers.reach()))
    plane.become(1, "unreachable")
    watch.on_next(Added(one(1, "elsewhere:1")))
    assert [each.instance.transport for each in plane.kept] == [{"tcp": "elsewhere:1"}]
    assert seen[-1] == Reach(frozenset({1}))
    assert workers.incarnation(1) == 0


async def test_in_one_process_every_instance_is_reached() -> None:
    async with Runtime.in_process() as runtime:
        await runtime.serve(WHERE, engine_of(), instance_id=1)
        workers = runtime.workers(WHERE)
        workers.keep_connected(lambda: None)
        await runtime.serve(WHERE, engine_of(), instance_id=2)
        assert (workers.reach(), workers.losses(1)) == (Reach(), 0)
