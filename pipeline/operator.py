"""Operator: wraps the next stage; may change the request on its way down and the stream on its way up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from .context import Context
from .engine import AsyncEngine
from .stage import Stage
from .stream import ResponseStream

if TYPE_CHECKING:
    from .graph import Chain, Segment

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
NextIn_co = TypeVar("NextIn_co", covariant=True)
NextOut_contra = TypeVar("NextOut_contra", contravariant=True)
T = TypeVar("T")
U = TypeVar("U")
X = TypeVar("X")
Y = TypeVar("Y")


class Operator(Stage, ABC, Generic[In_contra, Out_co, NextIn_co, NextOut_contra]):
    """One stage between a caller and an engine.

        request  In ──►  generate  ──► NextIn   next
        stream  Out ◄──            ◄── NextOut

    The contract, checked by `pipeline.testing.check_operator`; where it is about the stream it is that of
    `AsyncEngine` (E1 to E13), because an operator on an engine is an engine. In addition:

    O1. The request given to `next` has the id and the control of the request that came in, or a child's control.
    O2. What `next` raises goes to the caller typed, unless the operator's purpose is to handle it.
    O3. An error item from `next` goes to the caller and is the last item, with the same exception.
    O4. Every stream taken from `next` is closed, on every way out, also if the operator's own stream is never read.
    O5. The operator reads no item before its reader requests one, so that demand reaches the engine.
    O6. An operator holds no state of a request on itself: requests run concurrently through one instance.

    A subclass defines `generate`; `>>` comes with the class.

    Source: dynamo lib/runtime/src/pipeline/nodes.rs, Operator.
    """

    @abstractmethod
    def generate(
        self, request: Context[In_contra], next: AsyncEngine[NextIn_co, NextOut_contra]
    ) -> Coroutine[Any, Any, ResponseStream[Out_co]]:
        """Call `next` any number of times; return a stream that owns every stream taken from it."""

    @overload
    def __rshift__(self, next: Operator[NextIn_co, NextOut_contra, X, Y]) -> Chain[In_contra, Out_co, X, Y]: ...
    @overload
    def __rshift__(self, next: AsyncEngine[NextIn_co, NextOut_contra]) -> Segment[In_contra, Out_co]: ...
    def __rshift__(self, next: Any) -> Any:
        """Link this operator to the next stage. Raise LinkError, naming both, if their types do not fit."""
        from .graph import join  # graphs are built of operators, so `graph` imports this module

        return join(self, next)


PASSES_THROUGH: tuple[Any, ...] = (T, U, T, U)
"""`declares` of an operator that passes every type through: linking then checks its neighbours with each other."""


class Identity(Operator[Any, Any, Any, Any]):
    """Changes nothing; the stream is the next stage's own, at no cost."""

    declares = PASSES_THROUGH
    adds_time = False

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        return await next.generate(request)


class MapRequest(Operator[T, Y, X, Y]):
    """Changes the request only: `change(payload)`; what it raises goes to the caller."""

    adds_time = False

    def __init__(self, change: Callable[[T], X]) -> None:
        self.change = change

    async def generate(self, request: Context[T], next: AsyncEngine[X, Y]) -> ResponseStream[Y]:
        return await next.generate(request.map(self.change))


class MapResponse(Operator[X, U, X, T]):
    """Changes each item only: `change(item)`; what it raises ends the stream."""

    adds_time = False

    def __init__(self, change: Callable[[T], U]) -> None:
        self.change = change

    async def generate(self, request: Context[X], next: AsyncEngine[X, T]) -> ResponseStream[U]:
        return (await next.generate(request)).map(self.change)


def identity() -> Identity:
    """Return an operator that changes nothing."""
    return Identity()


def map_request(change: Callable[[T], X]) -> MapRequest[T, Any, X]:
    """Return an operator from a function of the payload."""
    return MapRequest(change)


def map_response(change: Callable[[T], U]) -> MapResponse[Any, U, T]:
    """Return an operator from a function of an item."""
    return MapResponse(change)
