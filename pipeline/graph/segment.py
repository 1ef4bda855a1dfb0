"""Segment and Chain: operators linked to an engine become an engine, operators alone an operator.

    graph = Detokenize() >> PushRouter(workers)        # or link(Detokenize(), PushRouter(workers))
    print(graph)                                       # the line above
    graph.replace(PushRouter, echo)                    # another graph; this one is untouched

Source: dynamo lib/runtime/src/pipeline/nodes.rs. Other than there, a request follows references made once at linking;
there is no table of pending requests, so an answer cannot miss its caller, and nothing forms a cycle.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Literal, Self, TypeVar, cast, overload

from ..context import Context
from ..engine import AsyncEngine
from ..errors import EdgeAlreadySet, GraphError, LinkError, NoEdge, NoNetworkEdge
from ..operator import Operator
from ..signatures import Signature, check_line
from ..stage import Stage
from ..stream import ResponseStream
from .draw import render

In = TypeVar("In")
Out = TypeVar("Out")
X = TypeVar("X")
Y = TypeVar("Y")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)
NextIn_co = TypeVar("NextIn_co", covariant=True)
NextOut_contra = TypeVar("NextOut_contra", contravariant=True)

Target = type[Stage] | str
"""A stage, by its class or by its name."""


class _Linked(AsyncEngine[Any, Any]):
    """An operator with its next stage: linked once, followed by every request."""

    def __init__(self, operator: Operator[Any, Any, Any, Any], next: AsyncEngine[Any, Any]) -> None:
        self._operator_generate = operator.generate
        self._next = next

    def generate(self, request: Context[Any]) -> Coroutine[Any, Any, ResponseStream[Any]]:
        return self._operator_generate(request, self._next)


def _folded(operators: Sequence[Stage], engine: AsyncEngine[Any, Any]) -> AsyncEngine[Any, Any]:
    """Return the engine below all the operators, as seen from above the first."""
    for operator in reversed(operators):
        engine = _Linked(cast("Operator[Any, Any, Any, Any]", operator), engine)
    return engine


class _Line(Stage):
    """Stages in a row: access to them, and edits that return another row."""

    def __init__(self, *stages: Stage) -> None:
        self.stages: tuple[Stage, ...] = tuple(
            part for stage in stages for part in (stage.stages if isinstance(stage, _Line) else (stage,))
        )
        self._takes, self._gives = check_line([(stage, _signature(stage)) for stage in self.stages])

    def __getitem__(self, target: Target) -> Stage:
        """Return the one stage of that class or name. Raise GraphError if there is none, or more than one."""
        return self.stages[self._position(target)]

    def replace(self, target: Target, stage: Stage) -> Self:
        """Return a graph with another stage in place of `target`. Raise GraphError, or LinkError if it does not fit."""
        return self._spliced(self._position(target), 1, stage)

    def insert_before(self, target: Target, stage: Stage) -> Self:
        """Return a graph with one more operator above `target`. Raises as `replace` does."""
        return self._spliced(self._position(target), 0, stage)

    def insert_after(self, target: Target, stage: Stage) -> Self:
        """Return a graph with one more operator below `target`. Raises as `replace` does."""
        return self._spliced(self._position(target) + 1, 0, stage)

    def draw(self, form: Literal["mermaid", "dot", "text"] = "text") -> str:
        """Return the graph as text of that form, with its side branches and the instances of its pools."""
        return render(self.stages, form)

    def parts(self) -> Sequence[Stage]:
        return [part for stage in self.stages for part in stage.parts()]

    def __str__(self) -> str:
        return " >> ".join(str(stage) for stage in self.stages)

    __repr__ = __str__

    def _position(self, target: Target) -> int:
        found = [
            i
            for i, stage in enumerate(self.stages)
            if (stage.name == target if isinstance(target, str) else isinstance(stage, target))
        ]
        if len(found) != 1:
            wanted = target if isinstance(target, str) else target.__name__
            problem = "no stage" if not found else f"{len(found)} stages"
            raise GraphError(f"{problem} {wanted!r} in {' >> '.join(s.name for s in self.stages)}")
        return found[0]

    def _spliced(self, at: int, instead_of: int, stage: Stage) -> Self:
        return type(self)(*self.stages[:at], stage, *self.stages[at + instead_of :])


class Segment(_Line, AsyncEngine[In_contra, Out_co]):
    """Operators that end in an engine; itself an engine.

    It owns its stages and nothing else owns it but the controls of its requests: when its last reference goes, its
    stages are released as soon as the requests that went through them are gone too.
    """

    def __init__(self, *stages: Stage) -> None:
        super().__init__(*stages)
        *operators, last = self.stages
        if not isinstance(last, AsyncEngine):
            raise LinkError(f"a segment ends in an engine, but {last} is an operator")
        self._generate = _folded(operators, last).generate
        self.declares = (self._takes, self._gives)

    def generate(self, request: Context[In_contra]) -> Coroutine[Any, Any, ResponseStream[Out_co]]:
        """See the contract of `AsyncEngine`; the coroutine is the first stage's own."""
        request.control.retain(self)
        return self._generate(request)


