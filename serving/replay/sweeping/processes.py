"""Tasks in processes of `anyio.to_process`; the calling thread waits for them, because only it receives Ctrl-C."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import lru_cache, partial
from mmap import mmap
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from tempfile import TemporaryDirectory
from typing import Any

from anyio import BrokenWorkerProcess, CancelScope, CapacityLimiter, sleep, to_process
from anyio.from_thread import start_blocking_portal

from pipeline import BackendError

from ...garbage import settle
from ...log_format import log_to_stderr

Work = Callable[[Any, Any, Callable[[int], object]], Any]
"""A function of a module: from what all tasks share, a task, and a callback for its progress, to the task's result."""
OnProgress = Callable[[int, int], object]
"""Called with the index of a task and its progress."""
OnResult = Callable[[int, Any, BaseException | None], object]
"""Called with the index of a task and its result, or None and its error."""


def run_in_processes(
    work: Work, shared: Any, tasks: Sequence[Any], jobs: int, on_progress: OnProgress, on_result: OnResult
) -> None:
    """Run all tasks, begun in their order, at most `jobs` at a time; after an error the others continue.

    What processes write to their standard error is written to ours. Raise BackendError if a process cannot be started.
    All processes have ended when this returns or raises.
    """
    if "__main__" not in sys.modules:  # anyio imports the script again in each process, under another name
        raise RuntimeError('a script that calls this needs its `if __name__ == "__main__"`')
    with ExitStack() as stack:
        before = pthread_sigmask(SIG_BLOCK, {SIGINT})  # inherited by the thread of the loop and by all processes
        stack.callback(pthread_sigmask, SIG_SETMASK, before)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="penstock-")))
        common = (work, shared, os.getpid(), logging.getLogger().getEffectiveLevel())
        (folder / "common").write_bytes(pickle.dumps(common, pickle.HIGHEST_PROTOCOL))
        (folder / "counts").write_bytes(bytes(8 * len(tasks)))
        (folder / "errors").touch()
        portal, limiter = stack.enter_context(start_blocking_portal()), CapacityLimiter(jobs)
        places = {portal.start_task_soon(_do_there, limiter, folder, *one): one[0] for one in enumerate(tasks)}
        _wait(places, folder, before, on_progress, on_result)


def _wait(
    places: Mapping[Future[Any], int], folder: Path, mask: Iterable[int], on_progress: OnProgress, on_result: OnResult
) -> None:
    """Call the callbacks until all tasks have ended. Interrupts arrive between calls only, if `mask` lets them.

    None arrives in `wait`, which would keep the locks of futures that the thread of the loop needs.
    """
    waiting, counts = set(places), _counts(folder)
    with (folder / "errors").open(errors="replace") as errors:
        while waiting:
            try:
                pthread_sigmask(SIG_SETMASK, mask)  # raises an interrupt that has come
            finally:
                pthread_sigmask(SIG_BLOCK, {SIGINT})
            done, waiting = wait(waiting, 0.1, FIRST_COMPLETED)
            sys.stderr.write(errors.read())
            for at in filter(counts.__getitem__, map(places.__getitem__, waiting)):
                on_progress(at, counts[at])
            for future in sorted(done, key=places.__getitem__):
                if isinstance(error := future.exception(), BrokenWorkerProcess):
                    raise BackendError(f"no process can be started: {error.__cause__!r}") from error
                on_result(places[future], None if error else future.result(), error)


async def _do_there(limiter: CapacityLimiter, folder: Path, at: int, task: Any) -> Any:
    run = partial(to_process.run_sync, limiter=CapacityLimiter(1))
    own = pickle.dumps(task)  # as bytes: anyio loses its process over a value that the process cannot unpickle
    async with limiter:
        with CancelScope(shield=True):  # a process that is cancelled while it starts would stay behind
            try:
                await run(os.getpid)
            except BrokenWorkerProcess:
                await sleep(0.5)  # anyio has killed it without waiting for its end
                raise
        try:
            return await run(_do, folder, at, own, cancellable=True)
        except BrokenWorkerProcess as error:
            raise BackendError("its process crashed or was killed") from error


def _do(folder: Path, at: int, task: bytes) -> Any:
    work, shared, starter, counts = _common(folder)

    def on_progress(count: int) -> None:
        counts[at] = count
        if os.getppid() != starter:  # the starting process is gone
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

    return work(shared, pickle.loads(task), on_progress)


@lru_cache(maxsize=1)
def _common(folder: Path) -> tuple[Work, Any, int, memoryview]:
    """Return what a process reads once, and redirect its standard error, which anyio discards, to a file."""
    sys.stderr = (folder / "errors").open("a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    work, shared, starter, log_level = pickle.loads((folder / "common").read_bytes())
    log_to_stderr(log_level)
    settle()
    return work, shared, starter, _counts(folder)


def _counts(folder: Path) -> memoryview:
    with (folder / "counts").open("r+b") as file:
        return memoryview(mmap(file.fileno(), 0)).cast("Q")
