"""Migration: what the caller sees of a request whose workers fail, what is counted, and what is left open."""

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
    LLMEngineOutput,
    PreprocessedRequest,
    SamplingOptions,
)
from pipeline.testing import Fail, Fault, ScriptedEngine, Stall, watch_streams

pytestmark = pytest.mark.anyio

ALL = list(range(101, 111))
REFUSED = Fault(fail_to_connect=True)


def broken(after: int) -> Fault:
    return Fault(disconnect_after=after)


def output(token_id: int, **fields: Any) -> Annotated[Any]:
    return Annotated(LLMEngineOutput([token_id], **fields))


# -- stop and kill


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("choices", [1, 2])
async def test_a_request_stopped_beforehand_reaches_no_worker(
    limit: int, choices: int, world_of: Any, asking: Any
) -> None:
    """MIG-07"""
    world, asked = world_of(limit=limit), Context(asking(sampling_options=SamplingOptions(n=choices)))
    asked.stop()
    with pytest.raises(Cancelled):
        await world.graph.generate(asked)
    assert (world.asked, world.recorded.counts(), world.recorded.durations()) == ([], (0, 0), {})


async def test_a_stop_between_dispatches_raises_cancelled(world_of: Any, asking: Any) -> None:
    """MIG-08"""
    world, asked = world_of(), Context(asking())

    class Refusing(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            asked.stop()
            raise CannotConnect("no")

    with pytest.raises(Cancelled):
        await (world.migration >> Refusing()).generate(asked)
    assert world.recorded.counts() == (1, 0)
    assert world.recorded.durations() == {("new_request", "cancelled"): 1}


class Slow(AsyncEngine[Any, Any]):
    """Breaks its first answer after two tokens, and then takes forever to take the request."""

    def __init__(self, *, heeds_stop: bool) -> None:
        self.heeds_stop = heeds_stop
        self.requests = 0

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self.requests += 1
        if self.requests == 1:
            script = [output(101), output(102), Fail(Disconnected("gone"))]
            return await ScriptedEngine(script).generate(request)
        if not self.heeds_stop:
            await anyio.sleep_forever()
        await request.stopped()
        raise Cancelled("stopped while connecting")


async def read_until(asked: Context[Any], graph: AsyncEngine[Any, Any], act: Callable[[], object], see: Any) -> Any:
    """What is seen when something is done one second after the request was sent."""
    seen: list[Any] = []
    with anyio.fail_after(10), watch_streams() as streams:
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                seen.append(await see(graph, asked))

            tasks.start_soon(read)
            await anyio.sleep(1)
            act()
    assert streams.open == []
    return seen[0]


async def test_a_stop_while_another_worker_is_asked_ends_as_cancelled(world_of: Any, asking: Any, see: Any) -> None:
    world, asked, below = world_of(), Context(asking()), Slow(heeds_stop=True)
    seen = await read_until(asked, world.migration >> below, asked.stop, see)
    assert (seen.tokens, seen.finish, seen.raised) == ([101, 102], FinishReason.CANCELLED, None)
    assert (below.requests, world.recorded.counts()) == (2, (0, 1))
    assert world.recorded.durations() == {("ongoing_request", "cancelled"): 1}


async def test_a_kill_ends_the_wait_for_another_worker_at_once(world_of: Any, asking: Any, see: Any) -> None:
    world, asked, below = world_of(), Context(asking()), Slow(heeds_stop=False)
    seen = await read_until(asked, world.migration >> below, asked.kill, see)
    assert (len(seen.items), seen.raised, anyio.current_time() <= 2) == (2, None, True)
    assert world.recorded.durations() == {("ongoing_request", "cancelled"): 1}


async def test_a_stream_that_comes_with_the_kill_is_closed(world_of: Any, asking: Any, see: Any) -> None:
    made: list[ResponseStream[Any]] = []

    class Shielded(Slow):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            if not self.requests:
                return await super().generate(request)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(3)
            made.append(await ScriptedEngine([output(103)]).generate(request))
            return made[0]

    world, asked, below = world_of(), Context(asking()), Shielded(heeds_stop=False)
    seen = await read_until(asked, world.migration >> below, asked.kill, see)
    assert (len(seen.items), seen.raised, [stream.is_open for stream in made]) == (2, None, [False])
    assert world.recorded.durations() == {("ongoing_request", "cancelled"): 1}


async def test_a_stream_that_breaks_after_a_stop_ends_as_cancelled(world_of: Any, asking: Any) -> None:
    world, asked = world_of(broken(3)), Context(asking())
    async with await world.graph.generate(asked) as stream:
        first = [await anext(stream) for _ in range(3)]
        asked.stop()
        rest = [item async for item in stream]
    assert (len(first), [item.data.finish_reason for item in rest]) == (3, [FinishReason.CANCELLED])
    assert world.recorded.counts() == (0, 0)


async def test_a_stream_that_breaks_after_a_stop_before_its_first_output_just_ends(world_of: Any, asking: Any) -> None:
    world, asked = world_of(broken(0)), Context(asking())
    async with await world.graph.generate(asked) as stream:
        asked.stop()
        assert [item async for item in stream] == []
    assert (len(world.asked), world.recorded.counts()) == (1, (0, 0))


async def test_a_stream_that_breaks_after_a_kill_just_ends(world_of: Any, asking: Any) -> None:
    world, asked = world_of(broken(3)), Context(asking())
    async with await world.graph.generate(asked) as stream:
        for _ in range(3):
            await anext(stream)
        asked.kill()
        assert [item async for item in stream] == []


async def test_stop_and_kill_reach_the_worker_that_took_over(world_of: Any, asking: Any, model: Any, see: Any) -> None:
    for end in ("stop", "kill"):
        world = world_of(broken(3), None, script=lambda p: [*model(p)[:5], Stall()])
        asked = Context(asking())
        seen = await read_until(asked, world.graph, getattr(asked, end), see)
        assert (seen.tokens, seen.raised) == (ALL[:8], None)
        assert [context.is_killed for context in world.contexts] == [end == "kill"] * 2


async def test_a_cancellation_below_is_shown_as_one(world_of: Any, see: Any, asking: Any) -> None:
    world = world_of()

    class GivingUp(ScriptedEngine):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            if self.requests:
                self.requests.append(request)
                raise Cancelled("the worker gave it up")
            return await super().generate(request)

    below = GivingUp([output(101), Fail(Disconnected("gone"))])
    seen = await see(world.migration >> below, Context(asking()))
    assert (seen.tokens, type(seen.raised), len(below.requests)) == ([101], Cancelled, 2)


async def test_the_broken_stream_is_closed_before_the_next_worker_is_asked(
    world_of: Any, see: Any, asking: Any
) -> None:
    open_then: list[int] = []
    world = world_of(script=[output(101), Fail(Disconnected("gone"))])

    class Looking(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            open_then.append(len(streams.open))
            stream: ResponseStream[Any] = await world.engine.generate(request)
            return stream

    with watch_streams() as streams:
        await see(world.migration >> Looking(), Context(asking()))
    assert Counter(open_then) == {0: 1, 1: 3}  # the caller's own stream


async def test_closing_the_broken_stream_is_part_of_the_move(world_of: Any, asking: Any, see: Any) -> None:
    class SlowToClose(AsyncEngine[Any, Any]):
        requests = 0

        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            self.requests += 1
            return ResponseStream(self._items(self.requests), request)

        async def _items(self, attempt: int) -> AsyncGenerator[Any, None]:
            try:
                yield output(100 + attempt)
                if attempt == 1:
                    yield Annotated[Any].from_error(Disconnected("gone"))
            finally:
                await anyio.sleep(2)

    world = world_of()
    assert (await see(world.migration >> SlowToClose(), Context(asking()))).tokens == [101, 102]
    assert world.recorded.seconds() == {("ongoing_request", "success"): 2.0}


async def test_a_close_that_fails_does_not_keep_the_request_from_moving_on(see: Any, asking: Any, model: Any) -> None:
    class Sticky(AsyncEngine[Any, Any]):
        requests = 0

        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            Sticky.requests += 1
            if Sticky.requests > 1:
                return await ScriptedEngine(model).generate(request)

            async def items() -> AsyncGenerator[Any, None]:
                yield output(101)
                yield Annotated[Any].from_error(Disconnected("gone"))

            def failing() -> None:
                raise BackendUnknown("cannot close")

            return ResponseStream(items(), request, ReleaseOnce(failing))

    assert (await see(Migration(3) >> Sticky(), Context(asking()))).tokens == ALL


async def test_an_overloaded_worker_is_followed_by_another(world_of: Any) -> None:
    world = world_of(Fault(error_after=0, error=WorkerOverloaded("busy")), None)
    assert (await world.ask()).tokens == ALL


async def test_a_pool_without_another_worker_shows_the_first_failure(see: Any, asking: Any) -> None:
    class Gone(ScriptedEngine):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            if self.requests:
                raise Unavailable("nobody left")
            return await super().generate(request)

    seen = await see(Migration(3) >> Gone([output(101), Fail(Disconnected("gone"))]), Context(asking()))
    assert isinstance(seen.raised, Disconnected)
    assert [str(link) for link in chain(seen.raised)] == ["gone", "nobody left"]


async def test_a_limit_without_end_still_lets_the_loop_run() -> None:
    below = ScriptedEngine([], fails=CannotConnect("no"))
    asked = Context(PreprocessedRequest([1]))
    with anyio.move_on_after(1) as scope:
        async with anyio.create_task_group() as tasks:

            async def stop_soon() -> None:
                while len(below.requests) < 20:
                    await checkpoint()
                asked.stop()

            tasks.start_soon(stop_soon)
            with pytest.raises(Cancelled):
                await (Migration(2**32 - 1) >> below).generate(asked)
    assert not scope.cancelled_caught
    assert len(below.requests) < 100
