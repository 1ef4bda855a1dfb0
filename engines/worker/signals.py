"""Running a worker as a program: its signals, and the deadline of its end.

`run_until_signalled` acts on the event loop: at the first signal an orderly end begins, at the second one, or at the
deadline, the process ends. Source: dynamo lib/backend-common/src/worker.rs, Worker::run. Other than there the second
signal counts: two Ctrl-C end the process at once. `docker stop` sends one signal and then waits, so it gets the orderly
end.

ProcessWatch: a thread that ends the process where its event loop cannot.

A program ends in order on its event loop. An engine may hold that up: it blocks the loop, sits in a thread that cannot
be cancelled, swallows its cancellation, or leaves a thread behind that the interpreter waits for. The watch needs no
loop:

| what comes                                   | what happens                                              |
|----------------------------------------------|-----------------------------------------------------------|
| the first SIGINT or SIGTERM, or `begin_end`  | nothing at first: the program ends in order               |
| a second signal                              | `second_s` later the process ends with 128 and its number |
| `deadline_s` after the first, and a moment   | the process ends with 911                                 |

Signals reach it by Python's wakeup file descriptor, to which the handler in C writes whatever Python does. The event
loops use it too, so the watch installs itself before them and forwards what it reads. Its own handlers release the
interpreter for a moment: native code that holds it, but checks for signals, as `re` does, is ended that way.

Native code that holds the interpreter and checks for no signals stops every thread. For this case the deadline is set
in `faulthandler` as well, whose own thread needs no interpreter: it prints all stacks and ends the process with 1.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import RLock, Thread, main_thread
from threading import enumerate as enumerate_threads
from typing import Any, Self

import anyio
from anyio.lowlevel import checkpoint

from pipeline import Control, Unknown

_log = logging.getLogger(__name__)

OVERDUE = 911
"""Exit code of a process that did not end in time."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Exit = Callable[[int], object]
"""Ends the process with this code, at once."""

_LOOP_S = 0.5
"""Time for a working loop to act by itself at the deadline, in seconds."""
_HELD_S = 1.0
"""Further time after which native code counts as holding the interpreter."""
_LOG_S = 0.5
"""Time for the last log records: a full pipe must not hold up the end."""
_COUNTED_S = 1.0
"""How long a handler waits for the watch at most."""


