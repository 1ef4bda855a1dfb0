"""Stop and kill while workers fail: how the answer ends, what is counted, and what is closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators import Migration
from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    ReleaseOnce,
    ResponseStream,
    Unavailable,
    WorkerOverloaded,
)
from pipeline.errors import BackendUnknown, chain
from pipeline.protocols import (
    FinishReason,
    PreprocessedRequest,
    SamplingOptions,
)
from pipeline.testing import Fail, Fault, ScriptedEngine, Stall, watch_streams
from tests.operators.migration.worlds import ALL, GONE, Answer, World, broken, healthy, make_request, output, receive

# -- stop and kill


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("choices", [1, 2])
async def test_a_request_stopped_beforehand_reaches_no_worker(limit: int, choices: int) -> None:
    world, sent = World(limit=limit), Context(make_request(sampling_options=SamplingOptions(n=choices)))
    sent.stop()
    with pytest.raises(Cancelled):
        await world.graph.generate(sent)
    assert (world.attempts, world.recorded.counts(), world.recorded.durations()) == ([], (0, 0), {})


async def test_a_stop_between_dispatches_raises_cancelled() -> None:
    world, sent = World(), Context(make_request())

    class Refusing(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            sent.stop()
            raise CannotConnect("no")

    with pytest.raises(Cancelled):
        await (world.migration >> Refusing()).generate(sent)
    assert world.recorded.counts() == (1, 0)
    assert world.recorded.durations() == {("new_request", "cancelled"): 1}


class Slow(AsyncEngine[Any, Any]):
    """Break the first answer after two tokens; never answer later requests."""

    def __init__(self, *, heeds_stop: bool) -> None:
        self.heeds_stop = heeds_stop
        self.requests = 0

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self.requests += 1
        if self.requests == 1:
            script = [output(101), output(102), Fail(GONE)]
            return await ScriptedEngine(script).generate(request)
        if not self.heeds_stop:
            await anyio.sleep_forever()
        await request.stopped()
        raise Cancelled("stopped while connecting")


async def read_until(sent: Context[Any], graph: AsyncEngine[Any, Any], act: Callable[[], object]) -> Answer:
    """The answer when `act` is called one second after the request was sent; no stream stays open."""
    answers: list[Answer] = []
    with anyio.fail_after(10), watch_streams() as streams:
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                answers.append(await receive(graph, sent))

            tasks.start_soon(read)
            await anyio.sleep(1)
            act()
    assert streams.open == []
    return answers[0]


async def test_a_stop_while_another_worker_gets_the_request_ends_as_cancelled() -> None:
    world, sent, below = World(), Context(make_request()), Slow(heeds_stop=True)
    seen = await read_until(sent, world.migration >> below, sent.stop)
    assert (seen.tokens, seen.finish, seen.raised) == ([101, 102], FinishReason.CANCELLED, None)
    assert (below.requests, world.recorded.counts()) == (2, (0, 1))
    assert world.recorded.durations() == {("ongoing_request", "cancelled"): 1}


async def test_a_kill_ends_the_wait_for_another_worker_at_once() -> None:
    world, sent, below = World(), Context(make_request()), Slow(heeds_stop=False)
    seen = await read_until(sent, world.migration >> below, sent.kill)
    assert (len(seen.items), seen.raised, anyio.current_time() <= 2) == (2, None, True)
    assert world.recorded.durations() == {("ongoing_request", "cancelled"): 1}


async def test_a_stream_that_comes_with_the_kill_is_closed() -> None:
    made: list[ResponseStream[Any]] = []

    class Shielded(Slow):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            if not self.requests:
                return await super().generate(request)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(3)
            made.append(await ScriptedEngine([output(103)]).generate(request))
            return made[0]

    world, sent, below = World(), Context(make_request()), Shielded(heeds_stop=False)
    seen = await read_until(sent, world.migration >> below, sent.kill)
    assert (len(seen.items), seen.raised, [stream.is_open for stream in made]) == (2, None, [False])
    assert world.recorded.durations() == {("ongoing_request", "cancelled"): 1}


async def test_a_stream_that_breaks_after_a_stop_ends_as_cancelled() -> None:
    world, sent = World(broken(3)), Context(make_request())
    async with await world.graph.generate(sent) as stream:
        first = [await anext(stream) for _ in range(3)]
        sent.stop()
        rest = [item async for item in stream]
    assert (len(first), [item.data.finish_reason for item in rest]) == (3, [FinishReason.CANCELLED])
    assert world.recorded.counts() == (0, 0)


async def test_a_stream_that_breaks_after_a_stop_before_its_first_output_just_ends() -> None:
    world, sent = World(broken(0)), Context(make_request())
    async with await world.graph.generate(sent) as stream:
        sent.stop()
        assert [item async for item in stream] == []
    assert (len(world.attempts), world.recorded.counts()) == (1, (0, 0))


async def test_a_stream_that_breaks_after_a_kill_just_ends() -> None:
    world, sent = World(broken(3)), Context(make_request())
    async with await world.graph.generate(sent) as stream:
        for _ in range(3):
            await anext(stream)
        sent.kill()
        assert [item async for item in stream] == []


async def test_stop_and_kill_reach_the_worker_that_took_over() -> None:
    for end in ("stop", "kill"):
        world = World(broken(3), None, script=lambda p: [*healthy(p)[:5], Stall()])
        sent = Context(make_request())
        seen = await read_until(sent, world.graph, getattr(sent, end))
        assert (seen.tokens, seen.raised) == (ALL[:8], None)
        assert [context.is_killed for context in world.contexts] == [end == "kill"] * 2


async def test_a_cancellation_below_is_shown_as_one() -> None:
    world = World()

    class GivingUp(ScriptedEngine):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            if self.requests:
                self.requests.append(request)
                raise Cancelled("the worker gave it up")
            return await super().generate(request)

    below = GivingUp([output(101), Fail(GONE)])
    seen = await receive(world.migration >> below, Context(make_request()))
    assert (seen.tokens, type(seen.raised), len(below.requests)) == ([101], Cancelled, 2)


async def test_the_broken_stream_is_closed_before_the_next_worker_gets_the_request() -> None:
    open_then: list[int] = []
    world = World(script=[output(101), Fail(GONE)])

    class Looking(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            open_then.append(len(streams.open))
            stream: ResponseStream[Any] = await world.engine.generate(request)
            return stream

    with watch_streams() as streams:
        await receive(world.migration >> Looking(), Context(make_request()))
    assert Counter(open_then) == {0: 1, 1: 3}  # the caller's own stream


async def test_closing_the_broken_stream_is_part_of_the_move() -> None:
    class SlowToClose(AsyncEngine[Any, Any]):
        requests = 0

        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            self.requests += 1
            return ResponseStream(self._items(self.requests), request)

        async def _items(self, attempt: int) -> AsyncGenerator[Any, None]:
            try:
                yield output(100 + attempt)
                if attempt == 1:
                    yield Annotated[Any].from_error(GONE)
            finally:
                await anyio.sleep(2)

    world = World()
    assert (await receive(world.migration >> SlowToClose(), Context(make_request()))).tokens == [101, 102]
    assert world.recorded.seconds() == {("ongoing_request", "success"): 2.0}


async def test_a_close_that_fails_does_not_keep_the_request_from_moving_on() -> None:
    class Sticky(AsyncEngine[Any, Any]):
        requests = 0

        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            Sticky.requests += 1
            if Sticky.requests > 1:
                return await ScriptedEngine(healthy).generate(request)

            async def items() -> AsyncGenerator[Any, None]:
                yield output(101)
                yield Annotated[Any].from_error(GONE)

            def failing() -> None:
                raise BackendUnknown("cannot close")

            return ResponseStream(items(), request, ReleaseOnce(failing))

    assert (await receive(Migration(3) >> Sticky(), Context(make_request()))).tokens == ALL


async def test_an_overloaded_worker_is_followed_by_another() -> None:
    world = World(Fault(error_after=0, error=WorkerOverloaded("busy")), None)
    assert (await world.collect()).tokens == ALL


async def test_a_pool_without_another_worker_shows_the_first_failure() -> None:
    class Gone(ScriptedEngine):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            if self.requests:
                raise Unavailable("no worker left")
            return await super().generate(request)

    seen = await receive(Migration(3) >> Gone([output(101), Fail(GONE)]), Context(make_request()))
    assert isinstance(seen.raised, Disconnected)
    assert [str(link) for link in chain(seen.raised)] == ["gone", "no worker left"]


async def test_endless_retries_still_let_other_tasks_run() -> None:
    below = ScriptedEngine([], fails=CannotConnect("no"))
    sent = Context(PreprocessedRequest([1]))
    with anyio.move_on_after(1) as scope:
        async with anyio.create_task_group() as tasks:

            async def stop_soon() -> None:
                while len(below.requests) < 20:
                    await checkpoint()
                sent.stop()

            tasks.start_soon(stop_soon)
            with pytest.raises(Cancelled):
                await (Migration(2**32 - 1) >> below).generate(sent)
    assert not scope.cancelled_caught
    assert len(below.requests) < 100
