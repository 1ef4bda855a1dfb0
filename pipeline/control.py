"""Control: stop and kill, one object shared by every stage of a request.

A request runs, is stopped, is killed; the state only moves forward. *Stop* requests an early end: items made before
it are still delivered, and the stream ends on its own. *Kill* ends the stream at once; nothing more is delivered.

    parent.stop()  ──►  child 1, child 2, ..., then the parent change
                   ──►  callbacks of child 1, child 2, ..., then the parent run, waiters wake

Every method may be called from any thread. When `stop` or `kill` has returned, the control and all controls linked
below it have that state; a callback begun by another thread may still be running. Children are held weakly, in the
order they were linked.

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
from typing import Any, Final, TypeVarTuple, Unpack
from weakref import ref

from anyio.lowlevel import checkpoint

from .loop import LoopHandle, Wakeup, call_soon, running_loop

_log = logging.getLogger(__name__)


class State(IntEnum):
    """State of a request; it only ever grows."""

    RUNNING = 0
    STOPPED = 1
    KILLED = 2


RUNNING: Final = State.RUNNING
STOPPED: Final = State.STOPPED
KILLED: Final = State.KILLED
"""The states as names of this module, for what is done for each item: in Python 3.11 it takes 0.1 to 0.3 us to read
a member of an enumeration's class."""

_CHILDREN_SWEPT_AT = 8
"""At this many children, and whenever they have doubled since, references to dead ones are removed."""

# One lock for all controls: a stop changes its whole subtree under it, with a few list operations for each control and
# no foreign code. It is reentrant because a finaliser or a signal handler may stop a request during such an operation.
_lock = RLock()