class ProcessWatch:
    """See the module. `start` it in any thread, and install its handlers in the main one, by `listening`.

    Its times are real ones, of the system's monotonic clock: it acts where no event loop and no clock of one can.
    """

    def __init__(self, deadline_s: float, *, second_s: float = 0.0, exit: Exit = os._exit) -> None:
        self._deadline_s, self._second_s, self._exit = deadline_s, second_s, exit
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = Thread(target=self._run, name="ProcessWatch", daemon=True)
        self._lock = RLock()
        self._forward_to = -1
        self._replaced = -1
        """The wakeup file descriptor that this one has replaced."""
        self._counted: SimpleQueue[int] = SimpleQueue()
        self._signals = 0
        self._due: tuple[float, int, str] | None = None
        self._is_stopped = self._is_over = False

    @property
    def is_ending(self) -> bool:
        """Whether the end has begun: by a signal, which may have come to an event loop too late, or by `begin_end`."""
        return self._due is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the watch; nothing more happens."""
        with self._lock:
            self._is_stopped = True
        self._wake()
        self._thread.join()
        if self._due is not None:
            faulthandler.cancel_dump_traceback_later()
        self._reader.close()
        self._writer.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def listening(self) -> Iterator[bool]:
        """Receive the signals while the block runs: in the main thread, inside of other installers of handlers.

        Give whether the end has begun: the signal for it has come before, and reaches no other handler.
        """
        wakeup, has_begun = self._install()
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in handlers.items():
            self._handle(number, handler)
        try:
            yield has_begun
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            with self._lock:
                self._forward_to = -1
            signal.set_wakeup_fd(wakeup)

    def begin_end(self) -> None:
        """Start the deadline of the end. From any thread; the first call counts, one after `stop` does not."""
        with self._lock:
            if self._due is None and not self._is_stopped:
                text = f"not ended after {self._deadline_s:g} s: ending with {OVERDUE}"
                self._set_due(self._deadline_s + _LOOP_S, OVERDUE, text)
        self._wake()

    def keep_listening(self) -> None:
        """Receive the signals from now on, in the main thread: called where nothing else does, as before a loop has its
        handlers, and when it has just removed them."""
        self._install()
        with self._lock:
            self._forward_to = -1  # the loop that has it may close it
        for number in SIGNALS:
            self._handle(number, None)

    def over(self) -> None:
        """Called in the main thread when nothing is left but the end of the process.

        Threads may hold that up: from now on the first signal counts as a second one, and the deadline runs. Where
        there are none, signals that still come do not change the exit code any more.
        """
        self.begin_end()
        if any(not thread.daemon and thread is not main_thread() for thread in enumerate_threads()):
            self._is_over = True
            self.keep_listening()
        else:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    # -- in the main thread

    def _install(self) -> tuple[int, bool]:
        """Install itself as the wakeup file descriptor. Return the one before, and whether the end had begun then."""
        own = self._writer.fileno()
        wakeup = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
        if wakeup == own:  # of `keep_listening`; uvloop installs its own when it begins to run, and not again
            wakeup = self._replaced
        self._replaced = wakeup
        with self._lock:  # a signal is either counted before, or forwarded
            self._forward_to = wakeup
            return wakeup, self.is_ending

    def _handle(self, number: int, before: Any) -> None:
        def handler(number: int, frame: Any) -> None:
            if not self._wait_until_counted():  # another descriptor has replaced this one
                self._wake(number)
                self._wait_until_counted()
            if callable(before):
                before(number, frame)

        signal.signal(number, handler)
        signal.siginterrupt(number, False)

    def _wait_until_counted(self) -> bool:
        """Release the interpreter until the watch has counted a signal; return whether it has, in time."""
        try:
            self._counted.get(timeout=_COUNTED_S)
        except Empty:
            return False
        return True

    def _wake(self, number: int = 0) -> None:
        with suppress(OSError):
            self._writer.send(bytes([number]))

    # -- in the watch's own thread

    def _run(self) -> None:
        while not self._is_stopped:
            due = self._due
            self._reader.settimeout(None if due is None else max(due[0] - time.monotonic(), 0.001))
            with suppress(TimeoutError):
                for number in self._reader.recv(4096):
                    self._take(number)
            if (due := self._due) is not None and due[0] <= time.monotonic() and not self._is_stopped:
                self._end(due[1], due[2], shows_stacks=True)
                return

    def _take(self, number: int) -> None:
        with self._lock:
            if number in SIGNALS:
                self._count(number)
            if number:
                self._forward(number)
        if number in SIGNALS:
            self._counted.put(number)

    def _count(self, number: int) -> None:
        self._signals += 1
        if self._signals == 1 and not self._is_over:
            self.begin_end()
            return
        code = 128 + number
        if self._is_over or not self._second_s:
            self._end(code, f"signal {number} again: ending at once")
            return
        text = f"signal {number} again, and not ended {self._second_s:g} s later: ending with {code}"
        with self._lock:
            if self._signals == 2:
                self._set_due(self._second_s, code, text)

    def _forward(self, number: int) -> None:
        with self._lock, suppress(OSError):  # a full buffer has woken the loop already
            if self._forward_to >= 0:
                os.write(self._forward_to, bytes([number]))

    def _set_due(self, after_s: float, code: int, text: str) -> None:
        self._due = (time.monotonic() + after_s, code, text)
        if self._exit is os._exit and sys.__stderr__ is not None:
            with suppress(OSError, ValueError):  # there is no such file
                faulthandler.dump_traceback_later(after_s + _HELD_S, exit=True, file=sys.__stderr__)

    def _end(self, code: int, text: str, *, shows_stacks: bool = False) -> None:
        def log() -> None:
            _log.error(text)
            if shows_stacks and sys.__stderr__ is not None:
                faulthandler.dump_traceback(file=sys.__stderr__)
            sys.stdout.flush()
            sys.stderr.flush()

        logging_thread = Thread(target=log, daemon=True)
        logging_thread.start()
        logging_thread.join(_LOG_S)
        self._exit(code)


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
    fails. The `watch`, for signals of the process, holds the table where the loop is blocked. If it has had a signal
    already, `shutdown` is stopped before `host` begins.
    """
    failure: Exception | None = None
    with _installed(signals) as numbers, ExitStack() as listening:
        if watch is not None:
            has_begun = listening.enter_context(watch.listening())
            listening.callback(shutdown.on_stop(watch.begin_end))  # which returns what takes the callback back
            if has_begun:
                shutdown.stop()
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
