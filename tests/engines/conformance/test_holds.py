"""Engines that hold over a yield, leave something running or block the loop: each fails its own check of the kit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest
import trio
from anyio.lowlevel import current_token

from engines import EngineConfig, GenerateContext, run_conformance
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from tests.engines.conformance.worlds import (
    TOKEN_S,
    BrokenEngine,
    BrokenEngines,
    Chunks,
    Toy,
    expect_its_failures,
    names_of,
)

BROKEN = BrokenEngines()
breaks = BROKEN.breaks


def spawn(work: Callable[[], Any]) -> Any:
    """Run the async function outside of any task group that waits for it."""
    loop = current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        TASKS.append(loop.create_task(work()))  # a collection ends those that only the loop knows
        return TASKS[-1]
    return trio.lowlevel.spawn_system_task(work)


# -- over a yield


def within(name: str, enter: Callable[[Any], Any]) -> None:
    """Register an engine that yields inside the context manager returned by `enter`."""

    class Within(Toy):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            manager = enter(self)
            if hasattr(manager, "__aenter__"):
                async with manager, aclosing(super().generate(request, context)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            else:
                with manager:
                    async with aclosing(super().generate(request, context)) as chunks:
                        async for chunk in chunks:
                            yield chunk

    breaks(name)(Within)


def one(make: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return one object for each engine."""
    made: dict[Any, Any] = {}
    return lambda engine: made.setdefault(engine, make())


@asynccontextmanager
async def session() -> AsyncGenerator[None, None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, TOKEN_S)
        yield


@asynccontextmanager
async def stacked() -> AsyncGenerator[None, None]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(anyio.create_task_group())
        yield


within("LockHeldOverYield", one(anyio.Lock))
within("LockHeldOverYield", one(threading.Lock))
within("LockHeldOverYield", one(lambda: anyio.CapacityLimiter(100)))
within("HeldUpByPausedReader", one(lambda: anyio.Semaphore(1)))
within("CancelScopeHeldOverYield", lambda engine: anyio.CancelScope())
within("CancelScopeHeldOverYield", lambda engine: anyio.move_on_after(3600))
within("CancelScopeHeldOverYield", lambda engine: anyio.fail_after(3600))
within("TaskGroupHeldOverYield", lambda engine: anyio.create_task_group())
within("TaskGroupHeldOverYield", lambda engine: session())
within("TaskGroupHeldOverYield", lambda engine: stacked())