class Control:
    """Cancellation state of one request, with its children and callbacks."""

    __slots__ = ("__weakref__", "_children", "_children_limit", "_heading", "_retained", "_watchers", "state")

    state: State
    """Set by `stop` and `kill` only."""

    def __init__(self) -> None:
        self.state = RUNNING
        self._heading = RUNNING  # the state its children are being brought to; never behind `state`
        self._children: list[ref[Control]] | None = None
        self._children_limit = _CHILDREN_SWEPT_AT
        self._watchers: list[_Watcher] | None = None
        self._retained: tuple[object, ...] = ()

    @property
    def is_stopped(self) -> bool:
        """True once stopped, and also once killed."""
        return self.state is not RUNNING

    @property
    def is_killed(self) -> bool:
        return self.state is KILLED

    def stop(self) -> None:
        """Request an early, orderly end. Idempotent; without effect on a killed request.

        An exception of a callback is logged. KeyboardInterrupt and SystemExit, which a signal may raise anywhere, are
        raised here once every callback has run.
        """
        self._advance(STOPPED)

    stop_generating = stop

    def kill(self) -> None:
        """End the request at once; items in flight are lost. Idempotent. Exceptions of callbacks as in `stop`."""
        self._advance(KILLED)

    def stopped(self) -> Coroutine[Any, Any, None]:
        """Wait for stop or kill; return immediately if it has happened already."""
        return self._reached(STOPPED)

    def killed(self) -> Coroutine[Any, Any, None]:
        """Wait for kill; a stop does not end the wait."""
        return self._reached(KILLED)

    def on_stop(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call the callback once, on stop or kill, whichever is first. Return a function that removes the callback.

        The callback runs in the event loop that is running now: immediately if stopped from its thread, else on the
        loop's next turn, as a plain callback in which anyio may find no loop. It must not wait; its exceptions are
        logged. A stop by a signal handler wakes the loop; the callback then runs immediately on asyncio, on the next
        turn on trio. If the request is stopped already, the callback runs now and its exceptions are raised here.
        """
        return self._watch(STOPPED, callback)

    def on_kill(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Like `on_stop`, for kill only."""
        return self._watch(KILLED, callback)

    def link_child(self, child: Control) -> None:
        """Forward stop and kill to the child, which changes before this one. A late child takes the present state."""
        changed: list[Control] = []
        with _lock:
            if self._children is None:
                self._children = []
            elif len(self._children) >= self._children_limit:
                self._children = [r for r in self._children if r() is not None]
                self._children_limit = max(_CHILDREN_SWEPT_AT, 2 * len(self._children))
            self._children.append(ref(child))
            if self._heading is not RUNNING:
                changed = child._change_all(self._heading)
        if changed:
            _call_back(changed)

    def retain(self, owned: object) -> None:
        """Keep a reference to the object as long as this control exists. Idempotent."""
        with _lock:
            for kept in self._retained:
                if kept is owned:
                    return
            self._retained = (*self._retained, owned)

    def _advance(self, target: State) -> None:
        """Set the state of the whole subtree, then run the callbacks that are due; children before parents in both."""
        with _lock:
            changed = self._change_all(target)
        _call_back(changed)

    def _change_all(self, target: State) -> list[Control]:
        """Set the state of the subtree; return what has changed, children first. Called with the lock held."""
        if self._children is None and self.state < target:  # as most are
            self._heading = self.state = target
            return [self]
        # A stack instead of recursion: chains of sub-requests may be long. A control is pushed a second time, to
        # change itself, below its children.
        changed: list[Control] = []
        seen: set[Control] = set()
        todo: list[tuple[Control, bool]] = [(self, False)]
        while todo:
            control, children_done = todo.pop()
            if control.state >= target:
                continue
            if children_done:
                control.state = target
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
            watchers, state = self._watchers, self.state
            self._watchers = [watcher for watcher in watchers if watcher.level > state] or None
        return [watcher for watcher in watchers if watcher.level <= state]

    def _watch(self, level: State, callback: Callable[[], object]) -> _Watcher:
        watcher = _Watcher(self, level, callback)
        with _lock:
            late = self.state >= level
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
                    watcher.let_go()

    async def _reached(self, level: State) -> None:
        if self.state >= level:
            await checkpoint()
            return
        wakeup = Wakeup()  # an eighth of the memory of an event, and most engines wait here
        forget = self._watch(level, wakeup.wake)
        try:
            while self.state < level:
                await wakeup.wait()
        finally:
            forget()


class _Watcher(LoopHandle):
    """A callback with its loop and the state that makes it due. Calling the object removes the callback.

    Most requests hold one or two while they are open: this takes a third of the memory of closures.
    """

    __slots__ = ("_callback", "_control", "level")

    def __init__(self, control: Control, level: State, callback: Callable[[], object]) -> None:
        super().__init__()
        self.level = level
        self._callback = callback
        self._control = ref(control)  # which holds this one

    def notify(self) -> None:
        self.run(self._callback)

    def let_go(self) -> None:
        """Drop the callback, so that what keeps this object and is the callback's owner is no circle."""
        self._callback = _nothing

    def __call__(self) -> None:
        if (control := self._control()) is not None:
            control._forget(self)


def _nothing() -> None: ...


def _call_back(changed: list[Control]) -> None:
    """Run the callbacks that are due, in that order; then raise the first KeyboardInterrupt or SystemExit of one."""
    interrupt: BaseException | None = None
    for control in changed:
        for watcher in control._take_due():
            try:
                watcher.notify()
            except (KeyboardInterrupt, SystemExit) as error:
                interrupt = interrupt or error
            except BaseException:  # it must reach neither the other callbacks nor the caller
                _log.exception("a stop callback failed")
    if interrupt is not None:
        raise interrupt


Arguments = TypeVarTuple("Arguments")


class ReleaseOnce:
    """Runs its action, with these arguments, on the first `release()` and never again.

    A stream that holds a reservation is given one: `stream.holding(once)`, or `ResponseStream(items, context, once)`
    with a release in the generator's `finally` as well. The action must not wait and must not use anyio (its clock,
    tasks): after a drop it is a plain callback of the loop, in which anyio finds none. Its exceptions are raised by
    `release`, or logged after a drop.
    """

    __slots__ = ("_action", "_arguments", "_loop", "is_released")

    is_released: bool
    """Whether it was released or cancelled."""

    def __init__(self, action: Callable[[Unpack[Arguments]], object], *arguments: *Arguments) -> None:
        self._action: Callable[..., object] | None = action
        self._arguments: tuple[Any, ...] = arguments  # half the memory of a closure over them
        self._loop = running_loop()
        self.is_released = False

    def release(self) -> None:
        """Run the action, unless it was released or cancelled before."""
        action, self._action = self._action, None
        arguments, self._arguments = self._arguments, ()
        self.is_released = True
        if action is not None:
            action(*arguments)

    def cancel(self) -> bool:
        """Drop the action without running it. Return False if it was released or cancelled before."""
        action, self._action = self._action, None
        self._arguments = ()
        self.is_released = True
        return action is not None

    def release_soon(self) -> None:
        """Release on the next turn of the loop this was made in. Safe in finalisers and threads; raises nothing."""
        if not self.is_released:
            call_soon(self._loop, self.release)
