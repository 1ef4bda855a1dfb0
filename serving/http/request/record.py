"""RequestRecord: what the edge knows of one request while it lasts: its id, its answer, who answers, how far it came.

Made before anything can fail, so that every answer has an id and every message of the request's tasks names it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

import anyio
from attrs import define, field

from pipeline import AnyContext
from pipeline.errors import CLIENT_CLOSED_REQUEST
from pipeline.llm import tracker_of
from pipeline.protocols import RequestTracker
from pipeline.telemetry import trace_link

from ...log_format import current_fields, with_fields
from ..caller import caller_of
from ..metrics import Refusals, RequestMeter
from ..problems import Problem
from ..routing_headers import decision_headers, workers_of
from .headers import REQUEST_ID, RequestHeaders, uuid_of

Message = MutableMapping[str, Any]

KEY = "penstock.request"
"""Where the record is in an ASGI scope."""
OWN_REQUEST_ID = b"x-penstock-request-id"
"""Header with the id of a request whose client named it otherwise in `x-request-id`."""
_REQUEST_ID = REQUEST_ID.encode()
_NO_HEADERS = RequestHeaders({})

_access = logging.getLogger("serving.access")


@define(eq=False, slots=True)
class RequestRecord:
    """One request. `id` is what spans, logs, bookings and engines know it by.

    `client_id` is what the client called it, if that is no UUID: it is sent back in `x-request-id` as it came, and the
    id in a header of its own. `context` and `meter` are there once the request is known to be one for a model.
    `model` and `client_id` are the client's texts: what prints them has to make them printable.
    """

    scope: Message
    _raw_send: Callable[[Message], Awaitable[None]]
    _refusals: Refusals
    shows_workers: bool
    headers: RequestHeaders = field(init=False)
    """Those of the request, until `forget_headers`."""
    id: str = field(init=False)
    client_id: str | None = field(init=False, default=None)
    _echo: str | None = field(init=False, default=None)
    status: int = field(init=False, default=0)
    model: str | None = field(init=False, default=None)
    span_trace_id: str | None = field(init=False, default=None)
    """Trace of the request's span at the server, for as long as there is no context."""
    context: AnyContext | None = field(init=False, default=None)
    meter: RequestMeter | None = field(init=False, default=None)
    started_s: float = field(init=False, factory=anyio.current_time)

    def __attrs_post_init__(self) -> None:
        self.headers = RequestHeaders.of(self.scope)
        self.id = self.headers.request_id()
        echo = self._echo = self.headers.echo
        if echo is not None and uuid_of(echo) is None:
            self.client_id = echo

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> RequestRecord:
        """The record of the request with this scope."""
        record = scope[KEY]
        assert isinstance(record, cls)
        return record

    def forget_headers(self) -> None:
        """The request is read: its headers are not kept for as long as its answer lasts."""
        self.headers = _NO_HEADERS

    def send(self, message: Message) -> Awaitable[None]:
        """The `send` of the app: notes the status, and completes the headers of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._answer_headers()]
        return self._raw_send(message)

    def _answer_headers(self) -> list[tuple[bytes, bytes]]:
        echo = self._echo
        headers = [(_REQUEST_ID, (self.id if echo is None else echo).encode("ascii"))]
        if self.client_id is not None:
            headers.append((OWN_REQUEST_ID, self.id.encode()))
        return headers + decision_headers(self.trackers) if self.shows_workers else headers

    def note(self, problem: Problem) -> None:
        """Count and log that a limit refused the request, if one did."""
        if problem.exceeded is not None:
            self._refusals.note(problem, self.id, caller_of(self.scope).identity)

    @property
    def trackers(self) -> list[RequestTracker]:
        """Those of its prompts; of one that has not got to a worker, too, where it is the only one."""
        if self.meter is not None and self.meter.trackers:
            return self.meter.trackers
        tracker = None if self.context is None else tracker_of(self.context)
        return [] if tracker is None else [tracker]

    @property
    def trace_id(self) -> str | None:
        """Of the span that the request is in, its own or its client's; None without one."""
        link = None if self.context is None else trace_link(self.context)
        return self.span_trace_id if link is None else link.trace_id

    def close(self) -> None:
        """Let go of the request. What is still written in tasks of it has its id and model, and no more."""
        self.context = self.meter = None

    def fields(self) -> dict[str, str]:
        """What messages written in the request's tasks say of it."""
        known = {
            "request": self.id,
            "client_request": self.client_id,
            "trace": self.trace_id,
            "model": self.model,
            "worker": workers_of(self.trackers),
        }
        return {name: value for name, value in known.items() if value}

    def log_access(self) -> None:
        """Writes the line of the access log; the answer has ended, or there was none."""
        meter, now_s = self.meter, anyio.current_time()
        method, path = self.scope["method"], self.scope["path"]
        status = self.status or CLIENT_CLOSED_REQUEST
        known = {
            "method": method,
            "path": path,
            "status": status,
            "duration_ms": _ms(self.started_s, now_s),
            "caller": caller_of(self.scope).identity,
        }
        if meter is not None:
            known |= {
                "first_token_ms": _ms(self.started_s, meter.first_token_at_s),
                "tokens_in": meter.input_tokens,
                "tokens_out": meter.output_tokens,
                "finish_reason": ",".join(meter.finish_reasons) or None,
            }
        shown = [f"{name}={value}" for name, value in known.items() if name not in _UNNAMED and value is not None]
        text = "%s %s %d %s"
        _access.info(text, method, quote(path[:_PATH_MAX]), status, " ".join(shown), extra=with_fields(**known))


_PATH_MAX = 512
_UNNAMED = ("method", "path", "status")


def _ms(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round((end_s - start_s) * 1000, 3)


def log_as_part(part: AnyContext) -> None:
    """Has what is written in this task, and in those below it, name this prompt of a request, and its worker."""
    whole = current_fields.get()
    if whole is None:
        return

    def fields() -> dict[str, str]:
        tracker = tracker_of(part)
        worker = "" if tracker is None else workers_of([tracker])
        known = {name: value for name, value in whole().items() if name != "worker"}
        return known | {"request": part.id} | ({"worker": worker} if worker else {})

    current_fields.set(fields)
