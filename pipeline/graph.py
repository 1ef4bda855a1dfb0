"""Segment and Chain: operators linked to an engine become an engine, operators alone an operator.

    graph = Detokenize() >> PushRouter(workers)        # or link(Detokenize(), PushRouter(workers))
    print(graph)                                       # the line above
    graph.replace(PushRouter, echo)                    # another graph; this one is untouched

Source: dynamo lib/runtime/src/pipeline/nodes.rs. Other than there, a request follows references made once at linking;
there is no table of pending requests, so an answer cannot miss its caller, and nothing forms a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Self, TypeVar, cast, overload

from attrs import define, field

from .context import Context
from .engine import AsyncEngine
from .errors import EdgeAlreadySet, GraphError, LinkError, NoEdge, NoNetworkEdge
from .operator import Operator
from .signatures import Signature, check_line
from .stage import Stage
from .stream import ResponseStream

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
        return _render(self.stages, form)

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


# -- drawing a line of stages with its side branches: mermaid, dot or plain text


@define
class _Node:
    """A stage to draw: its label, the instances behind it, and its edges."""

    text: str
    members: Sequence[str] = ()
    next: _Node | None = None
    branches: list[tuple[str, _Node]] = field(factory=list)


def _render(stages: Sequence[Stage], form: Literal["mermaid", "dot", "text"]) -> str:
    """Return the graph in that form. Raise ValueError for any other."""
    forms: dict[str, Callable[[_Node], str]] = {"mermaid": _mermaid, "dot": _dot, "text": _text}
    if form not in forms:
        raise ValueError(f"form is one of {', '.join(forms)}, not {form!r}")
    return forms[form](_nodes(stages))


def _nodes(stages: Sequence[Stage]) -> _Node:
    """Return the first node of the line; each leads to the next and to the first node of each branch."""
    node: _Node | None = None
    for stage in reversed(stages):
        branches = [(label, _nodes(side.parts())) for label, side in stage.branches().items()]
        node = _Node(str(stage), stage.members(), node, branches)
    assert node is not None
    return node


def _edges(first: _Node) -> tuple[list[_Node], list[tuple[_Node, _Node, str]]]:
    """Return all nodes in drawing order, and (from, to, label) with an empty label on the main line."""
    nodes: list[_Node] = []
    edges: list[tuple[_Node, _Node, str]] = []
    node: _Node | None = first
    while node is not None:
        nodes.append(node)
        for label, side in node.branches:
            edges.append((node, side, label))
            more_nodes, more_edges = _edges(side)
            nodes += more_nodes
            edges += more_edges
        if node.next is not None:
            edges.append((node, node.next, ""))
        node = node.next
    return nodes, edges


def _mermaid(first: _Node) -> str:
    nodes, edges = _edges(first)
    names = {id(node): f"n{i}" for i, node in enumerate(nodes)}
    lines = ["flowchart TD"]
    for node in nodes:
        name = names[id(node)]
        lines.append(f'    {name}["{_escaped(node.text)}"]')
        for i, member in enumerate(node.members):
            lines.append(f'    {name} --- {name}_{i}(["{_escaped(member)}"])')
    for start, end, label in edges:
        arrow = f'-. "{_escaped(label)}" .->' if label else "-->"
        lines.append(f"    {names[id(start)]} {arrow} {names[id(end)]}")
    return "\n".join(lines)


_MERMAID = str.maketrans({"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;"})


def _escaped(text: str) -> str:
    """Text inside a quoted mermaid label."""
    return text.translate(_MERMAID)


def _dot(first: _Node) -> str:
    nodes, edges = _edges(first)
    names = {id(node): f"n{i}" for i, node in enumerate(nodes)}
    lines = ["digraph {", "    node [shape=box]"]
    for node in nodes:
        name = names[id(node)]
        lines.append(f"    {name} [label={_quoted(node.text)}]")
        for i, member in enumerate(node.members):
            lines.append(f"    {name}_{i} [label={_quoted(member)}, shape=oval]")
            lines.append(f"    {name} -> {name}_{i} [dir=none]")
    for start, end, label in edges:
        style = f" [label={_quoted(label)}, style=dashed]" if label else ""
        lines.append(f"    {names[id(start)]} -> {names[id(end)]}{style}")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(first: _Node) -> str:
    lines: list[str] = []
    node: _Node | None = first
    while node is not None:
        lines.append(node.text)
        bar = "│" if node.next is not None else " "
        lines += [f"{bar}   ○ {member}" for member in node.members]
        for label, side in node.branches:
            head, *rest = _text(side).splitlines()
            lines.append(f"{bar}└─ {label} ─► {head}" if node.next is None else f"├─ {label} ─► {head}")
            lines += [f"{bar}{' ' * (len(label) + 7)}{line}" for line in rest]
        if node.next is not None:
            lines.append("▼")
        node = node.next
    return "\n".join(lines)
