"""Tracing: a span for each stage of a graph, and the trace headers that cross processes.

    graph = traced(graph)                       # a graph that is not wrapped pays nothing
    context.trace = extract(request.headers)    # where an outer span is known

`Context.trace` holds the span of the stage that made the context, so each stage's span hangs below that of the stage
above, sub-requests included. Uses the API of OpenTelemetry only: whoever runs the program configures it.

With `metrics` the one door of opentelemetry in the library.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context as SpanParent
from opentelemetry.trace import Span, SpanContext, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from pipeline.protocols import TraceLink

from .annotated import Annotated
from .context import Context
from .declared import Signature
from .engine import AsyncEngine
from .once import Once
from .operator import Operator
from .segment import Segment
from .stage import Stage
from .stream import ResponseStream

ENDING = "penstock.ending"
"""Attribute of a stage's span: `ended`, `failed`, `closed` (by its reader) or `unread`."""
REQUEST_ID = "penstock.request_id"

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


# -- spans around stages


def traced(graph: Segment[Any, Any], *, tracer: trace.Tracer | None = None) -> Segment[Any, Any]:
    """The same graph with a span around each stage that adds time.

    A span starts when its stage is asked and ends with the stage's stream, however that ends; an exception or an error
    item is recorded and sets its status. The stages keep their names, text, types, branches and members.
    """
    tracer = tracer or trace.get_tracer("penstock")
    return Segment(*(_wrapped(stage, tracer) for stage in graph.stages))


def _wrapped(stage: Stage, tracer: trace.Tracer) -> Stage:
    if not stage.adds_time or isinstance(stage, _TracedOperator | _TracedEngine):
        return stage
    if isinstance(stage, Operator):
        return _TracedOperator(stage, tracer)
    assert isinstance(stage, AsyncEngine), "a segment has operators and an engine"
    return _TracedEngine(stage, tracer)


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

    def __str__(self) -> str:
        return str(self.stage)


class _TracedOperator(_Traced, Operator[Any, Any, Any, Any]):
    def __init__(self, stage: Operator[Any, Any, Any, Any], tracer: trace.Tracer) -> None:
        self.stage, self._operator, self._tracer = stage, stage, tracer
        types = Signature.of(stage, Operator)
        self.declares = (types.takes, types.gives, types.sends, types.expects)

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        inner, span = _below(request, self.name, self._tracer)
        return await _spanned(self._operator.generate(inner, next), request, span)


class _TracedEngine(_Traced, AsyncEngine[Any, Any]):
    def __init__(self, stage: AsyncEngine[Any, Any], tracer: trace.Tracer) -> None:
        self.stage, self._engine, self._tracer = stage, stage, tracer
        types = Signature.of(stage, AsyncEngine)
        self.declares = (types.takes, types.gives)

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        inner, span = _below(request, self.name, self._tracer)
        return await _spanned(self._engine.generate(inner), request, span)


def _below(request: Context[Any], name: str, tracer: trace.Tracer) -> tuple[Context[Any], Span]:
    """The request as the stage sees it, and its span, below the caller's.

    Where the request carries none, the span that is current in the caller's task counts, if there is one.
    """
    above = _span(request)
    parent = None if above is None else trace.set_span_in_context(above, SpanParent())
    span = tracer.start_span(name, parent, attributes={REQUEST_ID: request.id})
    inner = request.with_payload(request.payload)
    inner.trace = span
    return inner, span


async def _spanned(
    asked: Coroutine[Any, Any, ResponseStream[Any]], request: Context[Any], span: Span
) -> ResponseStream[Any]:
    course = _Course(span)
    try:
        stream = await asked
    except BaseException as error:
        course.fails(error)
        course.end()
        raise
    ended = Once(course.end)
    return ResponseStream(_followed(stream, course, ended), request, stream, ended)


async def _followed(stream: ResponseStream[Any], course: _Course, ended: Once) -> AsyncGenerator[Any, None]:
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
    """How a stage's stream has gone so far, until it is written into the span that then ends."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._failure: BaseException | None = None
        self.ending = "unread"

    def ends(self) -> None:
        if self._failure is None:
            self.ending = "ended"

    def fails(self, error: BaseException | None) -> None:
        """Notes an error; a cancellation is the reader's doing and none."""
        if isinstance(error, Exception):
            self.ending, self._failure = "failed", error
        else:
            self.ending = "closed"

    def end(self) -> None:
        self._span.set_attribute(ENDING, self.ending)
        if self._failure is not None:
            self._span.record_exception(self._failure)
            self._span.set_status(StatusCode.ERROR, str(self._failure))
        self._span.end()


# -- a span of one's own


class OpenSpan:
    """A span below the one of a request, for a stage that says more about itself than `traced` can.

    `context` is the request as it is below this span; give that one on. Ends with `end`, once.
    """

    def __init__(self, request: Context[Any], name: str, *, tracer: trace.Tracer | None = None) -> None:
        self.context, self._span = _below(request, name, tracer or trace.get_tracer("penstock"))

    def fails(self, error: BaseException | str) -> None:
        """Sets the span's status to error."""
        if isinstance(error, BaseException):
            self._span.record_exception(error)
        self._span.set_status(StatusCode.ERROR, str(error))

    def end(self) -> None:
        self._span.end()


# -- what a stage says about itself


def annotate(context: Context[Any], attributes: Mapping[str, AttributeValue]) -> None:
    """Sets attributes on the span of the stage that was given this context; does nothing without one."""
    if (span := _span(context)) is not None:
        span.set_attributes(attributes)


def link_to(context: Context[Any], *links: TraceLink) -> None:
    """Links the stage's span to spans of earlier workers. A link that is not of hex digits is left out."""
    if (span := _span(context)) is None:
        return
    for link in links:
        if (target := _parsed(f"00-{link.trace_id}-{link.span_id}-01".lower())) is not None:
            span.add_link(target)


def trace_link(context: Context[Any]) -> TraceLink | None:
    """The stage's span as a link for others; None without one."""
    if (span := _span(context)) is None or not (ids := span.get_span_context()).is_valid:
        return None
    return TraceLink(f"{ids.trace_id:032x}", f"{ids.span_id:016x}")


# -- headers


def extract(headers: Mapping[str, str]) -> object:
    """The caller's span as `Context.trace` wants it, from `traceparent` and `tracestate`; None if there is none.

    A traceparent has exactly four parts; any other is ignored as a whole, with its tracestate.
    Source: dynamo lib/runtime/src/logging.rs, parse_traceparent.
    """
    known = {name.lower(): value for name, value in headers.items()}
    ids = _parsed(known.get("traceparent", "").strip().lower(), known.get("tracestate"))
    return None if ids is None else trace.NonRecordingSpan(ids)


def inject(context: Context[Any]) -> dict[str, str]:
    """The headers that carry the stage's span to another process; empty without one."""
    if (span := _span(context)) is None or not (ids := span.get_span_context()).is_valid:
        return {}
    headers = {"traceparent": f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"}
    return headers | {"tracestate": ids.trace_state.to_header()} if ids.trace_state else headers


def _parsed(traceparent: str, tracestate: str | None = None) -> SpanContext | None:
    if (parts := _TRACEPARENT.fullmatch(traceparent)) is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in parts.groups())
    state = TraceState.from_header([tracestate]) if tracestate else None
    ids = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags), trace_state=state)
    return ids if ids.is_valid else None


def _span(context: Context[Any]) -> Span | None:
    return context.trace if isinstance(context.trace, Span) else None
