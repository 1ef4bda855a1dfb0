"""Separate what foreign code raises from what ends the task that runs it.

An engine, a tokenizer or a user's function may raise anything: `sys.exit()`, KeyboardInterrupt, the panic of a Rust
library, a CancelledError of its own task. Not caught, each of them ends the event loop, or leaves a request without an
answer. The places that call foreign code therefore catch BaseException:

    except BaseException as error:
        raise_if_ours(error)
        raise to_error(error) from error        # `with foreign_errors():` does both

| exception                           | it ends the task, and is raised on                                |
|-------------------------------------|-------------------------------------------------------------------|
| an Exception                        | never                                                             |
| the loop's cancellation             | while the running task is being cancelled                         |
| KeyboardInterrupt                   | unless a statement of foreign code raised it: it is a real Ctrl-C |
| GeneratorExit                       | the same: a generator or a coroutine is being closed              |
| anything a signal handler raised    | always                                                            |
| an exception group                  | the part of it that ends the task; the rest is logged             |
| any other BaseException             | never                                                             |
"""

from __future__ import annotations

import asyncio
import dis
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from types import CodeType, TracebackType
from typing import Any

from anyio import NoEventLoopError, current_effective_deadline, get_cancelled_exc_class
from anyio.lowlevel import current_token

from .errors import PenstockError, to_error

_log = logging.getLogger(__name__)

_LOOPS = ("asyncio", "trio")
"""Libraries that raise KeyboardInterrupt themselves for a Ctrl-C."""

_RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})


def raise_if_ours(error: BaseException) -> None:
    """Raise the error again, or the part of it, that ends the task itself; return if foreign code alone raised it.

    To be called while the error is handled, in the task that caught it.
    """
    if isinstance(error, Exception):
        return
    if not isinstance(error, BaseExceptionGroup):
        if _is_ours(error):
            raise  # what its caller handles
        return
    ours, theirs = error.split(_is_ours)
    if ours is None:
        return
    if theirs is None:
        raise
    _log.error("foreign code failed while its task was ended", exc_info=theirs)
    raise ours


@contextmanager
def foreign_errors() -> Iterator[None]:
    """Raise PenstockErrors, and exceptions that end the task, unchanged; raise all others as `to_error` of them."""
    try:
        yield
    except PenstockError:
        raise
    except BaseException as error:
        raise_if_ours(error)
        raise to_error(error) from error


def _is_ours(error: BaseException) -> bool:
    if isinstance(error, Exception | BaseExceptionGroup):
        return False
    if isinstance(error, _cancellation()):
        return _is_cancelled()
    if _came_from_a_handler(error):
        return True
    raised_in = _raised_in(error)
    if isinstance(error, KeyboardInterrupt):
        return raised_in is None or raised_in.partition(".")[0] in _LOOPS
    return isinstance(error, GeneratorExit) and raised_in is None


def _cancellation() -> type[BaseException] | tuple[()]:
    """Return the class of the running loop's cancellations; without a loop there are none."""
    try:
        return get_cancelled_exc_class()
    except NoEventLoopError:
        return ()


def _is_cancelled() -> bool:
    """Return whether the running task is being cancelled, by a cancel scope or by the loop's own means."""
    if current_effective_deadline() == -inf:
        return True
    if not isinstance(current_token().native_token, asyncio.AbstractEventLoop):
        return False
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _raised_in(error: BaseException) -> str | None:
    """Return the module whose `raise` statement raised the error; None if none did.

    A signal or a close raises between two instructions.
    """
    traces = list(_traces(error))
    if not traces or dis.opname[traces[-1].tb_frame.f_code.co_code[traces[-1].tb_lasti]] not in _RAISES:
        return None
    return str(traces[-1].tb_frame.f_globals.get("__name__", ""))


def _came_from_a_handler(error: BaseException) -> bool:
    """Return whether the error was raised by an installed signal handler."""
    codes = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    return any(trace.tb_frame.f_code in codes for trace in _traces(error))


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _traces(error: BaseException) -> Iterator[TracebackType]:
    """The error's traceback, entry by entry: the place that caught it first, the place that raised it last."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next
