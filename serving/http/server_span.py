"""The span of a request at the server, from its first header to the last byte of its answer.

    TracedEndpoint ── ServerSpan in the scope ──► GenerationEndpoint: request, answer, problem
                   ◄── status of the answer

An app without a tracer has no TracedEndpoint, and its endpoints find a span that does nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pipeline import Context
from pipeline.telemetry import ENDING, REQUEST_ID, RequestSpan, Tracer, extract

from . import span_attributes
from .problems import CLIENT_GONE, Problem
from .prompts import OpenAIRequest
from .request import RequestRecord

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_SPAN = "penstock.span"
"""Where the span is in the scope."""


class PassingSpan:
    """The span of an app that traces nothing. A `traceparent` passes through all the same."""

    is_recording = False

    def covers(self, context: Context[Any], headers: Mapping[str, str]) -> None:
        """What is done for the context is done below this span."""
        if "traceparent" in headers:
            context.trace = extract(headers)

    def asked(self, request: OpenAIRequest, endpoint: str, prompts: int) -> None:
        """Note what the request asks for."""

    def answered(self, attributes: Mapping[str, Any]) -> None:
        """Note what came of it: `span_attributes.of_answer`."""

    def ended(self, problem: Problem | None) -> None:
        """Note how it ended, None for a whole answer."""


_PASSING = PassingSpan()


class ServerSpan(PassingSpan):
    """The span of one request. `end` ends it, once."""

    def __init__(self, span: RequestSpan) -> None:
        self._span = span

    @property
    def is_recording(self) -> bool:  # type: ignore[override]
        return self._span.is_recording

    def covers(self, context: Context[Any], headers: Mapping[str, str]) -> None:
        context.trace = self._span.trace

    def asked(self, request: OpenAIRequest, endpoint: str, prompts: int) -> None:
        if self.is_recording:
            self._span.annotate(span_attributes.of_request(request, endpoint, prompts))

    def answered(self, attributes: Mapping[str, Any]) -> None:
        self._span.annotate(attributes)

    def ended(self, problem: Problem | None) -> None:
        if problem is None:
            self._span.annotate({ENDING: "ended"})
            return
        self._span.annotate({ENDING: "closed" if problem is CLIENT_GONE else "failed"})
        self._span.annotate(span_attributes.of_problem(problem))
        if problem.status >= 500:
            self._span.fails(problem.message)

    def sends(self, send: Send) -> Send:
        """`send`, with the status of the answer noted."""

        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._span.annotate({span_attributes.STATUS_CODE: message["status"]})
            await send(message)

        return noting

    def fails(self, error: BaseException) -> None:
        """The request was cut off, or broke where that must not happen."""
        self._span.annotate({ENDING: "failed" if isinstance(error, Exception) else "closed"})
        if isinstance(error, Exception):
            self._span.annotate({span_attributes.ERROR_TYPE: type(error).__qualname__})
            self._span.fails(error)

    def end(self) -> None:
        self._span.end()


class TracedEndpoint:
    """An endpoint in a span of its own for each request; `route` is its path."""

    def __init__(self, endpoint: Application, route: str, tracer: Tracer) -> None:
        self._endpoint, self._route, self._tracer = endpoint, route, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. The span ends when the endpoint has, with all that it opened closed."""
        record = RequestRecord.of(scope)
        headers = record.headers.values
        attributes = span_attributes.of_connection(scope, headers, self._route) | {REQUEST_ID: record.id}
        inner = RequestSpan(f"{scope['method']} {self._route}", headers, self._tracer, attributes)
        record.span_trace_id = inner.trace_id
        span = scope[_SPAN] = ServerSpan(inner)
        try:
            await self._endpoint(scope, receive, span.sends(send) if span.is_recording else send)
        except BaseException as error:
            span.fails(error)
            raise
        finally:
            span.end()


def span_of(scope: Mapping[str, Any]) -> PassingSpan:
    """The span of the request in this scope."""
    found = scope.get(_SPAN)
    return found if isinstance(found, PassingSpan) else _PASSING
