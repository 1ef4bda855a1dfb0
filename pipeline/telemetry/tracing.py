"""Tracing: a span for each stage of a graph, below the span of the request.

    graph = traced(graph, tracer=tracer)        # a graph that is not wrapped pays nothing
    span = RequestSpan("POST /v1/chat/completions", headers, tracer)
    context.trace = span.trace                  # or: context.trace = extract(headers)

`Context.trace` is the context of OpenTelemetry in which the stage that made the request works: its span, and baggage.
So each stage's span hangs below that of the stage above, sub-requests included. Uses the API of OpenTelemetry only;
programs configure the SDK.

With `metrics` and `trace_headers` the one door of opentelemetry in the library.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context as TraceContext
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from pipeline.protocols import TraceLink

from ..annotated import Annotated
from ..context import Context
from ..control import ReleaseOnce
from ..engine import AsyncEngine
from ..graph import Segment
from ..operator import Operator
from ..signatures import Signature
from ..stage import Stage
from ..stream import ResponseStream
from .propagation import extract, linked

Out = TypeVar("Out")

Tracer = trace.Tracer
Attributes = Mapping[str, AttributeValue]

ENDING = "penstock.ending"
"""Attribute of a span that lasts as long as a stream: `ended`, `failed`, `closed` (by its reader) or `unread`."""
REQUEST_ID = "penstock.request_id"

UNTRACED: Final = TraceContext()
"""`Context.trace` of a request that has no spans at all, whatever tracer its stages have: a probe."""

_TEXT_MAX = 1024
"""Characters kept of an error's text."""


# -- spans around stages


def traced(graph: Segment[Any, Any], *, tracer: Tracer | None = None) -> Segment[Any, Any]:
    """Return the same graph with a span around each stage that adds time.

    A span starts when its stage is called and ends with the stage's stream, however that ends; an exception or an error
    item is recorded and sets its status. The stages keep their names, text, types, branches and members. A request that
    is not sampled passes through the stages as they are.
    """
    tracer = tracer or trace.get_tracer("penstock")
    return Segment(*(_wrapped(stage, tracer) for stage in graph.stages))


def _wrapped(stage: Stage, tracer: Tracer) -> Stage:
    if not stage.adds_time or isinstance(stage, _TracedOperator | TracedEngine):
        return stage
    if isinstance(stage, Operator):
        return _TracedOperator(stage, tracer)
    assert isinstance(stage, AsyncEngine), "a segment has operators and an engine"
    return TracedEngine(stage, tracer)


class _Traced(Stage):
    """Looks like the stage it wraps."""

    stage: Stage

    @property
    def name(self) -> str:
        return self._name or self.stage.name

    def branches(self) -> Mapping[str, Stage]:
        return self.stage.branches()

    def members(self) -> Sequence[str]:
        return self.stage.members()

    def parts(self) -> Sequence[Stage]:
        return self.stage.parts()

    def __str__(self) -> str:
        return str(self.stage)


class _TracedOperator(_Traced, Operator[Any, Any, Any, Any]):
    def __init__(self, stage: Operator[Any, Any, Any, Any], tracer: Tracer) -> None:
        self.stage, self._operator, self._tracer = stage, stage, tracer
        types = Signature.of(stage, Operator)
        self.declares = (types.takes, types.gives, types.sends, types.expects)

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        inner, span = _below(request, self.name, self._tracer)
        if not span.is_recording():
            return await self._operator.generate(inner, next)
        return await _until_ended(self._operator.generate(inner, next), request, span)


class TracedEngine(_Traced, AsyncEngine[Any, Any]):
    """An engine in a span of its own; `stage` is the engine."""

    def __init__(self, stage: AsyncEngine[Any, Any], tracer: Tracer) -> None:
        self.stage, self._engine, self._tracer = stage, stage, tracer
        types = Signature.of(stage, AsyncEngine)
        self.declares = (types.takes, types.gives)

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        return await spanned(request, self.name, self._engine.generate, tracer=self._tracer)


async def spanned(
    request: Context[Any],
    name: str,
    generate: Callable[[Context[Any]], Awaitable[ResponseStream[Out]]],
    *,
    tracer: Tracer | None = None,
    attributes: Attributes | None = None,
    link: TraceLink | None = None,
) -> ResponseStream[Out]:
    """Return the stream of `generate` for the request below a new span, which lasts until the stream has ended.

    What `generate` raises is recorded in the span and raised.
    """
    inner, span = _below(request, name, tracer or trace.get_tracer("penstock"), attributes, link)
    if not span.is_recording():
        return await generate(inner)
    return await _until_ended(generate(inner), request, span)


def _below(
    request: Context[Any],
    name: str,
    tracer: Tracer,
    attributes: Attributes | None = None,
    link: TraceLink | None = None,
) -> tuple[Context[Any], Span]:
    """Return the request as the stage sees it, and its span, below the caller's.

    Without a span in the request, the current span of the caller's task counts, if there is one.
    """
    above = _as_context(request.trace)
    if above is not None and (above is UNTRACED or _is_left_out(trace.get_current_span(above))):
        return request, trace.INVALID_SPAN
    values: dict[str, AttributeValue] = {REQUEST_ID: request.id}
    if attributes:
        values.update(attributes)
    target = None if link is None else linked(link)
    span = tracer.start_span(name, above, attributes=values, links=None if target is None else [Link(target)])
    if above is None and not span.get_span_context().is_valid:  # nothing traces, so nothing has to hang below
        return request, trace.INVALID_SPAN
    inner = request.with_payload(request.payload)
    inner.trace = trace.set_span_in_context(span, above)
    return inner, span