class Chain(_Line, Operator[In_contra, Out_co, NextIn_co, NextOut_contra]):
    """Operators in a row, with the end still open; itself an operator."""

    def __init__(self, *stages: Stage) -> None:
        super().__init__(*stages)
        if isinstance(self.stages[-1], AsyncEngine):
            raise LinkError(f"a chain is open at its end, but {self.stages[-1]} is an engine")

    def generate(
        self, request: Context[In_contra], next: AsyncEngine[NextIn_co, NextOut_contra]
    ) -> Coroutine[Any, Any, ResponseStream[Out_co]]:
        """Run the request through all of it; for callers that link a chain to an engine of their own each time."""
        request.control.retain(self)
        return _folded(self.stages, next).generate(request)


def join(first: Operator[Any, Any, Any, Any], next: Stage) -> Stage:
    """Return `first >> next`: a segment if `next` is an engine, else a chain."""
    if not isinstance(next, Stage):
        raise LinkError(f"{first} cannot be followed by {next!r}, which is neither an operator nor an engine")
    return Segment(first, next) if isinstance(next, AsyncEngine) else Chain(first, next)


@overload
def link(first: Operator[In, Out, X, Y], next: AsyncEngine[X, Y], /) -> Segment[In, Out]: ...
@overload
def link(*stages: Stage) -> Segment[Any, Any]: ...
def link(*stages: Stage) -> Segment[Any, Any]:
    """Return the segment of the stages, for graphs put together from lists.

    Raise LinkError, naming the two stages and their types, where neighbours do not fit.
    """
    if not stages:
        raise GraphError("nothing to link")
    return Segment(*stages)


class LateEngine(AsyncEngine[In_contra, Out_co]):
    """An end whose engine is attached later, once: the entry of a graph that is built before what follows it."""

    _missing: type[NoEdge] = NoEdge

    def __init__(self) -> None:
        self._engine: AsyncEngine[In_contra, Out_co] | None = None

    def attach(self, engine: AsyncEngine[In_contra, Out_co]) -> None:
        """Set the engine. Raise EdgeAlreadySet the second time."""
        if self._engine is not None:
            raise EdgeAlreadySet(f"{self} already leads to {self._engine}")
        self._engine = engine

    async def generate(self, request: Context[In_contra]) -> ResponseStream[Out_co]:
        """Return the attached engine's answer. Raise NoEdge (at a segment's exit NoNetworkEdge) while there is none."""
        if self._engine is None:
            raise self._missing(f"{self} leads nowhere: attach an engine first")
        return await self._engine.generate(request)

    def branches(self) -> dict[str, Stage]:
        return {} if self._engine is None else {"attached": self._engine}


class SegmentSink(LateEngine[In_contra, Out_co]):
    """A segment's exit to the network."""

    _missing = NoNetworkEdge


def _signature(stage: Stage) -> Signature:
    if isinstance(stage, Operator):
        return Signature.of(stage, Operator)
    if isinstance(stage, AsyncEngine):
        return Signature.of(stage, AsyncEngine)
    raise LinkError(f"{stage!r} is neither an operator nor an engine")
