"""Fanout: one source, many listeners, none of which disturbs the others."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pipeline.rx import Disposable, ObserverBase

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Fanout(Generic[T]):
    """Hands each item to every listener that was there before it, in the order of the items.

    What a listener causes while it listens comes after what is under way. A listener's error is logged and stays its
    own, but ends its listening, as reactivex has it. For one thread.
    """

    def __init__(self) -> None:
        self._listeners: dict[object, tuple[ObserverBase[T], Callable[[T], bool]]] = {}
        self._due: deque[tuple[T, tuple[object, ...]]] = deque()
        self._delivering = False
        self._is_complete = False

    def __len__(self) -> int:
        return len(self._listeners)

    def add(
        self, observer: ObserverBase[T], *, first: Iterable[T] = (), accepts: Callable[[T], bool] = lambda _: True
    ) -> Disposable:
        """Listens from now on: to the `first` items, then to what is pushed and accepted; disposing ends it.

        After `complete` the listener is told so, and nothing else.
        """
        if self._is_complete:
            observer.on_completed()
            return Disposable()
        key = object()
        self._listeners[key] = (observer, accepts)
        self._due.extend((item, (key,)) for item in first)
        self._deliver()
        return Disposable(lambda: self._remove(key))

    def push(self, item: T) -> None:
        """Hands the item to those who listen now."""
        self._due.append((item, tuple(self._listeners)))
        self._deliver()

    def complete(self) -> None:
        """Tells every listener that nothing more comes, and forgets them."""
        self._is_complete = True
        listeners, self._listeners = self._listeners, {}
        for observer, _ in listeners.values():
            _guarded(observer.on_completed)

    def _remove(self, key: object) -> None:
        self._listeners.pop(key, None)

    def _deliver(self) -> None:
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._due:
                item, keys = self._due.popleft()
                for key in keys:
                    self._deliver_to(key, item)
        finally:
            self._delivering = False

    def _deliver_to(self, key: object, item: T) -> None:
        if key not in self._listeners:  # it stopped listening meanwhile
            return
        observer, accepts = self._listeners[key]
        if accepts(item):
            _guarded(observer.on_next, item)


def _guarded(call: Callable[..., object], *args: object) -> None:
    try:
        call(*args)
    except Exception:
        _log.exception("a listener failed")
