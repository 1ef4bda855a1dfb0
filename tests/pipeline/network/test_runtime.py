"""The runtime: serving, withdrawing and leaving."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import anyio
import pytest

from pipeline import CannotConnect, Context, Disconnected, InvalidArgument, StreamClosed, Unavailable
from pipeline.network import Runtime, Scope
from pipeline.network.inprocess import InProcessEventPlane, InProcessRequestPlane, InProcessStore
from pipeline.network.objects import InProcessObjects
from pipeline.rx import AnyIOScheduler
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, Wait
from tests.pipeline.network.worlds import (
    WHERE,
    WORLDS,
    WorldKind,
    card,
    deployment,
    engine_of,
    eventually,
    record_changes,
    two_runtimes,
    watchers,
)


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> WorldKind:
    return cast(WorldKind, request.param)


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
async def test_a_withdrawn_instance_is_not_published_again(how: str) -> None:
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


async def test_an_instance_served_anew_outlives_its_predecessor(world: WorldKind, open_streams: OpenStreams) -> None:
    async with two_runtimes(world) as (runtime, caller), anyio.create_task_group() as tasks:
        first = await runtime.serve(WHERE, engine_of(1, Wait(5), 2), instance_id=1)
        workers = caller.workers(WHERE)
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


@pytest.mark.parametrize("failing", ["v1/instances", "v1/mdc"])
async def test_one_key_that_cannot_be_removed_does_not_keep_the_other(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Runtime.in_process() as runtime:
        store, discovery = runtime._store, runtime.discovery
        delete = store.delete

        async def fails(key: str) -> None:
            if key.startswith(failing):
                raise Unavailable("no server")
            await delete(key)

        monkeypatch.setattr(store, "delete", fails)
        await (await runtime.serve(WHERE, engine_of(), card=card("a"))).withdraw()
        assert len([*await discovery.instances(), *await discovery.models()]) == 1
        assert (await discovery.instances() == []) == (failing == "v1/mdc")


class SlowToClose(InProcessObjects):
    has_closed = False

    async def close(self) -> None:
        await anyio.sleep(1)
        self.has_closed = True


async def test_a_cancelled_block_closes_what_takes_a_moment() -> None:
    rng, scheduler, objects = Random(3), AnyIOScheduler(), SlowToClose()
    runtime = Runtime(
        InProcessStore(scheduler, 10),
        InProcessRequestPlane(),
        InProcessEventPlane(lambda: 0, rng),
        scheduler,
        objects=objects,
        rng=rng,
    )
    with anyio.CancelScope() as scope:
        async with runtime:
            scope.cancel()
            await anyio.sleep_forever()
    assert objects.has_closed


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


async def test_a_taken_id_is_refused_and_changes_nothing(world: WorldKind) -> None:
    async with two_runtimes(world) as (runtime, caller):
        first = await runtime.serve(WHERE, engine_of("first"), instance_id=1)
        with pytest.raises(InvalidArgument, match="served already"):
            await runtime.serve(WHERE, engine_of("second"), instance_id=1)
        workers = caller.workers(WHERE)
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
        assert len(runtime.served) == 1
        await runtime.serve(WHERE, engine_of(), card=card("model-a"), instance_id=2)


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


async def test_an_unpublished_instance_still_answers_callers_that_know_it(world: WorldKind) -> None:
    async with two_runtimes(world) as (runtime, caller):
        served = await runtime.serve(WHERE, engine_of("x"), instance_id=1)
        workers = caller.workers(WHERE)
        called = workers.engine(1)
        await served.unpublish()
        assert await (await called.generate(Context(None))).collect() == ["x"]
        await eventually(lambda: workers.instance_ids() == ())
        with pytest.raises(CannotConnect, match="not found"):
            await workers.engine(1).generate(Context(None))


async def test_leaving_waits_for_running_requests(world: WorldKind, open_streams: OpenStreams) -> None:
    async with anyio.create_task_group() as tasks:
        answers: list[Any] = []
        async with runtimes_by_hand(world, graceful_timeout_s=100) as (runtime, caller):
            await runtime.serve(WHERE, engine_of(1, Wait(30), 2), instance_id=1)
            stream = await caller.workers(WHERE).engine(1).generate(Context(None))

            async def read() -> None:
                answers.extend(await stream.collect())

            tasks.start_soon(read)
            await runtime.__aexit__(None, None, None)
            await eventually(lambda: answers == [1, 2])
            assert anyio.current_time() < 60


@pytest.mark.parametrize(("fails", "waits_s"), [(False, 20), (True, 0)])
async def test_leaving_cuts_requests_that_outlast_the_limit(
    world: WorldKind, fails: bool, waits_s: float, open_streams: OpenStreams
) -> None:
    local, start = ScriptedEngine([1, Stall()]), anyio.current_time()
    async with runtimes_by_hand(world, graceful_timeout_s=20) as (runtime, caller):
        await runtime.serve(WHERE, local, instance_id=1)
        stream = await caller.workers(WHERE).engine(1).generate(Context(None))
        await stream.__anext__()
        await runtime.__aexit__(*((LookupError, LookupError(), None) if fails else (None, None, None)))
        assert anyio.current_time() - start == pytest.approx(waits_s, abs=0.01)
        with pytest.raises(Disconnected):
            await stream.__anext__()
    assert local.open == 0


class HangingStore(InProcessStore):
    """A store that takes writes, and then does not answer: each removal fails after 10 s, as with a shared folder."""

    async def delete(self, key: str) -> None:
        await anyio.sleep(10)
        raise Unavailable("the folder did not answer within 10 s")


async def test_leaving_waits_for_all_instances_at_a_time_if_a_store_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many there are: for a card, then for the instance. All of them refuse requests then."""
    scheduler, rng = AnyIOScheduler(), Random()
    planes = HangingStore(scheduler, 10.0), InProcessRequestPlane(), InProcessEventPlane(lambda: 0, rng)
    async with Runtime(*planes, scheduler, rng=rng) as runtime:
        served = [await runtime.serve(f"ns/comp/ep{number}", engine_of(), card=card("a")) for number in range(5)]
        begun_s = anyio.current_time()
    assert anyio.current_time() - begun_s == pytest.approx(20, abs=0.01)
    text = "could not be unpublished, its lease runs out: the folder did not answer within 10 s"
    assert sum(text in message for message in caplog.messages) == 5
    assert "Traceback" not in caplog.text
    for one in served:
        with pytest.raises(Unavailable, match="takes no requests any more"):
            await one.publish()


@asynccontextmanager
async def runtimes_by_hand(world: WorldKind, graceful_timeout_s: float) -> AsyncIterator[tuple[Runtime, Runtime]]:
    """The runtimes of a worker, which the test leaves itself, and of its callers."""
    if world == "in process":
        runtime = await Runtime.in_process(graceful_timeout_s=graceful_timeout_s).__aenter__()
        yield runtime, runtime
        return
    async with deployment() as made, made.runtime() as caller:
        yield await made.runtime(graceful_timeout_s=graceful_timeout_s).__aenter__(), caller


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
