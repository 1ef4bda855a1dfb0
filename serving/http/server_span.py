"""ServerSpan: the span of a request at the server, from its first header to the last byte of its answer.

Its attributes follow OpenTelemetry's semantic conventions, with ours (`penstock.*`) beside them. Those of HTTP are
stable. Those of generative AI (`gen_ai.*`) are not: the names here are of revision 1.41.1, the last that has them
beside the others. No attribute holds a part of a prompt or an answer, and stop sequences count as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import Context
from pipeline.telemetry import ENDING, REQUEST_ID, RequestSpan, Tracer, extract

from ..openai import OpenAIRequest, UsageCount
from ..problems import CLIENT_GONE, Problem

Attributes = dict[str, Any]

PROVIDER = "penstock"
ROUTE = "http.route"
STATUS_CODE = "http.response.status_code"
ERROR_TYPE = "error.type"
PROBLEM = "penstock.problem"
"""Class of the problem that a request ended with, as in the metrics; set for errors of the client too."""
PROMPTS = "penstock.prompts"
LIMIT = "penstock.limit"

_TEXT_MAX = 256
"""Characters kept of a text that the client wrote."""
_OPERATIONS = {"chat_completions": "chat", "completions": "text_completion"}
_REQUEST_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


class ServerSpan:
    """The span of one request. Without a tracer it records nothing, and only passes a client's `traceparent` on."""

    __slots__ = ("_span", "is_recording", "trace_id")

    def __init__(self, span: RequestSpan | None = None) -> None:
        self._span = span
        self.is_recording = span is not None and span.is_recording
        self.trace_id = None if span is None else span.trace_id

    @classmethod
    def begin(
        cls, scope: Mapping[str, Any], headers: Mapping[str, str], route: str, request_id: str, tracer: Tracer
    ) -> ServerSpan:
        """Return the span of the request with this scope; `route` is the path of its endpoint. The caller ends it."""
        attributes = connection_attributes(scope, headers, route) | {REQUEST_ID: request_id}
        return cls(RequestSpan(f"{scope['method']} {route}", headers, tracer, attributes))

    def attach(self, context: Context[Any], headers: Mapping[str, str]) -> None:
        """Make the span the parent of everything that is done for the context."""
        if self._span is not None:
            context.trace = self._span.trace
        elif "traceparent" in headers:
            context.trace = extract(headers)

    def annotate(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes, if the span is recording."""
        if self._span is not None:
            self._span.annotate(attributes)

    def set_result(self, problem: Problem | None) -> None:
        """Record the problem that the request ended with, None for a complete answer."""
        if self._span is None:
            return
        if problem is None:
            self._span.annotate({ENDING: "ended"})
            return
        self._span.annotate({ENDING: "closed" if problem is CLIENT_GONE else "failed"} | problem_attributes(problem))
        if problem.status >= 500:
            self._span.fails(problem.message)

    def end(self, error: BaseException | None) -> None:
        """End the span; `error` is what the endpoint raised: the request was cancelled, or met a fault of ours."""
        if self._span is None:
            return
        if isinstance(error, Exception):
            self._span.annotate({ENDING: "failed", ERROR_TYPE: type(error).__qualname__})
            self._span.fails(error)
        elif error is not None:
            self._span.annotate({ENDING: "closed"})
        self._span.end()


# -- attributes


def connection_attributes(scope: Mapping[str, Any], headers: Mapping[str, str], route: str) -> Attributes:
    """Return what is known before the request is read. `headers` are by lower-case name."""
    found: Attributes = {
        "http.request.method": scope["method"],
        ROUTE: route,
        "url.path": scope["path"][:_TEXT_MAX],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    for names, address in (
        (("server.address", "server.port"), "server"),
        (("client.address", "client.port"), "client"),
    ):
        if (known := scope.get(address)) is not None:
            found |= {name: value for name, value in zip(names, known, strict=False) if value is not None}
    if (agent := headers.get("user-agent")) is not None:
        found["user_agent.original"] = agent[:_TEXT_MAX]
    return found


def request_attributes(request: OpenAIRequest, endpoint: str, prompts: int) -> Attributes:
    """Return the fields of a request; `endpoint` is its API's name in the metrics."""
    found: Attributes = {
        "gen_ai.operation.name": _OPERATIONS[endpoint],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model[:_TEXT_MAX],
        "gen_ai.request.stream": bool(request.stream),
        PROMPTS: prompts,
    }
    if (choices := getattr(request, "n", None) or 1) != 1:
        found["gen_ai.request.choice.count"] = choices
    for name in _REQUEST_FIELDS:
        if isinstance(value := getattr(request, name, None), int | float):
            found[f"gen_ai.request.{name}"] = value
    newer = getattr(request, "max_completion_tokens", None)
    return found if newer is None else found | {"gen_ai.request.max_tokens": newer}


def answer_attributes(
    answer_id: str, model: str, usage: UsageCount, finish_reasons: list[str], first_chunk_s: float | None
) -> Attributes:
    """Return the attributes of an answer; `first_chunk_s` is the time to the first tokens, None without any."""
    found: Attributes = {
        "gen_ai.response.id": answer_id,
        "gen_ai.response.model": model[:_TEXT_MAX],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if finish_reasons:
        found["gen_ai.response.finish_reasons"] = finish_reasons
    if first_chunk_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = first_chunk_s
    if (cached := usage.cached_tokens) is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = cached
    return found


def problem_attributes(problem: Problem) -> Attributes:
    """Return the attributes of a problem. Only a status of 500 or more is an error of the server."""
    found: Attributes = {PROBLEM: problem.kind}
    if problem.status >= 500:
        found[ERROR_TYPE] = problem.kind
    if (exceeded := problem.exceeded) is not None:
        found |= {LIMIT: exceeded.name, f"{LIMIT}.value": exceeded.value, f"{LIMIT}.threshold": exceeded.threshold}
    return found
