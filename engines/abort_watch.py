"""AbortWatch: calls `abort` at most once, when a request is stopped or killed and its engine may be told.

| role                 | what happens                        | abort                             |
|----------------------|-------------------------------------|-----------------------------------|
| any                  | the stream ends, or is dropped      | never                             |
| all but decode       | stop or kill                        | at once                           |
| decode, token seen   | stop or kill                        | at once                           |
| decode, none so far  | stop or kill                        | when the first token fires        |

Source: dynamo lib/backend-common/src/adapter.rs, the cancellation monitor. Other than there it is no task.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline import Control

from .generate_context import FirstToken


class AbortWatch:
    """Watches one request from `begin` to `end`."""

    __slots__ = ("_abort", "_first_token", "_forget", "_is_over")

    def __init__(self, first_token: FirstToken | None, abort: Callable[[], object]) -> None:
        self._first_token = first_token
        self._abort = abort
        self._forget: Callable[[], None] | None = None
        self._is_over = False

    def begin(self, control: Control) -> None:
        self._forget = control.on_stop(self._stopped)

    def end(self) -> None:
        """The stream is over: no abort from here on."""
        self._is_over = True
        if self._forget is not None:
            self._forget()

    def _stopped(self) -> None:
        if self._first_token is None:
            self._call()
        else:
            self._first_token.on_fire(self._call)

    def _call(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._abort()
