"""What foreign code raises loses one request, and what ends the task itself, as a real Ctrl-C does, goes on."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import AsyncEngine, Context, PenstockError, ResponseStream, Unknown, function_engine
from pipeline.errors import BackendCancelled
from pipeline.foreign import raise_if_ours
from pipeline.network import EndpointId, Runtime


class Panic(BaseException):
    """As a Rust library raises it."""


async def stale_cancellation() -> BaseException:
    """A real cancellation of the running loop, whose scope is over."""
    kept: list[BaseException] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await checkpoint()
        except anyio.get_cancelled_exc_class() as error:
            kept.append(error)
            raise
    return kept[0]


async def wrecks() -> list[BaseException]:
    return [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        Panic("index out of bounds"),
        await stale_cancellation(),
        BaseExceptionGroup("tasks", [SystemExit(3), Panic()]),
    ]


PLACES = ["before the first item", "in the middle", "instead of the end"]


@pytest.mark.parametrize("place", range(3), ids=PLACES)
async def test_whatever_a_function_raises_loses_its_own_request_only(place: int) -> None:
    raised: dict[int, BaseException] = dict(enumerate(await wrecks()))

    @function_engine
    async def count(to: int) -> AsyncIterator[int]:
        for number in range(2):
            if number == place and to in raised:
                raise raised[to]
            await anyio.sleep(1)
            yield number
        if to in raised:
            raise raised[to]

    read: dict[int, list[int]] = {}
    failed: dict[int, BaseException] = {}

    async def call(number: int) -> None:
        read[number] = []
        try:
            async with await count.generate(Context(number)) as stream:
                async for item in stream:
                    read[number].append(item)
        except PenstockError as error:
            failed[number] = error

    async with anyio.create_task_group() as tasks:
        for number in [*raised, -1]:
            tasks.start_soon(call, number)
    assert read == {number: list(range(2 if number == -1 else place)) for number in [*raised, -1]}
    assert failed.keys() == raised.keys()
    for number, error in failed.items():
        assert type(error) in (Unknown, BackendCancelled)
        assert error.__cause__ is raised[number]


async def test_what_an_instance_raises_loses_its_own_request_only() -> None:
    """On the request plane, for an engine that holds no contract at all."""

    class Exits(AsyncEngine[Any, Any]):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            if request.payload == "refuse":
                sys.exit(3)
            return ResponseStream(self._items(), request)

        async def _items(self) -> AsyncIterator[int]:
            yield 1
            raise Panic("index out of bounds")

    endpoint = EndpointId("n", "c", "e")
    async with Runtime.in_process() as runtime:
        await runtime.serve(endpoint, Exits())
        workers = runtime.workers(endpoint, int)
        (instance,) = await workers.wait_for_instances()
        engine = workers.engine(instance)
        with pytest.raises(Unknown, match="SystemExit: 3"):
            await engine.generate(Context("refuse"))
        async with await engine.generate(Context("")) as stream:
            assert await anext(stream) == 1
            with pytest.raises(Unknown, match="Panic: index out of bounds"):
                await anext(stream)


async def test_a_cancellation_of_the_task_goes_on() -> None:
    async def caught() -> None:
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            raise_if_ours(error)
            pytest.fail("it was taken for a failure")

    with anyio.move_on_after(1) as scope:
        await caught()
    assert scope.cancelled_caught


async def test_of_a_group_only_the_cancellation_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            group = BaseExceptionGroup("both", [error, Panic("while it ended")])
            try:
                raise group
            except BaseException as both:
                raise_if_ours(both)
                pytest.fail("the cancellation was lost")

    with anyio.move_on_after(1) as scope:
        try:
            await fails()
        except BaseExceptionGroup as ours:
            (cancellation,) = ours.exceptions
            raise cancellation from None
    assert scope.cancelled_caught
    assert "while it ended" in caplog.text


def raised_by_a_statement() -> GeneratorExit:
    try:
        raise GeneratorExit
    except GeneratorExit as error:
        return error


async def test_a_closed_generator_goes_on_and_a_raised_generator_exit_does_not() -> None:
    seen: list[str] = []

    async def reads() -> AsyncIterator[int]:
        try:
            yield 1
        except BaseException as error:
            raise_if_ours(error)
            seen.append("a failure")

    items: Any = reads()
    await anext(items)
    await items.aclose()
    assert seen == []
    items = reads()
    await anext(items)
    with pytest.raises(StopAsyncIteration):
        await items.athrow(raised_by_a_statement())
    assert seen == ["a failure"]


# -- real signals: each in a loop of its own, for they end it


Step = Callable[[], Awaitable[None]]


async def reading(step: Step) -> None:
    """A program whose main task reads from an engine that takes this step."""

    @function_engine
    async def engine(_: int) -> AsyncIterator[int]:
        await step()
        yield 1

    async with await engine.generate(Context(1)) as stream:
        async for _ in stream:
            await checkpoint()


async def interrupts(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    await anyio.sleep(5)


async def is_interrupted_while_it_waits() -> None:
    await anyio.to_thread.run_sync(signal.raise_signal, signal.SIGINT)
    await anyio.sleep(5)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    "step",
    [partial(interrupts, 1), partial(interrupts, 2), is_interrupted_while_it_waits],
    ids=["once", "twice", "idle"],
)
def test_a_real_interrupt_ends_the_program_though_an_engine_runs(backend: str, step: Step) -> None:
    # A shell starts what runs in its background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            anyio.run(reading, step, backend=backend)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_signal_handler_that_exits_ends_the_program_though_an_engine_runs(backend: str) -> None:
    def handler(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    async def terminates() -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises((SystemExit, BaseExceptionGroup)) as ended:
            anyio.run(reading, terminates, backend=backend)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 128 + signal.SIGTERM


def test_without_a_loop_a_failure_is_one_too() -> None:
    try:
        raise Panic
    except BaseException as error:
        raise_if_ours(error)