def _is_left_out(above: Span) -> bool:
    """Return whether the sampler has dropped the request: a span below would be dropped too, at half a real one's cost.

    The decision of another process does not count, and a span that has ended was sampled.
    """
    ids = above.get_span_context()
    return ids.is_valid and not ids.is_remote and not ids.trace_flags.sampled and not above.is_recording()


async def _until_ended(call: Awaitable[ResponseStream[Any]], request: Context[Any], span: Span) -> ResponseStream[Any]:
    course = _Course(span)
    try:
        stream = await call
    except BaseException as error:
        course.fails(error)
        course.end()
        raise
    ended = ReleaseOnce(course.end)
    return ResponseStream(_followed(stream, course, ended), request, stream, ended)


async def _followed(stream: ResponseStream[Any], course: _Course, ended: ReleaseOnce) -> AsyncGenerator[Any, None]:
    course.ending = "closed"  # unless it turns out otherwise
    try:
        async with stream:
            async for item in stream:
                if type(item) is Annotated and item.is_error:
                    course.fails(item.extract_error())
                yield item
        course.ends()
    except Exception as error:
        course.fails(error)
        raise
    finally:
        ended.release()


class _Course:
    """The course of a stream, which is written into its span at the end."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._failure: BaseException | None = None
        self.ending = "unread"

    def ends(self) -> None:
        if self._failure is None:
            self.ending = "ended"

    def fails(self, error: BaseException | None) -> None:
        """Record an error. A cancellation comes from the reader and is no error."""
        if isinstance(error, Exception):
            self.ending, self._failure = "failed", error
        else:
            self.ending = "closed"

    def end(self) -> None:
        self._span.set_attribute(ENDING, self.ending)
        if self._failure is not None:
            _record(self._span, self._failure)
        self._span.end()


def _record(span: Span, error: BaseException | str) -> None:
    """Set the span's status to error, with the error's text; an exception becomes an event as well.

    The event has no traceback: every stage that the error passes records it, and formatting each would be expensive.
    """
    text = str(error)[:_TEXT_MAX]
    if isinstance(error, BaseException):
        kind = type(error)
        span.add_event(
            "exception", {"exception.type": f"{kind.__module__}.{kind.__qualname__}", "exception.message": text}
        )
    span.set_status(StatusCode.ERROR, text)


# -- other spans


class _OwnSpan:
    """A span that its maker ends, once."""

    __slots__ = ("_span",)
    _span: Span

    def fails(self, error: BaseException | str) -> None:
        """Set the span's status to error."""
        _record(self._span, error)

    def end(self) -> None:
        """End the span."""
        self._span.end()


class OpenSpan(_OwnSpan):
    """A span below the one of a request, for a stage that shows more of itself than `traced` does.

    `context`: the request below this span, for the next stage. The span ends with `end`, once.
    """

    __slots__ = ("context",)

    def __init__(
        self,
        request: Context[Any],
        name: str,
        *,
        tracer: Tracer | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        self.context, self._span = _below(request, name, tracer or trace.get_tracer("penstock"), attributes)


class RequestSpan(_OwnSpan):
    """The span of a whole request at a server, above all other spans of the request.

    Its parent is the current span of this task, if other instrumentation has made one, else the span in the headers.
    `trace`: the value for `Context.trace`. The span ends with `end`, once.
    """

    def __init__(
        self, name: str, headers: Mapping[str, str], tracer: Tracer, attributes: Attributes | None = None
    ) -> None:
        above = None if trace.get_current_span().get_span_context().is_valid else _as_context(extract(headers))
        self._span = tracer.start_span(name, above, SpanKind.SERVER, dict(attributes or {}))
        self.trace: object = trace.set_span_in_context(self._span, above)

    @property
    def trace_id(self) -> str | None:
        """The trace it is in, 32 hex digits; None without one."""
        ids = self._span.get_span_context()
        return f"{ids.trace_id:032x}" if ids.is_valid else None

    @property
    def is_recording(self) -> bool:
        """False for a request that is not sampled: nothing of it is kept."""
        return self._span.is_recording()

    def annotate(self, attributes: Attributes) -> None:
        """Set attributes."""
        self._span.set_attributes(dict(attributes))


# -- what a stage shows of itself


def annotate(context: Context[Any], attributes: Attributes) -> None:
    """Set attributes on the span of the stage that was given this context, if there is one."""
    if (span := _span(context)) is not None:
        span.set_attributes(dict(attributes))


def link_to(context: Context[Any], *links: TraceLink) -> None:
    """Link the stage's span to spans of earlier workers. A link that is not of hex digits is left out."""
    if (span := _span(context)) is None:
        return
    for link in links:
        if (target := linked(link)) is not None:
            span.add_link(target)


def trace_link(context: Context[Any]) -> TraceLink | None:
    """Return the stage's span as a link for others; None without one."""
    if (span := _span(context)) is None or not (ids := span.get_span_context()).is_valid:
        return None
    return TraceLink(f"{ids.trace_id:032x}", f"{ids.span_id:016x}")


def _as_context(found: object) -> TraceContext | None:
    return found if isinstance(found, TraceContext) else None


def _span(context: Context[Any]) -> Span | None:
    """Return the span of the stage that was given this context."""
    found = context.trace
    if not isinstance(found, TraceContext):
        return None
    span = trace.get_current_span(found)
    return None if span is trace.INVALID_SPAN else span
