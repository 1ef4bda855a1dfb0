"""Recorded spans, and the check that they are one complete tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

from attrs import field, frozen
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from starlette.types import ASGIApp

from serving.deployment import OpenGraph


@frozen(eq=False)
class Node:
    """One span, as a collector sees it. Ids are hex digits, times nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: str = "INTERNAL"
    status: str = "UNSET"
    attributes: dict[str, Any] = field(factory=dict)
    links: tuple[str, ...] = ()

    @classmethod
    def of(cls, span: ReadableSpan) -> Node:
        ids, parent = span.context, span.parent
        assert ids is not None
        assert span.start_time is not None
        assert span.end_time is not None
        return cls(
            span.name,
            f"{ids.trace_id:032x}",
            f"{ids.span_id:016x}",
            "" if parent is None or parent.is_remote else f"{parent.span_id:016x}",
            span.start_time,
            span.end_time,
            span.kind.name,
            span.status.status_code.name,
            dict(span.attributes or {}),
            tuple(f"{link.context.span_id:016x}" for link in span.links),
        )


@frozen(eq=False)
class Tree:
    """A complete tree; prints as its names, each level indented by two blanks, children in the order they began."""

    root: Node
    nodes: Sequence[Node]

    def __str__(self) -> str:
        return "\n".join(self._lines(self.root, ""))

    def _lines(self, node: Node, indent: str) -> Iterator[str]:
        yield indent + node.name
        for child in self.below(node):
            yield from self._lines(child, indent + "  ")

    def below(self, node: Node) -> list[Node]:
        return sorted((each for each in self.nodes if each.parent_id == node.span_id), key=lambda each: each.start_ns)

    def all(self, name: str) -> list[Node]:
        """Those of that name in the order they began."""
        return sorted((node for node in self.nodes if node.name == name), key=lambda node: node.start_ns)

    def one(self, name: str) -> Node:
        (node,) = self.all(name)
        return node


def one_tree(nodes: Sequence[Node], *, outlives: Sequence[str] = ()) -> Tree:
    """The one tree that the spans are. Fails unless each is there once, below one root, and within its parent's time.

    `outlives` names spans that may end after the one above them: work that goes on without its client.
    """
    by_id = {node.span_id: node for node in nodes}
    assert len(by_id) == len(nodes), "a span came twice"
    assert len({node.trace_id for node in nodes}) == 1, "spans of more than one trace"
    roots = [node for node in nodes if not node.parent_id]
    assert len(roots) == 1, f"{len(roots)} roots: {[node.name for node in roots]}"
    for node in nodes:
        if not node.parent_id:
            continue
        assert node.parent_id in by_id, f"{node.name} hangs below a span that is missing"
        above = by_id[node.parent_id]
        assert above.start_ns <= node.start_ns, f"{node.name} begins before {above.name}"
        assert node.start_ns <= node.end_ns
        assert node.end_ns <= above.end_ns or node.name in outlives, f"{node.name} ends after {above.name}"
    assert all(link in by_id for node in nodes for link in node.links), "a link to a span that is missing"
    return Tree(roots[0], nodes)


class Recorded(SpanProcessor):
    """All spans of a provider: those that are open, and those that have ended, in that order."""

    def __init__(self, **settings: Any) -> None:
        provider = TracerProvider(shutdown_on_exit=False, **settings)
        provider.add_span_processor(self)
        self.tracer = provider.get_tracer("test")
        self.open: dict[int, str] = {}
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Any = None) -> None:
        assert span.context is not None
        self.open[span.context.span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        del self.open[span.context.span_id]
        self.ended.append(span)

    @property
    def nodes(self) -> list[Node]:
        return [Node.of(span) for span in self.ended]

    def tree(self, **settings: Any) -> Tree:
        """See `one_tree`; nothing is open."""
        assert not self.open, f"not ended: {sorted(self.open.values())}"
        return one_tree(self.nodes, **settings)

    @property
    def texts(self) -> str:
        """Everything that was recorded, as one text."""
        return "\n".join(span.to_json() for span in self.ended)


@frozen
class Served:
    """A traced app, and the graph behind it."""

    app: ASGIApp
    opened: OpenGraph


Serving: TypeAlias = Callable[..., AbstractAsyncContextManager[Served]]
"""A traced app over the standard graph: `async with serving(engine="mocker", ...) as it`; keywords of `GraphConfig`."""
