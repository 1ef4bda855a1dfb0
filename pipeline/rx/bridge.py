"""The bridge between streams, which are pulled, and reactivex, which pushes; and a reactivex scheduler on anyio.

    stream.rx(ops.filter(f), ops.take(3))        demand kept: one item in, what came out handed on, then the next
    stream.to_observable(scheduler)              a task pushes the stream as fast as its observers take it
    from_observable(source, context, ...)        a bounded buffer between pushing and pulling

The one door of reactivex: the rest of the project takes `Observable`, subjects and `ops` from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from reactivex import Observable
from reactivex.abc import DisposableBase, ObserverBase
from reactivex.disposable import SingleAssignmentDisposable
from reactivex.subject import Subject

from ..context import Context
from ..control import ReleaseOnce
from ..errors import BufferOverflow, StreamBusy
from ..loop import LoopHandle
from ..stream import ResponseStream
from .scheduler import AnyIOScheduler

T = TypeVar("T")
Pipe = Callable[[Observable[Any]], Observable[Any]]
OverflowPolicy = Literal["error", "drop_oldest", "drop_newest"]


# -- a stream through synchronous operators


class _Output:
    """What an observable has pushed and nothing has read yet, and how it ended."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.error: Exception | None = None
        self.ended = False

    def on_next(self, item: Any) -> None:
        self.items.append(item)

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.on_completed()

    def on_completed(self) -> None:
        self.ended = True


def apply(stream: ResponseStream[Any], *operators: Pipe) -> ResponseStream[Any]:
    """Return the stream after synchronous reactivex operators, with demand kept and no task.

    One item is pulled and pushed through; its results are delivered before the next is pulled. The operators see
    the upstream's end and its error, and may answer both (`buffer` flushes, `catch` goes on with something else).
    Where they complete early (`take`) the upstream is closed; their own error goes to the reader, after the items
    before it. The result ends with its upstream at the latest. They are subscribed at the first read and disposed on
    every way out. After a kill nothing more is handed on. For operators that take time use `to_observable`.
    """
    return ResponseStream(_applied(stream, operators), stream.context, stream)


async def _applied(stream: ResponseStream[Any], operators: tuple[Pipe, ...]) -> AsyncGenerator[Any, None]:
    context, source, output = stream.context, Subject[Any](), _Output()
    items = output.items
    async with stream:
        subscription = source.pipe(*operators).subscribe(output.on_next, output.on_error, output.on_completed)
        try:
            upstream_open = True
            while True:
                while items:
                    if context.is_killed:
                        return
                    yield items.popleft()
                if output.ended or not upstream_open:
                    break
                upstream_open = await _push_one(stream, source)
        finally:
            subscription.dispose()
        if output.error is not None and not context.is_killed:
            raise output.error


async def _push_one(stream: ResponseStream[Any], source: Subject[Any]) -> bool:
    """Pulls one item and pushes it, or the end, or the error; False if that was the last."""
    try:
        item = await stream.__anext__()
    except StopAsyncIteration:
        source.on_completed()
        return False
    except Exception as error:
        source.on_error(error)
        return False
    source.on_next(item)
    return True


# -- a stream as an observable


def to_observable(stream: ResponseStream[T], scheduler: AnyIOScheduler) -> Observable[T]:
    """Return the stream as a cold observable for one subscriber, pumped by a task of the scheduler.

    Observers are the demand: the next item is read when they have returned and other tasks have had their turn. The
    end completes it, what a read raises is its error. Disposing stops the pump and closes the stream; until it is
    subscribed the stream stays the caller's to close. A second subscriber gets StreamBusy. What an observer raises is
    an error of the scheduler's action.
    """
    taken = False

    def subscribe(observer: ObserverBase[T], _: Any = None) -> DisposableBase:
        nonlocal taken
        if taken:
            raise StreamBusy("this stream has its subscriber already")
        pumping = scheduler.spawn(lambda scope: _pump(stream, observer, scope))
        taken = True
        return pumping

    return Observable(subscribe)


async def _pump(stream: ResponseStream[T], observer: ObserverBase[T], scope: anyio.CancelScope) -> None:
    async with stream:  # closed outside of the scope, which cuts only the reading
        with scope:
            while not scope.cancel_called:
                try:
                    item = await stream.__anext__()
                except StopAsyncIteration:
                    observer.on_completed()
                    return
                except Exception as error:
                    observer.on_error(error)
                    return
                observer.on_next(item)
                await checkpoint()  # items may all be ready, and no other task would run


# -- an observable as a stream


class _Inbox(_Output):
    """Output of which a limited number may wait for a reader. Any thread may push, one at a time."""

    def __init__(self, limit_items: int, overflow: OverflowPolicy) -> None:
        super().__init__()
        self.items = deque(maxlen=limit_items if overflow == "drop_oldest" else None)
        self.subscription = SingleAssignmentDisposable()
        self._limit_items = limit_items
        self._overflow = overflow
        self._handle = LoopHandle()
        self._pushed: anyio.Event | None = None

    def on_next(self, item: Any) -> None:
        if len(self.items) < self._limit_items or self._overflow == "drop_oldest":
            self.items.append(item)
            self.wake()
        elif self._overflow == "error":
            self.subscription.dispose()
            self.on_error(BufferOverflow(f"more than {self._limit_items} items wait for their reader"))

    def on_completed(self) -> None:
        super().on_completed()
        self.wake()

    def close(self) -> None:
        """Let the source go; what is there stays."""
        self.subscription.dispose()
        self.on_completed()

    def wake(self) -> None:
        if (pushed := self._pushed) is not None:
            self._handle.run(pushed.set)

    async def pushed(self) -> None:
        """Wait for a push or the end."""
        self._pushed = anyio.Event()
        if not self.items and not self.ended:  # another thread may have pushed since the reader looked
            await self._pushed.wait()
        self._pushed = None


def from_observable(
    observable: Observable[T],
    context: Context[Any],
    *,
    buffer_items: int,
    overflow: OverflowPolicy = "error",
) -> ResponseStream[T]:
    """Return the items of the observable for one reader. It is subscribed now; it may push from any thread, in turn.

    At most `buffer_items` wait for the reader. One more: `error` lets the source go and, after those that wait, raises
    BufferOverflow; `drop_oldest` and `drop_newest` lose one item, silently. The source's error is raised after the
    items before it. A stop lets the source go and ends the stream after what waits; a kill ends it at once. The
    subscription is disposed on every way out.
    """
    if buffer_items < 1:
        raise ValueError(f"buffer_items must be at least 1, not {buffer_items}")
    inbox = _Inbox(buffer_items, overflow)
    inbox.subscription.disposable = observable.subscribe(inbox.on_next, inbox.on_error, inbox.on_completed)
    forget = context.control.on_stop(inbox.close)

    def release() -> None:
        forget()
        inbox.subscription.dispose()

    released = ReleaseOnce(release)
    return ResponseStream(_received(inbox, context, released), context, released)


async def _received(inbox: _Inbox, context: Context[Any], released: ReleaseOnce) -> AsyncGenerator[Any, None]:
    try:
        while not context.is_killed:
            ended = inbox.ended  # before the items: another thread may push one and then end
            if inbox.items:
                yield inbox.items.popleft()
            elif not ended:
                await inbox.pushed()
            elif inbox.error is not None:
                raise inbox.error
            else:
                return
    finally:
        released.release()
