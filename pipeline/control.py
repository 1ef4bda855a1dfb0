"""Control: stop and kill, one object shared by every stage of a request.

A request runs, is stopped, is killed; the state only moves forward. *Stop* asks the producer to finish: what it has
made is still delivered and the stream ends on its own. *Kill* ends the stream at once and nothing more is delivered.

    parent.stop()  ──►  child 1, child 2, ..., then the parent change
                   ──►  callbacks of child 1, child 2, ..., then the parent run, waiters wake

Every method may be called from any thread. Once `stop` or `kill` has returned in any thread, the control and all that
is linked below it have that state; a callback that another thread has begun may still run then. Children are held
weakly, in the order they were linked.

Source: dynamo lib/runtime/src/pipeline/context.rs, Controller. Other than there, a late child inherits the state, a
stop never undoes a kill, dead children are forgotten, and a cycle of children ends.

ReleaseOnce: the release of a reservation, run exactly once, by the first caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import IntEnum
from threading import RLock
from typing import Any, TypeVarTuple, Unpack
from weakref import ref

from anyio.lowlevel import checkpoint

from .loop import LoopHandle, Wakeup, call_soon, running_loop

_log = logging.getLogger(__name__)


class State(IntEnum):
    """How far a request has come; only ever grows."""

    RUNNING = 0
    STOPPED = 1
    KILLED = 2


_CHILDREN_SWEPT_AT = 8
"""With so many children, and then whenever they have doubled, the dead ones are forgotten."""

# One lock for all: a stop changes its whole subtree under it, which is a few list operations for each control, and no
# foreign code runs meanwhile. Reentrant, because a finaliser or a signal handler that stops a request may run inside
# such an operation.
_lock = RLock()


class Control:
    """Stop, kill, and what waits for them."""

    __slots__ = ("__weakref__", "_children", "_children_limit", "_heading", "_retained", "_state", "_watchers")

    def __init__(self) -> None:
        self._state = State.RUNNING
        self._heading = State.RUNNING  # the state its children are being brought to; never behind `_state`
        self._children: list[ref[Control]] | None = None
        self._children_limit = _CHILDREN_SWEPT_AT
        self._watchers: list[_Watcher] | None = None
        self._retained: tuple[object, ...] = ()

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_stopped(self) -> bool:
        """True once stopped, and also once killed."""
        return self._state is not State.RUNNING

    @property
    def is_killed(self) -> bool:
        return self._state is State.KILLED

    def stop(self) -> None:
        """Ask for an early, orderly end. Idempotent; does nothing to a killed request.

        What a callback raises is logged. Only KeyboardInterrupt and SystemExit, which a signal may raise anywhere, go
        on to the caller, once every callback has run.
        """
        self._advance(State.STOPPED)

    stop_generating = stop

    def kill(self) -> None:
        """End the request at once; items in flight are lost. Idempotent. Callbacks are treated as in `stop`."""
        self._advance(State.KILLED)

    def stopped(self) -> Coroutine[Any, Any, None]:
        """Await stop or kill; returns at once if that has happened already."""
        return self._reached(State.STOPPED)

    def killed(self) -> Coroutine[Any, Any, None]:
        """Await kill; a plain stop does not wake it."""
        return self._reached(State.KILLED)

    def on_stop(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Calls back once, on stop or kill, whichever comes first; returns what takes the callback back.

        The callback runs in the loop that is running now: at once when stopped from that thread, else on the
        loop's next turn, as a plain callback in which anyio itself may find no loop. It must not wait. What it raises
        is logged. A stop from a signal handler wakes the loop; the callback then runs at once on asyncio and on the
        next turn on trio. If the request is stopped already, the callback runs before this returns, and what it raises
        goes to the caller.
        """
        return self._watch(State.STOPPED, callback)

    def on_kill(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Like `on_stop`, for kill only."""
        return self._watch(State.KILLED, callback)

    def link_child(self, child: Control) -> None:
        """Forward stop and kill to the child from now on, before this one changes; a late child catches up."""
        changed: list[Control] = []
        with _lock:
            if self._children is None:
                self._children = []
            elif len(self._children) >= self._children_limit:
                self._children = [r for r in self._children if r() is not None]
                self._children_limit = max(_CHILDREN_SWEPT_AT, 2 * len(self._children))
            self._children.append(ref(child))
            if self._heading is not State.RUNNING:
                changed = child._change_all(self._heading)
        _call_back(changed)

    def retain(self, owned: object) -> None:
        """Keep the object alive as long as this control; the same object again changes nothing."""
        with _lock:
            for kept in self._retained:
                if kept is owned:
                    return
            self._retained = (*self._retained, owned)

    def _advance(self, target: State) -> None:
        """Bring the whole subtree to the state, then run what that makes due; in both, children before parents."""
        with _lock:
            changed = self._change_all(target)
        _call_back(changed)

    def _change_all(self, target: State) -> list[Control]:
        """Set the state of the subtree; return what has changed, children first. Called with the lock held."""
        if self._children is None and self._state < target:  # as most are
            self._heading = self._state = target
            return [self]
        # A stack instead of recursion: chains of sub-requests may be long. A control is pushed a second time, to
        # change itself, below its children.
        changed: list[Control] = []
        seen: set[Control] = set()
        todo: list[tuple[Control, bool]] = [(self, False)]
        while todo:
            control, children_done = todo.pop()
            if control._state >= target:
                continue
            if children_done:
                control._state = target
                changed.append(control)
            elif control not in seen:
                seen.add(control)
                control._heading = max(control._heading, target)
                todo.append((control, True))
                todo.extend((child, False) for r in reversed(control._children or ()) if (child := r()) is not None)
        return changed

    def _take_due(self) -> list[_Watcher]:
        """Return the watchers that the state has made due, each once."""
        if not self._watchers:
            return []
        with _lock:
            watchers, state = self._watchers, self._state
            self._watchers = [watcher for watcher in watchers if watcher.level > state] or None
        return [watcher for watcher in watchers if watcher.level <= state]

    def _watch(self, level: State, callback: Callable[[], object]) -> _Watcher:
        watcher = _Watcher(self, level, callback)
        with _lock:
            late = self._state >= level
            if not late:
                if self._watchers is None:
                    self._watchers = []
                self._watchers.append(watcher)
        if late:
            callback()
        return watcher

    def _forget(self, watcher: _Watcher) -> None:
        with _lock:
            if self._watchers is not None:
                with suppress(ValueError):  # it was due
                    self._watchers.remove(watcher)

    async def _reached(self, level: State) -> None:
        if self._state >= level:
            await checkpoint()
            return
        wakeup = Wakeup()  # an eighth of the memory of an event, and most engines wait here
        forget = self._watch(level, wakeup.wake)
        try:
            while self._state < level:
                await wakeup.wait()
        finally:
            forget()


class _Watcher(LoopHandle):
    """A callback at home, with the level that makes it due. Calling this forgets it.

    Most requests have one or two as long as they are open: this is a third of what closures took.
    """

    __slots__ = ("_callback", "_control", "level")

    def __init__(self, control: Control, level: State, callback: Callable[[], object]) -> None:
        super().__init__()
        self.level = level
        self._callback = callback
        self._control = ref(control)  # which holds this one

    def notify(self) -> None:
        self.run(self._callback)

    def __call__(self) -> None:
        if (control := self._control()) is not None:
            control._forget(self)


def _call_back(changed: list[Control]) -> None:
    """Run the callbacks that are due, in that order. Raise what may be a signal's doing, after all have run."""
    interrupt: BaseException | None = None
    for control in changed:
        for watcher in control._take_due():
            try:
                watcher.notify()
            except (KeyboardInterrupt, SystemExit) as error:
                interrupt = interrupt or error
            except BaseException:  # one listener's fault must reach neither the others nor the caller
                _log.exception("a stop callback failed")
    if interrupt is not None:
        raise interrupt


Arguments = TypeVarTuple("Arguments")


class ReleaseOnce:
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
