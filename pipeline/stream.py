"""ResponseStream[T]: an async iterator with its context; closing it closes upstream.

    engine ──► stream ──► stage's generator ──► stream ──► caller
    engine ◄── close ◄─── finally ◄──────────── close ◄─── async with

Source: dynamo lib/runtime/src/engine.rs, ResponseStream. Other than there, closing is explicit, because Python has no
destructor to lean on.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from traceback import format_exception
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar, cast, overload

from .annotated import Annotated
from .context import Context
from .control import ReleaseOnce
from .errors import StreamBusy, StreamClosed
from .pace import Pace

if TYPE_CHECKING:
    from reactivex import Observable

    from .rx import AnyIOScheduler

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
Pipe: TypeAlias = "Callable[[Observable[A]], Observable[B]]"
"""A reactivex operator."""

Take: TypeAlias = Callable[..., bool]
"""Takes a plain item by its parts, on which the stages of a kind of stream agree: of tokens see `pipeline.wire`.

Returns False if it has changed nothing and the item goes to the reader. Only a stage that has no stage below it which
has changed something may do so. It must not wait; what it raises ends the stream as an error of its source.
"""

_ANEXT = "__anext__"


class ResponseStream(Generic[T_co]):
    """An async iterator of items for one reader, with the request's context.

    The caller that takes a stream closes it: `async with stream: async for item in stream: ...`. Closing ends the
    generator of the items at its `yield`, then closes the streams and releases the `ReleaseOnce` objects that the
    stream owns. It may be done at any time and any number of times. Reading after a close raises `StreamClosed`;
    reading after the end ends again. One task reads at a time: closing during another task's read raises `StreamBusy`,
    and a second reader gets that or Python's own RuntimeError. To end a stream that a task waits on, stop or kill its
    context.

    A stream that is dropped before its end without being closed emits a `ResourceWarning` and is released on the
    loop's next turn. A stream that has ended needs no close; closing it does no harm.

    `items`: preferably an async generator that closes its upstream when it ends (`async with upstream:`). Of any other
    iterable, `aclose` is awaited once, if it has one, on every way out, also unread.
    `owned`: closed or released on every way out, also if the generator was never started and its `finally` cannot run.

    `relay`: see `feed`.

    A stream that owns no other stream is a source. If its items are always ready, it yields to the loop at intervals:
    see `pipeline.pace`.
    """

    # Reading an item costs no Python frame of the stream: the slot holds the generator's own bound method (measured: 15
    # ns instead of 55), or in a source that of its pace; closing replaces it. Type checkers see a method.
    __slots__ = (_ANEXT, "__weakref__", "_closed", "_items", "_owned", "_pace", "_relay", "context")

    if TYPE_CHECKING:

        def __anext__(self) -> Awaitable[T_co]: ...

    def __init__(
        self,
        items: AsyncIterable[T_co],
        context: Context[Any],
        *owned: ResponseStream[Any] | ReleaseOnce,
        relay: Callable[[Take], Take] | None = None,
    ) -> None:
        # The standard library's `isasyncgen` takes four times as long.
        self._items: Any = items if isinstance(items, AsyncGeneratorType) else _begun(_iterate(items))
        self._owned = owned
        self._relay = relay
        self._closed = False
        self.context = context
        self._pace: Pace[T_co] | None = None
        read: Callable[[], Awaitable[T_co]] = self._items.__anext__
        for upstream in (items, *owned):
            if isinstance(upstream, ResponseStream):
                break
        else:  # a source
            self._pace = Pace(read)
            read = self._pace.reads().__next__
        self.__anext__ = read  # type: ignore[method-assign]
        if _opened is not None:
            _opened(self)

    @classmethod
    def of(cls, items: Iterable[T_co], context: Context[Any]) -> ResponseStream[T_co]:
        """Return a stream of items that exist already. It ends early once the context is stopped."""
        return cls(_replay(items, context), context)

    def __aiter__(self) -> Self:
        return self

    @property
    def is_open(self) -> bool:
        """Whether the stream has neither ended, failed nor been closed."""
        # An unstarted or suspended generator has a frame; one that ended or failed has none.
        return not self._closed and self._items.ag_frame is not None

    async def aclose(self, *_: object) -> None:
        """Close the generator of the items, then everything the stream owns; arguments, as of `__aexit__`, are ignored.

        An exception raised by one of them is raised after all are closed. Of several the first is raised, with the
        others as notes; a cancellation, or another BaseException that is not an Exception, takes precedence.
        """
        if self._closed:
            return
        if self._items.ag_running or (self._pace is not None and self._pace.is_resting):
            raise StreamBusy("a task is reading this stream; stop or kill its context to end it")
        self._closed = True
        self.__anext__ = _read_after_close  # type: ignore[method-assign]
        owned, self._owned = self._owned, ()
        if self._items.ag_frame is None:  # it has ended, and most have closed what they own: 0.7 us instead of 1.1
            for part in owned:
                if not (part.is_released if isinstance(part, ReleaseOnce) else part._closed):
                    break
            else:
                return
        await _close_all((self._items, *owned))

    async def __aenter__(self) -> Self:
        return self

    __aexit__ = aclose

    def __del__(self) -> None:
        if getattr(self, "_closed", True):  # closed, or its __init__ failed
            return
        # A started generator is finalised by the loop's own hook, an owned stream by its own __del__. A release runs
        # foreign code, which must not run in the middle of a garbage collection.
        for owned in self._owned:
            if isinstance(owned, ReleaseOnce):
                owned.release_soon()
        # In a reference cycle a generator that was never started may have been finalised before its stream.
        is_unread = self._pace is not None and not self._pace.was_read
        if self.is_open or is_unread:
            warnings.warn(
                f"stream of request {self.context.id!r} was dropped without being closed; use `async with stream:`",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # -- shaping: each returns a new stream with this one's context, which reads and closes this one

    def map(self, change: Callable[[T_co], U]) -> ResponseStream[U]:
        """Return the stream of `change(item)`. What `change` raises ends the stream, after this one is closed."""

        async def changed() -> AsyncGenerator[U, None]:
            async with self:
                async for item in self:
                    yield change(item)

        return ResponseStream(changed(), self.context, self)

    def tap(self, on_item: Callable[[T_co], object]) -> ResponseStream[T_co]:
        """Return the same items; `on_item` is called with each, just before its reader gets it.

        It is not called for an item that is never read, nor at the end. What it raises ends the stream, after this one
        is closed.
        """

        def observed(item: Any) -> Any:
            on_item(item)
            return item

        return self.map(observed)

    def prepend(self, *items: U) -> ResponseStream[T_co | U]:
        """Return these items, then those of this stream, which is first read after the last of them.

        A kill ends the stream before the next item. A stop leaves the items: they were made before it.
        """

        async def joined() -> AsyncGenerator[T_co | U, None]:
            async with self:
                for first in items:
                    if self.context.is_killed:
                        return
                    yield first
                async for item in self:
                    yield item

        return ResponseStream(joined(), self.context, self)

    def holding(self, reservation: ReleaseOnce) -> ResponseStream[T_co]:
        """Return the same items, and release the reservation, once, on every way out of the stream.

        It is released after this stream is closed, and before the reader sees the end or the error; if the new stream
        is closed or dropped, also unread, then as everything it owns. A reservation released earlier stays so. What the
        release raises goes to the reader or to the caller of `aclose`.
        """

        async def held() -> AsyncGenerator[T_co, None]:
            try:
                async with self:
                    async for item in self:
                        yield item
            finally:
                reservation.release()

        return ResponseStream(held(), self.context, self, reservation)

    def watched(self, watch: Watch) -> ResponseStream[T_co]:
        """Return the same items, holding the reservation of the watch, which is called with the error that ends them.

        `on_failure` is called before the reader gets the error: of an exception after this stream is closed, then the
        reservation is released; of an error item after that release. On every other way out the reservation is released
        as by `holding`, and `on_failure` is not called.
        """
        return ResponseStream(_watched(self, watch), self.context, self, watch.reservation, relay=lambda take: take)

    def feed(self, take: Take, gate: Gate) -> bool:
        """Call `take` with each plain item that comes while the reader waits, in place of waking its task.

        A source that can do so calls it in a callback of the loop while the gate is open, with the parts of the item.
        All other items, the end and errors go to the reader; each item goes one way, in order. A stage has a `relay`,
        which returns what takes the items of the first stream it owns, given what takes its own. Return whether the
        stream is fed; if not, nothing changes.
        """
        upstream = self._owned[0] if self._owned else None
        if self._relay is None or not isinstance(upstream, ResponseStream):
            return False
        return upstream.feed(self._relay(take), gate)

    def _own(self, reservation: ReleaseOnce) -> None:
        """Release the reservation, too, on every way out."""
        self._owned = (*self._owned, reservation)

    @overload
    def rx(self) -> ResponseStream[T_co]: ...
    @overload
    def rx(self, op1: Pipe[T_co, A], /) -> ResponseStream[A]: ...
    @overload
    def rx(self, op1: Pipe[T_co, A], op2: Pipe[A, B], /) -> ResponseStream[B]: ...
    @overload
    def rx(self, op1: Pipe[T_co, A], op2: Pipe[A, B], op3: Pipe[B, C], /) -> ResponseStream[C]: ...
    @overload
    def rx(self, op1: Pipe[T_co, A], op2: Pipe[A, B], op3: Pipe[B, C], op4: Pipe[C, D], /) -> ResponseStream[D]: ...
    @overload
    def rx(
        self, op1: Pipe[T_co, A], op2: Pipe[A, B], op3: Pipe[B, C], op4: Pipe[C, D], op5: Pipe[D, E], /
    ) -> ResponseStream[E]: ...
    @overload
    def rx(
        self, op1: Pipe[T_co, A], op2: Pipe[A, B], op3: Pipe[B, C], op4: Pipe[C, D], op5: Pipe[D, E], op6: Pipe[E, F], /
    ) -> ResponseStream[F]: ...
    @overload
    def rx(
        self,
        op1: Pipe[T_co, Any],
        op2: Pipe[Any, Any],
        op3: Pipe[Any, Any],
        op4: Pipe[Any, Any],
        op5: Pipe[Any, Any],
        op6: Pipe[Any, Any],
        op7: Pipe[Any, Any],
        /,
        *more: Pipe[Any, Any],
    ) -> ResponseStream[Any]: ...
    def rx(self, *operators: Any) -> Any:
        """Return the stream after synchronous reactivex operators, which read only on demand: see `pipeline.rx.apply`.

        The items have the output type of the last operator, for up to six operators; for more it is Any.
        """
        from .rx import apply  # loads reactivex, which is optional

        return apply(self, *operators)

    def to_observable(self, scheduler: AnyIOScheduler) -> Observable[T_co]:
        """Return an Observable for one subscriber, fed by a task of the scheduler: see `pipeline.rx.to_observable`."""
        from .rx import to_observable

        return to_observable(self, scheduler)

    async def collect(self) -> list[T_co]:
        """Return all items as a list and close the stream."""
        async with self:
            return [item async for item in self]


_opened: Callable[[ResponseStream[Any]], object] | None = None
"""Called with each new stream; set by `pipeline.testing` to find streams that were never closed."""


class Gate:
    """Whether items may be taken without the reader, which opens and closes it: see `ResponseStream.feed`."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = True


