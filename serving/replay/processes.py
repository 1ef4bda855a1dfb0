"""Tasks in processes of their own: each has its end, what one breaks breaks only itself.

A process takes task after task. It is started anew, not forked, and has what all tasks need in common once. One that
dies takes its task along, with the reason, and another one takes its place. Nothing is left behind: leaving, by an
error or an interrupt too, ends them all; a process whose starter is gone ends by itself.

Not an executor of `concurrent.futures`: one process that dies fails all that is left there, nothing says which task it
had, and its processes go on with the next task at Ctrl-C (python/cpython issue 125886).
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any, Protocol

from attrs import define, field

from pipeline import BackendError

Heard = Callable[[int], object]
_CALLS_APART_S = 0.05
_LEVEL_FORMAT = "%(levelname)s %(name)s: %(message)s"


class Work(Protocol):
    """A function of a module, so that another process finds it."""

    def __call__(self, shared: Any, task: Any, heard: Heard, /) -> Any:
        """The result of a task; tells how far it is. What it raises is the end of this task only."""
        ...


class Listener(Protocol):
    """Hears what becomes of tasks, by their places, in the process that started it all."""

    def heard(self, task: int, count: int) -> None:
        """How far a task is."""
        ...

    def ended(self, task: int, result: Any) -> None:
        """A task has its result."""
        ...

    def failed(self, task: int, problem: str) -> None:
        """A task has none."""
        ...


def run_tasks(work: Work, shared: Any, tasks: Sequence[Any], jobs: int, listener: Listener) -> None:
    """Does all tasks, begun in their order, at most `jobs` at a time; one at a time happens in this process.

    Raises BackendError if a process ends before its first task: then none would do better.
    """
    if min(jobs, len(tasks)) < 2:
        for at, task in enumerate(tasks):
            _do_here(work, shared, at, task, listener)
        return
    pool = _Pool(work, pickle.dumps(shared, pickle.HIGHEST_PROTOCOL), tasks, deque(range(len(tasks))), listener)
    try:
        pool.run(jobs)
    finally:
        pool.end()


def _do_here(work: Work, shared: Any, at: int, task: Any, listener: Listener) -> None:
    try:
        result = work(shared, task, lambda count: listener.heard(at, count))
    except Exception as error:
        listener.failed(at, said_of(error))
    else:
        listener.ended(at, result)


def said_of(error: BaseException) -> str:
    """An error in one line; what it is only where its text alone would not say it."""
    text = " ".join(str(error).split())
    own = type(error).__module__.startswith("pipeline")
    return text if own and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


@define(eq=False)
class _Child:
    """A process, the pipe to it, and the place of the task it has; None before it is ready."""

    process: SpawnProcess
    pipe: Connection
    task: int | None = None
    is_ready: bool = False


@define
class _Pool:
    work: Work
    shared: bytes
    tasks: Sequence[Any]
    waiting: deque[int]
    listener: Listener
    children: list[_Child] = field(factory=list)

    def run(self, jobs: int) -> None:
        while self.waiting or self.children:
            starting = sum(not child.is_ready for child in self.children)
            while len(self.children) < jobs and starting < len(self.waiting):
                self.children.append(_started(self.work))
                starting += 1
            by_pipe = {child.pipe: child for child in self.children}
            for pipe in wait(list(by_pipe)):
                child = by_pipe[pipe]  # type: ignore[index]
                try:
                    message = child.pipe.recv()
                except (EOFError, OSError):
                    self._died(child)
                else:
                    self._take(child, *message)

    def _take(self, child: _Child, kind: str, value: Any) -> None:
        """What a process says: it is ready, has come so far, or has ended its task in one way or the other."""
        if kind == "heard":
            assert child.task is not None
            self.listener.heard(child.task, value)
            return
        task, child.task = child.task, None
        with contextlib.suppress(OSError):  # it died: its pipe says so next
            if kind == "ready":
                child.is_ready = True
                child.pipe.send_bytes(self.shared)
            self._give(child)
        if task is not None:
            (self.listener.ended if kind == "ended" else self.listener.failed)(task, value)

    def _give(self, child: _Child) -> None:
        """The next task; without one it is told to end, and its pipe will say that it did."""
        if not self.waiting:
            child.pipe.send(None)
            return
        child.pipe.send(self.tasks[self.waiting[0]])  # one that cannot be sent is still there for another process
        child.task = self.waiting.popleft()

    def _died(self, child: _Child) -> None:
        child.process.join()
        child.pipe.close()
        self.children.remove(child)
        code = child.process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not child.is_ready:
            raise BackendError(f"a process {how} before it could begin")
        if child.task is not None:
            self.listener.failed(child.task, f"its process {how}")

    def end(self) -> None:
        for child in self.children:
            child.process.terminate()
        for child in self.children:
            child.process.join()
            child.pipe.close()
        self.children.clear()


def _started(work: Work) -> _Child:
    ours, its = get_context("spawn").Pipe()
    process = get_context("spawn").Process(
        target=_serve, args=(its, work, logging.getLogger().getEffectiveLevel()), daemon=True
    )
    with _without_interrupts():
        process.start()
    its.close()
    return _Child(process, ours)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started now never hears of Ctrl-C, from its first moment on: who started it ends it."""
    if not hasattr(signal, "pthread_sigmask"):  # a system without
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, work: Work, log_level: int) -> None:
    """What such a process does. It ends when it is told to, or when nobody is there any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format=_LEVEL_FORMAT)
    with contextlib.suppress(EOFError, OSError):
        pipe.send(("ready", None))
        shared = pickle.loads(pipe.recv_bytes())
        while (task := pipe.recv()) is not None:
            try:
                answer = ("ended", work(shared, task, _seldom(pipe)))
            except Exception as error:
                logging.getLogger(__name__).debug("it was raised here", exc_info=error)
                answer = ("failed", said_of(error))
            pipe.send(answer)


def _seldom(pipe: Connection) -> Heard:
    """Says only what comes some time after the last. With nobody there to hear it, this process has no use."""
    last_s = monotonic()

    def heard(count: int) -> None:
        nonlocal last_s
        now_s = monotonic()
        if now_s - last_s < _CALLS_APART_S:
            return
        last_s = now_s
        try:
            pipe.send(("heard", count))
        except OSError:
            raise SystemExit(1) from None

    return heard
