"""Running a worker as a program: its signals, and the deadline of its end.

| what comes                        | what happens                                     |
|-----------------------------------|--------------------------------------------------|
| the first signal                  | an orderly end begins                            |
| the second                        | the process ends with 128 and its number         |
| the deadline after that           | the process ends with 911                        |

Where the event loop is blocked, or what hangs cannot be cancelled, a `ProcessWatch` does the last two.

Source: dynamo lib/backend-common/src/worker.rs, Worker::run. Other than there the second signal counts: two Ctrl-C
end the process at once. `docker stop` sends one signal and then waits, so it gets the orderly end.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import anyio
from anyio.lowlevel import checkpoint

from pipeline import Control, Unknown

from .process_watch import OVERDUE, SIGNALS, Exit, ProcessWatch

_log = logging.getLogger(__name__)

_TURNS = 4
"""Turns of the loop before the engine is started, in which a signal that is pending already is received."""

Signals = Callable[[], AbstractContextManager[AsyncIterator[int]]]
"""Installs the handlers; yields the numbers of the signals until it is left."""


def termination_signals() -> AbstractContextManager[AsyncIterator[int]]:
    """SIGINT and SIGTERM of this process."""
    return anyio.open_signal_receiver(*SIGNALS)


async def run_until_signalled(
    host: Callable[[], Awaitable[None]],
    shutdown: Control,
    signals: Signals,
    *,
    exit: Exit,
    deadline_s: float,
    watch: ProcessWatch | None = None,
) -> None:
    """Run `host`, which ends by itself after `shutdown` is stopped; see the module. Raises what it raises.

    Where `exit` returns, `host` is cancelled. The handlers are installed before `host` begins; raises Unknown if that
    fails. The `watch`, for signals of the process, holds the table where the loop is blocked.
    """
    failure: Exception | None = None
    with _installed(signals) as numbers, ExitStack() as listening:
        if watch is not None:
            listening.enter_context(watch.listening())
            listening.callback(shutdown.on_stop(watch.begin_end))  # which returns what takes the callback back
        async with anyio.create_task_group() as tasks:

            async def obey() -> None:
                is_first = True
                async for number in numbers:
                    if not is_first:
                        _log.warning("signal %d again: ending at once", number)
                        exit(128 + number)
                        tasks.cancel_scope.cancel()
                        return
                    is_first = False
                    _log.info("signal %d: ending", number)
                    shutdown.stop()

            async def end_overdue() -> None:
                await shutdown.stopped()
                await anyio.sleep(deadline_s)
                _log.error("not ended after %g s: ending with %d", deadline_s, OVERDUE)
                exit(OVERDUE)
                tasks.cancel_scope.cancel()

            tasks.start_soon(obey)
            tasks.start_soon(end_overdue)
            for _ in range(_TURNS):
                await checkpoint()
            try:
                await host()
            except Exception as error:  # as it is, not inside a group
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


@contextmanager
def _installed(signals: Signals) -> Iterator[AsyncIterator[int]]:
    with ExitStack() as stack:
        try:
            numbers = stack.enter_context(signals())
        except Exception as error:
            raise Unknown(f"cannot listen to signals: {error}") from error
        yield numbers