class Watch:
    """What is to be done at the failure and the end of a stream: see `ResponseStream.watched`.

    A class of its own for each kind, with what it needs in slots: closures would be five objects for each stream.
    """

    __slots__ = ("reservation",)

    def __init__(self, reservation: ReleaseOnce) -> None:
        self.reservation = reservation

    def on_failure(self, error: Exception) -> None:
        """Called with the error that ends the stream."""

    def look_at(self, item: Annotated[Any]) -> None:
        """Called with each event before it is delivered."""
        if (error := item.extract_error()) is not None:
            self.reservation.release()
            self.on_failure(error)


async def _watched(stream: ResponseStream[U], watch: Watch) -> AsyncGenerator[U, None]:
    try:
        async with stream:
            async for item in stream:
                if isinstance(item, Annotated) and item.event is not None:
                    watch.look_at(item)
                yield item
    except Exception as error:
        watch.on_failure(error)
        raise
    finally:
        watch.reservation.release()


async def _close_all(parts: Iterable[Any]) -> None:
    """Close or release each part, whatever the others raise; then raise as `ResponseStream.aclose` does."""
    failures: list[BaseException] = []
    for part in parts:
        try:
            if isinstance(part, ReleaseOnce):
                part.release()
            elif not (isinstance(part, ResponseStream) and part._closed):
                await part.aclose()
        except BaseException as failure:
            failures.append(failure)
    if failures:
        # A cancellation must be raised, or it would be lost.
        first = next((failure for failure in failures if not isinstance(failure, Exception)), failures[0])
        for other in failures:
            if other is not first:
                first.add_note(f"Closing raised this too:\n{''.join(format_exception(other)).rstrip()}")
        raise first


async def _iterate(items: AsyncIterable[U]) -> AsyncGenerator[U, None]:
    """Iterate over an iterable that is not a generator. `_begun` takes the first `yield`, so `finally` always runs."""
    iterator: AsyncIterator[U] | None = None
    try:
        yield cast("U", None)
        iterator = aiter(items)
        async for item in iterator:
            yield item
    finally:
        sources = (iterator,) if iterator is items else (iterator, items)
        await _close_all(source for source in sources if hasattr(source, "aclose"))


def _begun(generator: AsyncGenerator[U, None]) -> AsyncGenerator[U, None]:
    """Run the generator to its first `yield`, before which it must not wait."""
    with suppress(StopIteration):
        generator.__anext__().send(None)
    return generator


async def _replay(items: Iterable[U], context: Context[Any]) -> AsyncGenerator[U, None]:
    for item in items:
        if context.is_stopped:
            return
        yield item


async def _read_after_close() -> Any:
    raise StreamClosed("this stream was closed")
