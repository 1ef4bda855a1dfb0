"""ComputeThread: the one thread that computes, and the calls that wait for it.

Tensors belong to it. torch keeps threads of its own for each thread that calls it, so a second one would double them.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar, cast

from anyio import CancelScope, Event

from pipeline import EngineShutdown
from pipeline.loop import call_soon, running_loop, time_held

T = TypeVar("T")


class ComputeThread:
    """Runs functions one after the other, in the order they came. All methods are called in one event loop."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._is_closed = False
        self._ended = Event()
        self._thread = Thread(target=self._serve, args=(running_loop(),), name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in the thread, or raise what it raises. Raise EngineShutdown after `close`.

        A cancelled call returns at once; its work still comes to its turn and its end.
        """
        if self._is_closed:
            raise EngineShutdown("the engine computes no more")
        job = _Job(work)
        self._jobs.put(job)
        with time_held():
            await job.done.wait()
        return job.result()

    async def close(self) -> None:
        """End the thread after the work it has. Idempotent; a cancellation does not end the wait."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
        with CancelScope(shield=True), time_held():
            await self._ended.wait()
        self._thread.join()

    def _serve(self, loop: Any) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job.do()
                del job  # what it holds, such as the KV of a prompt, is not kept until the next one
        finally:
            call_soon(loop, self._ended.set)


class _Job(Generic[T]):
    """Work and its outcome."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.done = Event()
        self._work: Callable[[], T] | None = work
        self._loop = running_loop()
        self._value: T | None = None
        self._error: BaseException | None = None

    def do(self) -> None:
        """Called in the thread."""
        work, self._work = self._work, None
        assert work is not None, "it is done once"
        try:
            self._value = work()
        except BaseException as error:  # raised in the task that waits
            self._error = error
        call_soon(self._loop, self.done.set)

    def result(self) -> T:
        if (error := self._error) is not None:
            self._error = None
            raise error
        return cast("T", self._value)
