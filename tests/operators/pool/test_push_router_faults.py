"""What faults of instances do: they are left out for a time of their own, and nothing counts that has ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from random import Random
from typing import Any

import anyio
import pytest

from operators import AllBusy, AllCoolingDown, PushRouter
from operators.pool import PoolView
from operators.pool.push_router import RouterMode
from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    InvalidArgument,
    PenstockError,
    ResponseStream,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
    WorkerOverloaded,
)
from pipeline.errors import BackendUnknown, StreamBusy
from pipeline.network import Runtime
from pipeline.protocols import PreprocessedRequest, RoutingHints
from pipeline.rx import AnyIOScheduler, BehaviorSubject, ops
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait

from .worlds import NAME, PICKING_MODES, answerer, answering, assigned, in_flight, lowest, meet, pool, send_to

FAULTS: list[PenstockError] = [
    CannotConnect("a fault"),
    Disconnected("a fault"),
    ResponseTimeout("a fault"),
    StreamIncomplete("a fault"),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: error.type_name)
@pytest.mark.parametrize("where", ["dispatch", "read", "item"])
@pytest.mark.parametrize("mode", PICKING_MODES)
async def test_a_faulty_instance_is_left_out_until_its_own_time_is_over(
    mode: RouterMode, where: str, error: PenstockError
) -> None:
    """The reader gets the fault as it is."""
    steps: dict[str, list[Any]] = {"dispatch": [], "read": [1, Fail(error)], "item": [Annotated[Any].from_error(error)]}
    faulty = ScriptedEngine(steps[where], fails=error if where == "dispatch" else None)
    engine = PushRouter(pool({1: faulty, **answering(2)}), mode, Random(1), cooldown_s=5)
    await meet(engine, 1, error)
    assert list(engine.health.view.routable) == [2]
    assert [await answerer(engine) for _ in range(4)] == [2] * 4
    await anyio.sleep(4.999)
    assert list(engine.health.view.routable) == [2]
    await anyio.sleep(0.001)
    assert list(engine.health.view.routable) == [1, 2]
    assert in_flight(engine) == 0


async def test_when_the_reader_learns_of_a_fault_the_instance_is_out_and_nothing_counts_any_more() -> None:
    error = Disconnected("lost")
    for steps in ([Annotated[Any].from_error(error)], [Fail(error)]):
        engine = PushRouter(pool({1: ScriptedEngine(steps), **answering(2)}))
        async with await send_to(engine, 1) as stream:
            assert in_flight(engine) == 1
            with suppress(Disconnected):
                assert (await anext(stream)).error is error
            assert (in_flight(engine), list(engine.health.view.routable)) == (0, [2])


@pytest.mark.parametrize("error", [BackendUnknown("the model's own"), InvalidArgument("wrong"), Unavailable("full")])
async def test_an_error_of_no_worker_excludes_none(error: PenstockError) -> None:
    """Neither does a cancellation, which is of this kind."""
    engine = PushRouter(pool({1: ScriptedEngine([Fail(error)])}))
    await meet(engine, 1, error)
    assert list(engine.health.view.routable) == [1]


def routable_in(view: PoolView) -> tuple[int, ...]:
    return view.routable


async def test_each_instance_is_back_at_its_own_time() -> None:
    error = Disconnected("lost")
    faulty = {i: ScriptedEngine([Fail(error)]) for i in (1, 2)}
    async with AnyIOScheduler() as scheduler:
        engine = PushRouter(pool({**faulty, **answering(3)}), cooldown_s=5)
        seen: list[tuple[float, tuple[int, ...]]] = []
        await anyio.sleep(0.1234563)  # a time that rounds down to microseconds
        start_s = anyio.current_time()
        routable = engine.health.changes(scheduler).pipe(ops.map(routable_in))
        routable.pipe(ops.distinct_until_changed()).subscribe(
            lambda ids: seen.append((round(anyio.current_time() - start_s, 3), ids))
        )
        await meet(engine, 1, error)
        await anyio.sleep(2)
        await meet(engine, 2, error)
        await anyio.sleep(1)
        await meet(engine, 2, error)  # which begins its time anew
        await anyio.sleep(10)
    assert seen == [(0, (1, 2, 3)), (0, (2, 3)), (2, (3,)), (5, (1, 3)), (8, (1, 2, 3))]


async def test_a_listener_that_fails_when_an_instance_is_back_breaks_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error, received = Disconnected("lost"), list[tuple[int, ...]]()

    def receive(ids: tuple[int, ...]) -> None:
        received.append(ids)
        if len(received) == 3:
            raise LookupError("broken")

    async with AnyIOScheduler() as scheduler:
        engine = PushRouter(pool({1: ScriptedEngine([Fail(error)]), **answering(2)}), cooldown_s=5)
        engine.health.changes(scheduler).pipe(ops.map(routable_in)).subscribe(receive)
        for _ in range(2):
            await meet(engine, 1, error)
            await anyio.sleep(6)
    assert received == [(1, 2), (2,), (1, 2), (2,), (1, 2)]
    assert "a subscriber failed" in caplog.text


async def test_with_a_cooldown_of_zero_no_worker_is_left_out() -> None:
    error = Disconnected("lost")
    engine = PushRouter(pool({1: ScriptedEngine([Fail(error)]), **answering(2, 3)}), cooldown_s=0)
    await meet(engine, 1, error)
    assert list(engine.health.view.routable) == [1, 2, 3]


async def test_all_left_out_is_an_error_of_its_own_with_the_time_to_retry() -> None:
    error = Disconnected("lost")
    engine = PushRouter(pool({i: ScriptedEngine([Fail(error)]) for i in (1, 2)}), cooldown_s=5)
    await meet(engine, 1, error)
    await anyio.sleep(1)
    await meet(engine, 2, error)
    with pytest.raises(AllCoolingDown, match=f"{NAME}.*all 2 failed") as caught:
        await engine.generate(Context(None))
    assert isinstance(caught.value, Unavailable)
    assert caught.value.retry_after_s == pytest.approx(4)


async def test_an_instance_that_has_left_does_not_set_the_time_to_retry() -> None:
    error = Disconnected("lost")
    async with Runtime.in_process() as runtime:
        engine: PushRouter[Any, Any] = PushRouter(runtime.workers(NAME), cooldown_s=5)
        served = [await runtime.serve(NAME, ScriptedEngine([Fail(error)]), instance_id=i) for i in (1, 2)]
        await meet(engine, 1, error)
        await anyio.sleep(2)
        await meet(engine, 2, error)
        await served[0].close()
        refusal = engine.refusal()
        assert isinstance(refusal, AllCoolingDown)
        assert refusal.retry_after_s == pytest.approx(5)


async def test_workers_that_another_judges_busy_give_no_time_to_retry() -> None:
    """Nor is it known of one that is left out anyway."""
    error, busy = Disconnected("lost"), BehaviorSubject[AbstractSet[int]](frozenset())
    scripts = iter([WorkerOverloaded("no room"), error])
    engine = PushRouter(pool({1: ScriptedEngine(lambda _: [Fail(next(scripts))]), **answering(2)}), busy=busy)
    at_once = [await send_to(engine, 1) for _ in range(2)]
    for stream in at_once:
        with pytest.raises(PenstockError):
            await stream.collect()
    busy.on_next({2})
    refusal = engine.refusal()
    assert isinstance(refusal, AllBusy)
    assert refusal.retry_after_s is None


async def test_some_left_out_and_the_others_busy_is_busy() -> None:
    error = Disconnected("lost")
    engine = PushRouter(
        pool({1: ScriptedEngine([Fail(error)]), **answering(2)}), busy=BehaviorSubject[AbstractSet[int]]({2})
    )
    await meet(engine, 1, error)
    with pytest.raises(AllBusy, match=r"1 of endpoint.*1 more failed"):
        await engine.generate(Context(None))


async def test_an_instance_that_cools_down_still_gets_the_requests_that_name_it() -> None:
    error = Disconnected("lost")
    engine = PushRouter(pool({1: ScriptedEngine([Fail(error)]), **answering(2)}), "direct")
    await meet(engine, 1, error)
    named = Context(PreprocessedRequest([1], routing=RoutingHints(backend_instance_id=1)))
    with pytest.raises(Disconnected):
        await (await engine.generate(named)).collect()
    assert list(engine.health.view.routable) == [2]
    with pytest.raises(Disconnected):
        await (await engine.generate(assigned(1))).collect()
    with pytest.raises(CannotConnect, match="instance_id=9 not found"):
        await engine.generate(assigned(9))


async def test_an_instance_that_has_come_back_is_not_held_to_its_faults() -> None:
    error = Disconnected("lost")
    async with Runtime.in_process() as runtime:
        engine: PushRouter[Any, Any] = PushRouter(runtime.workers(NAME))
        served = await runtime.serve(NAME, ScriptedEngine([Wait(1), Fail(error)]), instance_id=1)
        old = await send_to(engine, 1)
        await meet(engine, 1, error)
        assert list(engine.health.view.routable) == []
        await served.unpublish()
        await served.publish()
        assert list(engine.health.view.routable) == [1]
        with pytest.raises(Disconnected):
            await anext(old)  # of the time before
        await old.aclose()
        assert list(engine.health.view.routable) == [1]
        assert in_flight(engine) == 0


@pytest.mark.parametrize("ending", ["cancelled", "raises", "stopped"])
async def test_nothing_is_in_flight_when_an_instance_gives_no_stream(ending: str) -> None:
    """Also a foreign exception and a cancellation while the request is sent, which count against no worker."""

    class Slow(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            await anyio.sleep(3)
            raise LookupError("foreign") if ending == "raises" else Cancelled("stopped")

    engine = PushRouter(pool({1: Slow()}))
    counted: list[int] = []
    async with anyio.create_task_group() as tasks:

        async def ask_it() -> None:
            with anyio.move_on_after(2 if ending == "cancelled" else None), suppress(LookupError, Cancelled):
                await engine.generate(Context(None))

        tasks.start_soon(ask_it)
        await anyio.sleep(1)
        counted.append(in_flight(engine))
    assert (*counted, in_flight(engine), list(engine.health.view.routable)) == (1, 0, [1])


async def test_a_second_reader_and_a_close_during_a_read_leave_the_first_one_counted() -> None:
    engine = PushRouter(pool({1: ScriptedEngine([1, Wait(2), 2])}))
    async with await engine.generate(Context(None)) as stream, anyio.create_task_group() as tasks:
        got: list[Any] = []

        async def read() -> None:
            got.extend([item async for item in stream])

        tasks.start_soon(read)
        await anyio.sleep(1)
        with pytest.raises(RuntimeError):
            await anext(stream)
        with pytest.raises(StreamBusy):
            await stream.aclose()
        assert in_flight(engine) == 1
        await anyio.sleep(2)
        assert (got, in_flight(engine)) == ([1, 2], 0)


async def test_a_silent_stream_is_given_up_and_its_instance_left_out() -> None:
    silent = ScriptedEngine([1, Wait(0.5), 2, Stall()])
    engine = PushRouter(pool({1: silent}), silence_timeout_s=1)
    async with await engine.generate(Context(None)) as stream:
        assert await anext(stream) == 1
        await anyio.sleep(3)  # the reader's own time
        assert await anext(stream) == 2
        start_s = anyio.current_time()
        with pytest.raises(ResponseTimeout, match=f"instance_id=1 of endpoint {NAME} sent nothing for 1 s"):
            await anext(stream)
        assert anyio.current_time() - start_s == pytest.approx(1)
    assert (silent.open, in_flight(engine), list(engine.health.view.routable)) == (0, 0, [])


async def test_a_stopped_stream_that_stays_silent_just_ends() -> None:
    class Deaf(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            return ResponseStream(self._items(), request)

        async def _items(self) -> AsyncGenerator[int, None]:
            yield 1
            await anyio.sleep(100)

    context = Context(None)
    engine = PushRouter(pool({1: Deaf()}), silence_timeout_s=1)
    stream = await engine.generate(context)
    assert await anext(stream) == 1
    context.stop()
    assert await stream.collect() == []
    assert list(engine.health.view.routable) == [1]


async def test_an_instance_that_refuses_as_busy_is_passed_over_for_a_while() -> None:
    engines = {**answering(2), 1: ScriptedEngine([], fails=WorkerOverloaded("no room"))}
    engine = PushRouter(pool(engines), pick=lowest, cooldown_s=5)
    with pytest.raises(WorkerOverloaded, match="no room"):
        await engine.generate(Context(None))
    assert [list(engine.health.view.routable), list(engine.health.view.free)] == [[1, 2], [2]]
    assert await answerer(engine) == 2
    await anyio.sleep(5)
    assert list(engine.health.view.free) == [1, 2]


async def test_instances_that_all_refuse_as_busy_get_requests_when_the_first_is_back() -> None:
    engine = PushRouter(pool({1: ScriptedEngine([], fails=WorkerOverloaded("no room"))}), cooldown_s=5)
    with pytest.raises(WorkerOverloaded):
        await engine.generate(Context(None))
    await anyio.sleep(2)
    with pytest.raises(AllBusy) as caught:
        await engine.generate(Context(None))
    assert caught.value.retry_after_s == pytest.approx(3)
