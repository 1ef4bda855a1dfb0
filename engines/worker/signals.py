"""Running a worker as a program: what the signals do, and the time after which it must have ended.

| what comes                        | what happens                                     |
|-----------------------------------|--------------------------------------------------|
| the first signal                  | an orderly end is asked for                      |
| the second                        | the process ends with 128 and its number         |
| the deadline after it was asked   | the process ends with 911                        |

Where the event loop is blocked, or what hangs cannot be cancelled, a `ProcessWatch` does the last two.

Source: dynamo lib/backend-common/src/worker.rs, Worker::run. Other than there the second signal counts: who presses
Ctrl-C twice does not want to wait. `docker stop` sends one signal and then waits, so it gets the orderly end.
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
"""Of the loop, in which a signal that is there already is heard before the engine is started."""

Signals = Callable[[], AbstractContextManager[AsyncIterator[int]]]
"""Installs the handlers; the numbers of the signals come out until it is left."""


def termination_signals() -> AbstractContextManager[AsyncIterator[int]]:
    """SIGINT and SIGTERM of this process."""
    return anyio.open_signal_receiver(*SIGNALS)


async def run_until_signalled(
    host: Callable[[], Awaitable[None]],
    asked: Control,
    signals: Signals,
    *,
    exit: Exit,
    deadline_s: float,
    watch: ProcessWatch | None = None,
) -> None:
    """Runs `host`, which ends by itself after `asked` is stopped; see the module. Raises what it raises.

    Where `exit` returns, `host` is cancelled. The handlers are installed before `host` begins; raises Unknown if that
    fails. The `watch`, for signals of the process, holds the table where the loop is blocked.
    """
    failure: Exception | None = None
    with _installed(signals) as numbers, ExitStack() as listening:
        if watch is not None:
            listening.enter_context(watch.listening())
            listening.callback(asked.on_stop(watch.begin_end))  # which returns what takes the callback back
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
                    asked.stop()

            async def end_overdue() -> None:
                await asked.stopped()
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
