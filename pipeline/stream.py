"""ResponseStream[T]: an async iterator with its context; closing it closes upstream.

    engine ──► stream ──► stage's generator ──► stream ──► caller
    engine ◄── close ◄─── finally ◄──────────── close ◄─── async with

Source: dynamo lib/runtime/src/engine.rs, ResponseStream. Other than there, closing is explicit, because Python has no
destructor to lean on.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from inspect import isasyncgen
from types import AsyncGeneratorType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from .context import Context
from .errors import StreamBusy, StreamClosed
from .once import Once

if TYPE_CHECKING:
    from reactivex import Observable

    from .rx import AnyIOScheduler

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")

_ANEXT = "__anext__"


class ResponseStream(Generic[T_co]):
    """Items on their way to one reader, with the request's context.

    Whoever takes a stream closes it: `async with stream: async for item in stream: ...`. Closing, at any time and any
    number of times, ends the source's generator at its `yield` and then closes what the stream owns; each owned thing
    is a stream (closed) or a `Once` (released). Reading after a close raises `StreamClosed`; reading after the end
    just ends again. One task reads at a time: closing during another task's read raises `StreamBusy` (a second reader
    gets Python's own RuntimeError); to end a stream that somebody waits on, stop or kill its context.

    A stream dropped without a close, though it has not ended, warns (`ResourceWarning`) and is released on the next
    turn of the loop. A stream that ended by itself needs no close, but a close never hurts.

    `items` is best an async generator that closes its upstream on its own way out (`async with upstream:`). What is
    also listed in `owned` is closed even if the generator was never started, when its `finally` would not run.
    """

    # Reading an item costs no Python frame of the stream: the slot holds the generator's own bound method (measured: 15
    # ns instead of 55), and closing swaps it. Checkers are told of a method.
    __slots__ = (_ANEXT, "__weakref__", "_closed", "_items", "_owned", "context")

    if TYPE_CHECKING:

        def __anext__(self) -> Awaitable[T_co]: ...

    def __init__(self, items: AsyncIterable[T_co], context: Context[Any], *owned: ResponseStream[Any] | Once) -> None:
        generator = items if isasyncgen(items) else _iterate(items)
        self._items = cast("AsyncGeneratorType[T_co, None]", generator)
        self._owned = owned
        self._closed = False
        self.context = context
        self.__anext__ = self._items.__anext__  # type: ignore[method-assign]
        if _opened is not None:
            _opened(self)

    @classmethod
    def of(cls, items: Iterable[T_co], context: Context[Any]) -> ResponseStream[T_co]:
        """A stream of items that are there already; ends early once the context is stopped."""
        return cls(_replay(items, context), context)

    def __aiter__(self) -> Self:
        return self

    @property
    def is_open(self) -> bool:
        """False once it has ended, failed or been closed."""
        # An unstarted or suspended generator still has its frame; one that ended, or failed, has none.
        return not self._closed and self._items.ag_frame is not None

    async def aclose(self) -> None:
        """Ends the source and closes all that is owned. Raises what their own closing raises, after all are closed."""
        if self._closed:
            return
        if self._items.ag_running:
            raise StreamBusy("a task is reading this stream; stop or kill its context to end it")
        self._closed = True
        self.__anext__ = _read_after_close  # type: ignore[method-assign]
        try:
            await self._items.aclose()
        finally:
            owned, self._owned = self._owned, ()
            if owned:
                await _close_all(owned)

    async def __aenter__(self) -> Self:
        return self

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Awaitable[None]:
        return self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):  # also one that was never made whole
            return
        # A started generator is finalised by the loop's own hook, an owned stream by its own __del__. A release is
        # foreign code: not here, in the middle of whatever is being collected.
        for owned in self._owned:
            if isinstance(owned, Once):
                owned.release_soon()
        if self.is_open:
            warnings.warn(
                f"stream of request {self.context.id!r} was dropped without being closed; use `async with stream:`",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # -- shaping: each gives a stream that closes this one

    def map(self, change: Callable[[T_co], U]) -> ResponseStream[U]:
        """The stream of `change(item)`; if that raises, the stream ends with the error."""

        async def changed() -> AsyncGenerator[U, None]:
            async with self:
                async for item in self:
                    yield change(item)

        return ResponseStream(changed(), self.context, self)

    def rx(self, *operators: Callable[[Observable[Any]], Observable[Any]]) -> ResponseStream[Any]:
        """The stream after synchronous reactivex operators, demand kept: see `pipeline.rx.apply`."""
        from .rx import apply  # reactivex is loaded by those who use it

        return apply(self, *operators)

    def to_observable(self, scheduler: AnyIOScheduler) -> Observable[T_co]:
        """The stream pushed by a task of the scheduler, to one subscriber: see `pipeline.rx.to_observable`."""
        from .rx import to_observable

        return to_observable(self, scheduler)

    async def collect(self) -> list[T_co]:
        """All items, then closes."""
        async with self:
            return [item async for item in self]


# Set by `pipeline.testing` to count streams.
_opened: Callable[[ResponseStream[Any]], object] | None = None


async def _close_all(owned: tuple[ResponseStream[Any] | Once, ...]) -> None:
    """Closes each, whatever the others raise; the first failure goes on."""
    for place, one in enumerate(owned, 1):
        try:
            if isinstance(one, Once):
                one.release()
            elif not one._closed:
                await one.aclose()
        except BaseException:
            await _close_all(owned[place:])
            raise


async def _iterate(items: AsyncIterable[U]) -> AsyncGenerator[U, None]:
    try:
        async for item in items:
            yield item
    finally:
        if (aclose := getattr(items, "aclose", None)) is not None:
            await aclose()


async def _replay(items: Iterable[U], context: Context[Any]) -> AsyncGenerator[U, None]:
    for item in items:
        if context.is_stopped:
            return
        yield item


async def _read_after_close() -> Any:
    raise StreamClosed("this stream was closed")