@breaks("LockHeldOverYield")
class AcquiresAndReleases(Toy):
    """Enters no block: the failure shows when another task reads on."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        await self.lock.acquire()
        try:
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.lock.release()


@breaks("TaskGroupHeldOverYield")
class HandsOverFromATaskOfItsOwn(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        send, receive = anyio.create_memory_object_stream[LLMEngineOutput](0)
        make = super().generate

        async def send_tokens() -> None:
            async with send, aclosing(make(request, context)) as chunks:
                async for chunk in chunks:
                    await send.send(chunk)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_tokens)
            async with receive:
                async for chunk in receive:
                    yield chunk


@breaks("CancelScopeHeldOverYield")
class KeepsAScopeBetweenItems(Toy):
    """Is not a generator, so that the kit cannot inspect its frame."""

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        return _Scoped(super().generate(request, context))


class _Scoped:
    def __init__(self, chunks: Chunks) -> None:
        self.chunks, self.scope = chunks, anyio.CancelScope()
        self.is_begun = False

    async def __anext__(self) -> LLMEngineOutput:
        if not self.is_begun:
            self.is_begun = True
            self.scope.__enter__()
        return await self.chunks.__anext__()

    async def aclose(self) -> None:
        await self.chunks.aclose()
        if self.is_begun:
            self.scope.__exit__(None, None, None)


# -- left over


@breaks("TasksLeftByCleanup")
class ForgetsItsScheduler(Toy):
    async def start(self, worker_id: int) -> EngineConfig:
        self.task = spawn(anyio.sleep_forever)
        return await super().start(worker_id)


@breaks("ThreadsLeftByCleanup")
class ForgetsItsThread(Toy):
    def __init__(self) -> None:
        self.is_over = threading.Event()
        RELEASED.append(self.is_over)

    async def start(self, worker_id: int) -> EngineConfig:
        threading.Thread(target=self.is_over.wait, daemon=True, name="scheduler").start()
        return await super().start(worker_id)


@breaks("ThreadsLeftByCleanup")
class ForgetsItsPool(Toy):
    async def start(self, worker_id: int) -> EngineConfig:
        self.pool = ThreadPoolExecutor(1)
        POOLS.append(self.pool)
        self.pool.submit(int).result()
        return await super().start(worker_id)


@breaks("TasksLeftByStream", "TasksLeftByCleanup")
class LeavesATaskBehindEachStream(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        spawn(anyio.sleep_forever)
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


@breaks("ThreadsLeftByStream", "ThreadsLeftByCleanup")
class LeavesAThreadBehindAStreamThatIsCut(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        is_over = threading.Event()
        RELEASED.append(is_over)
        threading.Thread(target=is_over.wait, daemon=True).start()
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk
        is_over.set()


RELEASED: list[threading.Event] = []
POOLS: list[ThreadPoolExecutor] = []
TASKS: list[Any] = []


@pytest.fixture(autouse=True)
def _end_what_is_left() -> Any:
    yield
    TASKS.clear()
    for event in RELEASED:
        event.set()
    for pool in POOLS:
        pool.shutdown()


class Scheduled(Toy):
    """One task makes the tokens of all requests; a request is removed when its stream is closed, or by `abort`."""

    def __init__(self) -> None:
        self.waiting: dict[str, anyio.Event] = {}
        self.news = anyio.Event()

    async def background(self) -> None:
        while True:
            if not self.waiting:
                self.news = anyio.Event()
                await self.news.wait()
            await self.step()
            for event in self.waiting.values():
                event.set()

    async def step(self) -> None:
        await anyio.sleep(TOKEN_S)

    async def wait(self, context: GenerateContext) -> None:
        self.waiting[context.id] = event = anyio.Event()
        self.news.set()
        await event.wait()

    async def abort(self, context: GenerateContext) -> None:
        self.done(context)

    def done(self, context: GenerateContext) -> None:
        if (event := self.waiting.pop(context.id, None)) is not None:
            event.set()

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        try:
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.closed(context)

    def closed(self, context: GenerateContext) -> None:
        self.done(context)


@breaks("AbortIgnored")
class GoesOnBehindAnAbort(Scheduled):
    """Only a close removes a request."""

    async def abort(self, context: GenerateContext) -> None:
        """Record the abort and do nothing else."""

    def closed(self, context: GenerateContext) -> None:
        if not context.is_stopped:
            self.done(context)


@breaks("WorkLeftByStream")
class GoesOnBehindAClose(Scheduled):
    """Only an abort removes a request."""

    def closed(self, context: GenerateContext) -> None:
        if context.is_stopped:
            self.done(context)


# -- the loop


@breaks("LoopBlocked")
class SleepsBeforeItsFirstToken(Toy):
    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        time.sleep(0.3)  # noqa: ASYNC251  (that is its fault)
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


@breaks("LoopBlocked")
class SleepsBeforeEachToken(Toy):
    async def wait(self, context: GenerateContext) -> None:
        time.sleep(0.01)  # noqa: ASYNC251  (that is its fault)


@breaks("LoopBlocked")
class ComputesBeforeEachToken(Toy):
    async def wait(self, context: GenerateContext) -> None:
        end_s = time.perf_counter() + 0.01
        while time.perf_counter() < end_s:
            pass


@breaks("LoopBlocked")
class SleepsInItsBackground(Scheduled):
    async def step(self) -> None:
        time.sleep(0.01)  # noqa: ASYNC251  (that is its fault)
        await anyio.sleep(TOKEN_S)


@pytest.mark.parametrize("factory", [Toy, Scheduled])
async def test_a_right_engine_passes(factory: Any) -> None:
    await run_conformance(factory)


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_broken_engine_fails_its_check_and_no_other(broken: BrokenEngine) -> None:
    await expect_its_failures(broken)


@pytest.mark.slow
async def test_a_loop_blocked_for_two_seconds_is_found_by_the_second_look() -> None:
    looks = 0

    class Loads(Toy):
        async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
            nonlocal looks
            looks += 1
            time.sleep(2)  # noqa: ASYNC251  (that is its fault)
            async with aclosing(super().generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk

    assert await names_of(Loads) == ["LoopBlocked"]
    assert looks == 2


async def test_one_long_turn_is_no_blocked_loop() -> None:
    """A pause as on a busy machine, or while a module is imported."""

    class LoadsOnce(Toy):
        is_loaded = False

        async def wait(self, context: GenerateContext) -> None:
            if not self.is_loaded:
                self.is_loaded = True
                time.sleep(0.3)  # noqa: ASYNC251  (once)
            await super().wait(context)

    await run_conformance(LoadsOnce)


async def test_asyncio_scopes_held_over_a_yield_are_found(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    if anyio_backend[0] != "asyncio":
        pytest.skip("there are none")
    before = len(BROKEN)
    within("LockHeldOverYield", one(asyncio.Lock))
    within("CancelScopeHeldOverYield", lambda engine: asyncio.timeout(3600))
    within("TaskGroupHeldOverYield", lambda engine: asyncio.TaskGroup())
    added, BROKEN[before:] = BROKEN[before:], []
    for broken in added:
        await expect_its_failures(broken)


async def test_trio_scopes_held_over_a_yield_are_found(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    if anyio_backend[0] != "trio":
        pytest.skip("there are none")
    before = len(BROKEN)
    within("LockHeldOverYield", one(trio.Lock))
    within("CancelScopeHeldOverYield", lambda engine: trio.move_on_after(3600))
    within("TaskGroupHeldOverYield", lambda engine: trio.open_nursery())
    added, BROKEN[before:] = BROKEN[before:], []
    for broken in added:
        await expect_its_failures(broken)
