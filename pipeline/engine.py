"""AsyncEngine: one request in, a stream of items out. The contract of everything that serves requests."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Generic, TypeVar, overload

from attrs import frozen

from .cancellation import until_killed
from .context import Context
from .errors import GraphError, PenstockError
from .foreign import foreign_errors
from .signatures import handler_types
from .stage import Stage
from .stream import ResponseStream

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
In = TypeVar("In")
Out = TypeVar("Out")


class AsyncEngine(Stage, ABC, Generic[In_contra, Out_co]):
    """One request in, a stream of items out. A model, a router, a remote worker, a whole graph: each is one.

    The contract, checked by `pipeline.testing.check_engine`:

    E1. The stream's context has the id and the control of the request.
    E2. A request that cannot be served fails with a `PenstockError`: raised by `generate`, raised by the first read,
        or as a first item that is an error. Nothing stays open then.
    E3. After *stop* the stream ends by itself, soon, without raising; what was made before may still be delivered.
    E4. After *kill* the stream ends at once, without raising, and delivers nothing more, whatever it waits for.
    E5. Closing, at any point and any number of times, releases everything.
    E6. Dropping the stream without closing it releases everything on the loop's next turns.
    E7. Items come in the order they were made, none twice, none lost while the request runs.
    E8. Nothing follows the end: neither after the last item, nor after an error item, nor after a raise.
    E9. Nothing stays open after any ending: no stream, no task, no reservation.
    E10. Concurrent requests do not affect each other: neither items, nor stop, kill, close or faults.
    E11. A request stopped or killed beforehand gets `Cancelled`, or a stream that ends under E3 or E4.
    E12. Cancelling the task that waits, in `generate` or in a read, ends the wait and releases everything.
    E13. Reading items that are all ready lets other tasks run at intervals, so that a deadline, and a stop or kill by
         another task, comes in time.

    Source: dynamo lib/runtime/src/engine.rs, AsyncEngine.
    """

    @abstractmethod
    def generate(self, request: Context[In_contra]) -> Coroutine[Any, Any, ResponseStream[Out_co]]:
        """Return a stream as soon as there is one; wait for its items in the stream. See the contract."""


Handler = Callable[[In], AsyncIterator[Out]] | Callable[[In, Context[Any]], AsyncIterator[Out]]
"""An async generator function of the payload, or of the payload and the `context`."""


class FunctionEngine(AsyncEngine[In, Out]):
    """An engine from an async generator function of the payload, and of the context if it names one.

        async def count(to: int, context: Context) -> AsyncIterator[int]: ...

    The function can see a stop in the context and should then end early; a kill ends its stream even while it waits.
    Its exceptions go to the reader, foreign ones as `Unknown`, that of `sys.exit()` included. Raises GraphError for a
    function that does not yield its items.
    """

    def __init__(self, handler: Handler[In, Out]) -> None:
        if inspect.iscoroutinefunction(handler):
            raise GraphError(f"{handler.__name__} returns its answer; an engine's function yields items")
        self._handler: Callable[..., AsyncIterator[Out]] = handler
        self._takes_context = "context" in inspect.signature(handler).parameters
        self._name = getattr(handler, "__name__", None)
        self.declares = handler_types(handler)

    def __str__(self) -> str:
        return self.name

    async def generate(self, request: Context[In]) -> ResponseStream[Out]:
        return ResponseStream(self._items(request), request)

    async def _items(self, request: Context[In]) -> AsyncGenerator[Out, None]:
        extra = {"context": request} if self._takes_context else {}
        with foreign_errors():
            async with aclosing(until_killed(self._handler(request.payload, **extra), request)) as items:
                async for item in items:
                    yield item


@overload
def function_engine(handler: Callable[[In], AsyncIterator[Out]]) -> FunctionEngine[In, Out]: ...
@overload
def function_engine(handler: Callable[[In, Context[Any]], AsyncIterator[Out]]) -> FunctionEngine[In, Out]: ...
def function_engine(handler: Handler[Any, Out]) -> FunctionEngine[Any, Out]:
    """Decorate an async generator function as an engine. See `FunctionEngine`."""
    return FunctionEngine(handler)


@frozen
class ErasedEngine:
    """An engine in a registry of engines of many types, with the types it was stored under.

    Source: dynamo lib/runtime/src/engine.rs, AnyAsyncEngine.
    """

    engine: AsyncEngine[Any, Any]
    request: Any
    item: Any
    error: type[BaseException] = PenstockError

    def typed(
        self, request: type[In], item: type[Out], error: type[BaseException] = PenstockError
    ) -> AsyncEngine[In, Out] | None:
        """Return the engine, if it was stored under exactly these types; None otherwise."""
        return self.engine if (self.request, self.item, self.error) == (request, item, error) else None
