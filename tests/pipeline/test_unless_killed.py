"""`unless_killed`: one awaitable that a kill ends at once, and what becomes of its result."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

import pipeline.cancellation as cancellation
from pipeline import Cancelled, Context, ResponseStream, unless_killed
from pipeline.errors import BackendCancelled
from pipeline.testing import OpenStreams, virtual_time


@pytest.fixture(autouse=True, params=["with anyio's private names", "without them"])
def _names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without them":
        monkeypatch.setattr(cancellation, "_cuts_tasks", False)


async def kill_soon(context: Context[Any]) -> None:
    await anyio.sleep(1)
    context.kill()


async def after(seconds: float, result: Any = "result") -> Any:
    await anyio.sleep(seconds)
    return result


async def test_the_result_is_returned_and_the_kill_after_it_changes_nothing() -> None:
    context = Context(None)
    assert await unless_killed(after(1), context) == "result"
    context.kill()
    await anyio.sleep(2)


async def test_a_stop_does_not_end_the_wait() -> None:
    context = Context(None)
    context.stop()
    assert await unless_killed(after(1), context) == "result"


async def test_a_kill_cancels_the_wait_at_once_and_raises_cancelled() -> None:
    context, released = Context(None), list[float]()

    async def never() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            released.append(anyio.current_time())

    began_s = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        with pytest.raises(Cancelled, match="no worker took it"):
            await unless_killed(never(), context, "no worker took it")
    assert released == [pytest.approx(began_s + 1)]
    await anyio.sleep(5)  # the task is not cancelled later


async def test_a_request_killed_beforehand_is_not_awaited() -> None:
    context, began = Context(None), list[bool]()

    async def begin() -> None:
        began.append(True)

    context.kill()
    with pytest.raises(Cancelled):
        await unless_killed(begin(), context)
    assert began == []


async def test_a_stream_that_comes_with_the_kill_is_closed(open_streams: OpenStreams) -> None:
    context = Context(None)
    made: list[ResponseStream[int]] = []

    async def take() -> ResponseStream[int]:
        context.kill()
        made.append(ResponseStream.of([1], context))
        return made[0]

    with pytest.raises(Cancelled):
        await unless_killed(take(), context)
    assert not made[0].is_open
    assert not open_streams.open


async def test_what_the_awaitable_raises_goes_to_the_caller() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await unless_killed(fail(), Context(None))


async def test_what_the_awaitable_shields_is_waited_for() -> None:
    context, done = Context(None), list[str]()

    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(3)
            done.append("shielded")
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        with pytest.raises(Cancelled):
            await unless_killed(shielded(), context)
    assert done == ["shielded"]


async def test_a_deadline_around_the_wait_holds() -> None:
    with anyio.move_on_after(1) as scope:
        await unless_killed(anyio.sleep_forever(), Context(None))
    assert scope.cancelled_caught


@pytest.mark.parametrize("anyio_backend", [virtual_time("asyncio")])
async def test_a_wait_for_something_that_is_cancelled_raises_backend_cancelled(anyio_backend: object) -> None:
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(work.cancel)
    with pytest.raises(BackendCancelled):
        await unless_killed(work, Context(None))
