"""Once: a reservation's release, done exactly once whoever comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVarTuple, Unpack

from .loop import call_soon, running_loop

Arguments = TypeVarTuple("Arguments")


class Once:
    """Runs its action, with these arguments, on the first `release()` and never again.

    Give one to the stream that keeps a reservation (`ResponseStream(items, context, once)`) and release it in the
    generator's `finally` too: the stream covers the ways out on which the generator never started. The action must
    not wait, and not ask anyio for the loop (its time, a task): after a drop it is a plain callback, in which anyio
    finds none. What it raises goes to the caller of `release`, and is logged after a drop.
    """

    __slots__ = ("_action", "_arguments", "_loop")

    def __init__(self, action: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> None:
        self._action: Callable[..., object] | None = action
        self._arguments: tuple[Any, ...] = arguments  # half of what a closure over them takes, as long as it is held
        self._loop = running_loop()

    @property
    def is_released(self) -> bool:
        return self._action is None

    def release(self) -> None:
        """Runs the action, unless that has been done."""
        action, self._action = self._action, None
        arguments, self._arguments = self._arguments, ()
        if action is not None:
            action(*arguments)

    def cancel(self) -> bool:
        """Drops the action without running it; False if it was released or cancelled before."""
        action, self._action = self._action, None
        self._arguments = ()
        return action is not None

    def release_soon(self) -> None:
        """Release on the next turn of the loop it was made in; safe in finalisers and threads. Raises nothing."""
        if self._action is not None:
            call_soon(self._loop, self.release)
