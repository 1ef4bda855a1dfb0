"""Control: stop and kill, one object shared by every stage of a request.

A request runs, is stopped, is killed; the state only moves forward. *Stop* asks the producer to finish: what it has
made is still delivered and the stream ends on its own. *Kill* ends the stream at once and nothing more is delivered.

    parent.stop()  ──►  child 1, child 2, ..., then the parent: waiters wake, callbacks run

Every method may be called from any thread. Children are held weakly, in the order they were linked.

Source: dynamo lib/runtime/src/pipeline/context.rs, Controller. Other than there, a late child inherits the state, a
stop never undoes a kill, dead children are forgotten, and a cycle of children ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from threading import RLock
from weakref import ref

import anyio
from anyio.lowlevel import checkpoint

from .loop import Home

_log = logging.getLogger(__name__)


class State(IntEnum):
    """How far a request has come; only ever grows."""

    RUNNING = 0
    STOPPED = 1
    KILLED = 2


_CHILDREN_SWEPT_AT = 8
"""With so many children, and then whenever they have doubled, the dead ones are forgotten."""

# One lock for all: it is held for a few list operations and never while foreign code runs. Reentrant, because a
# finaliser that stops a request may run inside such an operation.
_lock = RLock()


class Control:
    """Stop, kill, and whoever wants to hear of it."""

    __slots__ = ("__weakref__", "_children", "_children_limit", "_heading", "_retained", "_state", "_watchers")

    def __init__(self) -> None:
        self._state = State.RUNNING
        self._heading = State.RUNNING  # the state its children are being brought to; never behind `_state`
        self._children: list[ref[Control]] | None = None
        self._children_limit = _CHILDREN_SWEPT_AT
        self._watchers: dict[object, tuple[State, Callable[[], None]]] | None = None
        self._retained: list[object] | None = None

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
        """Asks for an early, orderly end. Idempotent; does nothing to a killed request."""
        self._advance(State.STOPPED)

    stop_generating = stop

    def kill(self) -> None:
        """Ends the request at once, items in flight are lost. Idempotent."""
        self._advance(State.KILLED)

    async def stopped(self) -> None:
        """Returns on stop or kill; at once if that has happened already."""
        await self._reached(State.STOPPED)

    async def killed(self) -> None:
        """Returns on kill; a plain stop does not wake it."""
        await self._reached(State.KILLED)

    def on_stop(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Calls back once, on stop or kill, whichever comes first; returns what takes the callback back.

        The callback runs in the loop that is running now: at once when stopped from that thread, else on the
        loop's next turn, as a plain callback in which anyio itself may find no loop. It must not wait. If the
        request is stopped already, it runs before this returns.
        """
        return self._watch(State.STOPPED, callback)

    def on_kill(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Like `on_stop`, for kill only."""
        return self._watch(State.KILLED, callback)

    def link_child(self, child: Control) -> None:
        """Forwards stop and kill to the child from now on, before this one changes; a late child catches up."""
        with _lock:
            if self._children is None:
                self._children = []
            elif len(self._children) >= self._children_limit:
                self._children = [r for r in self._children if r() is not None]
                self._children_limit = max(_CHILDREN_SWEPT_AT, 2 * len(self._children))
            self._children.append(ref(child))
            heading = self._heading
        if heading is not State.RUNNING:
            child._advance(heading)

    def retain(self, owned: object) -> None:
        """Keeps the object alive as long as this control."""
        with _lock:
            if self._retained is None:
                self._retained = []
            self._retained.append(owned)

    def _advance(self, target: State) -> None:
        """Brings the whole subtree to the state, children before parents, each once."""
        # A stack instead of recursion: chains of sub-requests may be long. A control is pushed a second time, to
        # change itself, below its children.
        todo: list[tuple[Control, bool]] = [(self, False)]
        while todo:
            control, children_done = todo.pop()
            if children_done:
                control._enter(target)
                continue
            with _lock:
                if control._heading >= target:
                    continue
                control._heading = target
                children = [c for r in control._children or () if (c := r()) is not None]
            todo.append((control, True))
            todo.extend((child, False) for child in reversed(children))

    def _enter(self, target: State) -> None:
        with _lock:
            if self._state >= target:
                return
            self._state = target
            due = [(key, call) for key, (level, call) in (self._watchers or {}).items() if level <= target]
            for key, _ in due:
                del self._watchers[key]  # type: ignore[union-attr]  # there was something due
        for _, call in due:
            try:
                call()
            except Exception:  # one listener's fault must not keep the others from hearing
                _log.exception("a stop callback failed")

    def _watch(self, level: State, callback: Callable[[], object]) -> Callable[[], None]:
        home, key = Home(), object()
        with _lock:
            late = self._state >= level
            if not late:
                if self._watchers is None:
                    self._watchers = {}
                self._watchers[key] = (level, lambda: home.run(callback))
        if late:
            callback()

        def forget() -> None:
            with _lock:
                if self._watchers is not None:
                    self._watchers.pop(key, None)

        return forget

    async def _reached(self, level: State) -> None:
        if self._state >= level:
            await checkpoint()
            return
        event = anyio.Event()
        forget = self._watch(level, event.set)
        try:
            await event.wait()
        finally:
            forget()
