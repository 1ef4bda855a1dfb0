"""Streams as observables, and observables as streams."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from pipeline import AsyncEngine, Context, Disconnected, ResponseStream
from pipeline.errors import BufferOverflow, StreamBusy
from pipeline.rx import (
    AnyIOScheduler,
    CompositeDisposable,
    Disposable,
    Observable,
    OverflowPolicy,
    Subject,
    from_observable,
    ops,
)
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall, Wait, check_engine, watch_streams


async def answer(*script: Any) -> tuple[ScriptedEngine, ResponseStream[Any]]:
    engine: ScriptedEngine = ScriptedEngine(script)
    return engine, await engine.generate(Context(None))


def record(observable: Observable[Any]) -> tuple[list[Any], Any]:
    """Return what the observable pushes, growing as it does, and the subscription."""
    pushed: list[Any] = []
    return pushed, observable.subscribe(
        pushed.append, lambda e: pushed.append(repr(e)), lambda: pushed.append("completed")
    )


# -- to_observable


async def test_a_stream_is_pushed_and_completed(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1, Wait(3), 2)
    async with AnyIOScheduler() as scheduler:
        observable = stream.to_observable(scheduler)
        assert engine.delivered == 0
        pushed, _ = record(observable)
        await anyio.sleep(4)
        assert pushed == [1, 2, "completed"]
        assert engine.open == 0


async def test_a_streams_error_is_the_observables(open_streams: OpenStreams) -> None:
    _, stream = await answer(1, Fail(Disconnected("lost")))
    async with AnyIOScheduler() as scheduler:
        pushed, _ = record(stream.to_observable(scheduler))
        await anyio.sleep(1)
        assert pushed == [1, "Disconnected('lost')"]


@pytest.mark.parametrize("script", [(1, Stall()), (1, Wait(50), 2)])
async def test_disposing_closes_the_stream(script: tuple[Any, ...], open_streams: OpenStreams) -> None:
    engine, stream = await answer(*script)
    async with AnyIOScheduler() as scheduler:
        pushed, subscription = record(stream.to_observable(scheduler))
        await anyio.sleep(1)
        subscription.dispose()
        await anyio.sleep(1)
        assert engine.open == 0
        assert pushed == [1]


async def test_an_observer_that_has_enough_closes_the_stream(open_streams: OpenStreams) -> None:
    engine, stream = await answer(*range(9))
    async with AnyIOScheduler() as scheduler:
        pushed, _ = record(stream.to_observable(scheduler).pipe(ops.take(2)))
        await anyio.sleep(1)
        assert pushed == [0, 1, "completed"]
        assert engine.delivered == 2
        assert engine.open == 0


async def test_leaving_the_scheduler_closes_the_stream(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1, Stall())
    async with AnyIOScheduler() as scheduler:
        record(stream.to_observable(scheduler))
        await anyio.sleep(1)
        assert engine.open == 1
    assert engine.open == 0


async def test_leaving_before_the_task_has_begun_closes_the_stream_too(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1, Stall())
    async with AnyIOScheduler() as scheduler:
        record(stream.to_observable(scheduler))
    assert engine.open == 0


async def test_a_stream_has_one_subscriber(open_streams: OpenStreams) -> None:
    _, stream = await answer(1)
    async with AnyIOScheduler() as scheduler:
        observable = stream.to_observable(scheduler)
        first, _ = record(observable)
        errors: list[Exception] = []
        observable.subscribe(on_error=errors.append)
        await anyio.sleep(1)
    assert first == [1, "completed"]
    assert [type(error) for error in errors] == [StreamBusy]


async def test_a_subscription_that_failed_took_nothing(open_streams: OpenStreams) -> None:
    _, stream = await answer(1)
    scheduler = AnyIOScheduler()
    observable = stream.to_observable(scheduler)
    assert record(observable)[0] == [
        "StreamClosed('this scheduler is not running: use it inside its `async with` block')"
    ]
    async with scheduler:
        pushed, _ = record(observable)
        await anyio.sleep(1)
        assert pushed == [1, "completed"]


@pytest.mark.parametrize("how", ["leave", "dispose"])
async def test_items_that_are_all_ready_let_others_run(how: str, open_streams: OpenStreams) -> None:
    stream, seen = ResponseStream.of(count(), Context(None)), list[int]()
    async with AnyIOScheduler() as scheduler:
        pumping = stream.to_observable(scheduler).subscribe(seen.append)
        for _ in range(20):
            await checkpoint()
        if how == "dispose":
            pumping.dispose()
            await anyio.sleep(1)
            assert not stream.is_open
    assert 0 < len(seen) < 50
    assert not stream.is_open


async def test_an_observers_error_is_the_schedulers_and_closes_the_stream(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1, 2)

    def fail(_: Any) -> None:
        raise LookupError("broken")

    with pytest.RaisesGroup(LookupError):
        async with AnyIOScheduler() as scheduler:
            stream.to_observable(scheduler).subscribe(fail)
            await anyio.sleep_forever()
    assert engine.open == 0


# -- from_observable


class Source:
    """Something that pushes, and knows whether it has a subscriber."""

    def __init__(self) -> None:
        self.subject = Subject[Any]()
        self.observable = Observable[Any](self._subscribe)
        self.subscribers = 0

    def _subscribe(self, observer: Any, _: Any = None) -> CompositeDisposable:
        self.subscribers += 1
        return CompositeDisposable(self.subject.subscribe(observer), Disposable(self._gone))

    def _gone(self) -> None:
        self.subscribers -= 1

    def stream(self, *, buffer_items: int = 8, overflow: OverflowPolicy = "error") -> ResponseStream[Any]:
        return from_observable(self.observable, Context(None), buffer_items=buffer_items, overflow=overflow)


class Pushing(AsyncEngine[int, int]):
    """An engine whose items are pushed by a task at intervals."""

    def __init__(self, scheduler: AnyIOScheduler) -> None:
        self.scheduler = scheduler
        self.subscribed = 0

    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        def subscribe(observer: Any, _: Any = None) -> CompositeDisposable:
            self.subscribed += 1
            ticking = ops.take(request.payload)(ticks(self.scheduler)).subscribe(observer)
            return CompositeDisposable(ticking, Disposable(self._gone))

        return from_observable(Observable(subscribe), request, buffer_items=4)

    def _gone(self) -> None:
        self.subscribed -= 1


def ticks(scheduler: AnyIOScheduler) -> Observable[int]:
    def subscribe(observer: Any, _: Any = None) -> Any:
        def tick(state: int | None) -> int:
            observer.on_next(state or 0)
            return (state or 0) + 1

        return scheduler.schedule_periodic(0.01, tick, 0)

    return Observable(subscribe)


async def test_a_pushed_stream_holds_the_engine_contract() -> None:
    async with AnyIOScheduler() as scheduler:
        await check_engine(
            lambda: Pushing(scheduler),
            request=64,
            expected=list(range(64)),
            open_count=lambda engine: engine.subscribed,
        )


async def test_pushed_items_wait_for_their_reader(open_streams: OpenStreams) -> None:
    source = Source()
    async with source.stream() as stream:
        source.subject.on_next(1)
        source.subject.on_next(2)
        assert await stream.__anext__() == 1
        source.subject.on_completed()
        assert [item async for item in stream] == [2]
    assert source.subscribers == 0


async def test_a_sources_error_comes_after_its_items(open_streams: OpenStreams) -> None:
    source = Source()
    async with source.stream() as stream:
        source.subject.on_next(1)
        source.subject.on_error(Disconnected("lost"))
        assert await stream.__anext__() == 1
        with pytest.raises(Disconnected):
            await stream.__anext__()
    assert source.subscribers == 0


async def test_overflow_is_an_error_after_what_was_buffered(open_streams: OpenStreams) -> None:
    source = Source()
    async with source.stream(buffer_items=2) as stream:
        for item in range(4):
            source.subject.on_next(item)
        assert source.subscribers == 0
        assert [await stream.__anext__(), await stream.__anext__()] == [0, 1]
        with pytest.raises(BufferOverflow):
            await stream.__anext__()


async def test_a_source_that_overflows_while_it_is_subscribed_is_disposed(open_streams: OpenStreams) -> None:
    disposed: list[bool] = []

    def subscribe(observer: Any, _: Any = None) -> Disposable:
        for item in range(3):
            observer.on_next(item)
        return Disposable(lambda: disposed.append(True))

    async with from_observable(Observable[int](subscribe), Context(None), buffer_items=1) as stream:
        assert disposed == [True]
        assert await stream.__anext__() == 0
        with pytest.raises(BufferOverflow):
            await stream.__anext__()


@pytest.mark.parametrize(("overflow", "kept"), [("drop_oldest", [2, 3]), ("drop_newest", [0, 1])])
async def test_a_full_buffer_drops_by_its_policy(
    overflow: OverflowPolicy, kept: list[int], open_streams: OpenStreams
) -> None:
    source = Source()
    stream = source.stream(buffer_items=2, overflow=overflow)
    for item in range(4):
        source.subject.on_next(item)
    source.subject.on_completed()
    assert await stream.collect() == kept


async def test_a_buffer_holds_at_least_one_item() -> None:
    with pytest.raises(ValueError, match="buffer_items"):
        from_observable(Subject[int](), Context(None), buffer_items=0)


@pytest.mark.parametrize("end", ["close", "stop", "kill", "cancel"])
@pytest.mark.parametrize("reading", [False, True])
async def test_the_source_is_let_go_on_every_way_out(end: str, reading: bool, open_streams: OpenStreams) -> None:
    source = Source()
    stream = source.stream()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            if reading:
                tasks.start_soon(drain, stream)
                await anyio.sleep(1)
            if end == "cancel" or (end == "close" and reading):
                scope.cancel()
            elif end != "close":
                getattr(stream.context, end)()
    await stream.aclose()
    assert source.subscribers == 0


async def drain(stream: ResponseStream[Any]) -> None:
    async for _ in stream:
        pass


async def test_a_dropped_stream_lets_its_source_go() -> None:
    source = Source()
    with watch_streams() as streams:
        with pytest.warns(ResourceWarning):
            source.stream()
        for _ in range(3):
            await checkpoint()
        assert not streams.open
    assert source.subscribers == 0


async def test_a_stop_delivers_what_waits_and_takes_nothing_more(open_streams: OpenStreams) -> None:
    source = Source()
    async with source.stream() as stream:
        source.subject.on_next(1)
        source.subject.on_next(2)
        stream.context.stop()
        source.subject.on_next(3)
        assert [item async for item in stream] == [1, 2]


async def test_a_kill_drops_what_waits(open_streams: OpenStreams) -> None:
    source = Source()
    async with source.stream() as stream:
        source.subject.on_next(1)
        stream.context.kill()
        assert [item async for item in stream] == []


async def test_another_thread_may_push(open_streams: OpenStreams) -> None:
    source = Source()
    stream = source.stream(buffer_items=1000)

    def push() -> None:
        for item in range(500):
            source.subject.on_next(item)
        source.subject.on_completed()

    thread = threading.Thread(target=push)
    thread.start()
    assert await stream.collect() == list(range(500))
    await anyio.to_thread.run_sync(thread.join)
