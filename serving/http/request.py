"""RequestRecord: what the app knows of one request while it is open, for answers, log messages and the access log.

RequestHeaders: its id, its metadata, and the kind of its body.

Source: dynamo lib/llm/src/http/service/openai.rs and metadata.rs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Sequence
from typing import Protocol
from urllib.parse import quote
from uuid import UUID, uuid4

from attrs import define, field, frozen
from starlette.types import Message, Scope, Send

from pipeline import AnyContext
from pipeline.errors import CLIENT_CLOSED_REQUEST, ExceededLimit
from pipeline.llm import tracker_of
from pipeline.loop import current_time
from pipeline.protocols import RequestTracker
from pipeline.telemetry import trace_link

from ..limits import HttpLimits
from ..log_format import current_fields, with_fields
from ..problems import REQUEST_ID, Problem, Refusal
from .caller import Caller, caller_of
from .metrics import Refusals, RequestMeter
from .routing_headers import decision_headers, workers_of
from .server_span import ServerSpan

Headers = Sequence[tuple[bytes, bytes]]


class PartWriter(Protocol):
    """Writes a part of a chunked answer at once."""

    def __call__(self, body: bytes, *, start: tuple[int, Headers] | None = None, is_last: bool = False) -> bool:
        """Return False, with nothing written, if that cannot be now; `send` then can.

        `start`, the status and the headers, begins an answer, chunked or not, with this part.
        """
        ...


class FirstWriter(Protocol):
    """Writes the headers of an answer of status 200 and its first part, at once."""

    def __call__(self, headers: Headers, body: bytes, *, is_last: bool) -> bool:
        """Return False, with nothing written, if that cannot be now; `send` then can."""
        ...


_OLDER_REQUEST_ID = "x-dynamo-request-id"
METADATA_PREFIX = "x-dynamo-meta-"
SESSION_ID = "x-dynamo-session-id"

_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key"})
"""Names that never become metadata, whatever the prefix."""

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_PRINTABLE_ID = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?")
_UUID_TEXT_MAX = 64
"""Characters; a little more than the longest form of a UUID."""


@frozen
class RequestHeaders:
    """The headers of one request."""

    values: dict[str, str]
    """Value by name in lower case; of a repeated header, the first one."""

    @classmethod
    def of(cls, scope: Scope) -> RequestHeaders:
        """Return the headers in an ASGI scope."""
        values: dict[str, str] = {}
        for name, value in scope["headers"]:
            values.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        return cls(values)

    @property
    def echo(self) -> str | None:
        """The client's own id of the request, which every answer repeats; None if it sent no valid one.

        A valid id has up to 256 printable ASCII characters, with blanks only inside.
        """
        text = self.values.get(REQUEST_ID)
        return None if text is None or _PRINTABLE_ID.fullmatch(text) is None else text

    def request_id(self) -> str:
        """Return the client's id if it is a UUID, otherwise a new one: ids stay unique and safe to print."""
        for name in (REQUEST_ID, _OLDER_REQUEST_ID):
            if (text := self.values.get(name)) is not None and (known := uuid_of(text)) is not None:
                return known
        return str(uuid4())

    def metadata(self, limits: HttpLimits) -> dict[str, str]:
        """Return the entries that travel with the request, including its session.

        Raise Refusal (431) if they are too many or too long.
        """
        kept: dict[str, str] = {}
        for name, value in self.values.items():
            if name.startswith(METADATA_PREFIX):
                key = name.removeprefix(METADATA_PREFIX)
                if key and key not in _CREDENTIALS:
                    kept[key] = value
        if SESSION_ID in self.values:
            kept[SESSION_ID] = self.values[SESSION_ID]
        if not kept:
            return kept
        size_bytes = sum(len(name) + len(value) for name, value in kept.items())
        _check_metadata("max_metadata_entries", len(kept), limits.max_metadata_entries)
        _check_metadata("max_metadata_bytes", size_bytes, limits.max_metadata_bytes)
        return kept

    def require_json(self) -> None:
        """Raise Refusal (415) unless the content type is JSON."""
        media_type = self.values.get("content-type", "").partition(";")[0].strip()
        if _JSON_TYPE.fullmatch(media_type) is None:
            raise Refusal(415, "Expected request with `Content-Type: application/json`")


def uuid_of(text: str) -> str | None:
    """Return the UUID in the text in its canonical form, None if the text is not a UUID."""
    if len(text) > _UUID_TEXT_MAX:
        return None
    try:
        return str(UUID(text))
    except ValueError:
        return None


def _check_metadata(name: str, value: int, threshold: int) -> None:
    if 0 < threshold < value:
        raise Refusal(431, "Request metadata is too large", exceeded=ExceededLimit(name, value, threshold))


# -- the record

KEY = "penstock.request"
"""Where the record is in an ASGI scope."""
OWN_REQUEST_ID = b"x-penstock-request-id"
"""Header with our id of a request whose client sent another one in `x-request-id`."""
JSON_HEADERS: Headers = ((b"content-type", b"application/json"),)

_NO_HEADERS = RequestHeaders({})
_PATH_MAX = 512
_UNNAMED = ("method", "path", "status")
"""Fields of the access log that its text shows without their names."""

_access = logging.getLogger("serving.access")


@define(eq=False, slots=True)
class RequestRecord:
    """One request while it is open.

    It is made before anything can fail, so every answer has an id and every message of the request's tasks names it.
    """

    scope: Scope
    """Its ASGI scope."""
    _raw_send: Send
    """The server's `send`."""
    _refusals: Refusals
    shows_workers: bool
    """Whether the headers of its answer name the workers."""
    headers: RequestHeaders = field(init=False)
    """The headers of the request; empty after `drop_headers`."""
    id: str = field(init=False)
    """A UUID: the id in spans, logs, bookings and engines."""
    client_id: str | None = field(init=False, default=None)
    """The client's id of the request if it is not a UUID. Made by the client: escape it before printing."""
    _echo: str | None = field(init=False, default=None)
    status: int = field(init=False, default=0)
    """Status of the answer; 0 before it begins."""
    model: str | None = field(init=False, default=None)
    """Model in the request. Made by the client: escape it before printing."""
    span: ServerSpan = field(init=False, factory=ServerSpan)
    context: AnyContext | None = field(init=False, default=None)
    """Context of the request, set when it is sent to a model."""
    meter: RequestMeter | None = field(init=False, default=None)
    """Metrics of the request, set when its body is read."""
    started_s: float = field(init=False, factory=current_time)
    """When the request began, by the loop's clock."""

    def __attrs_post_init__(self) -> None:
        self.headers = RequestHeaders.of(self.scope)
        self.id = self.headers.request_id()
        echo = self._echo = self.headers.echo
        if echo is not None and uuid_of(echo) is None:
            self.client_id = echo

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """Return the record of the request with this scope."""
        record = scope[KEY]
        assert isinstance(record, cls)
        return record

    @property
    def caller(self) -> Caller:
        return caller_of(self.scope)

    def drop_headers(self) -> None:
        """Drop the headers of the request once it is read: they would stay for as long as its answer lasts."""
        self.headers = _NO_HEADERS

    def send(self, message: Message) -> Awaitable[None]:
        """Send an ASGI message of the answer, with the status recorded and our headers added."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._answer_headers()]
        return self._raw_send(message)

    def part_writer(self, send: Send) -> PartWriter | None:
        """Return what writes a part of the answer at once, as a server of ours can.

        None if the server cannot, or if something between it and the caller, which has this `send`, looks at messages.
        """
        if send != self.send:
            return None
        return self._server_writer

    def write_first(self, headers: Headers, body: bytes, *, is_last: bool) -> bool:
        """Begin an answer of status 200 with its first part, and our headers, as a part writer writes further ones."""
        write = self._server_writer
        if write is None or not write(body, start=(200, [*headers, *self._answer_headers()]), is_last=is_last):
            return False
        self.status = 200
        return True

    @property
    def _server_writer(self) -> PartWriter | None:
        found: PartWriter | None = getattr(getattr(self._raw_send, "__self__", None), "write_part", None)
        return found

    def _answer_headers(self) -> list[tuple[bytes, bytes]]:
        echo = self._echo
        headers = [(REQUEST_ID.encode(), (self.id if echo is None else echo).encode("ascii"))]
        if self.client_id is not None:
            headers.append((OWN_REQUEST_ID, self.id.encode()))
        return headers + decision_headers(self.trackers) if self.shows_workers else headers

    async def reply_problem(self, send: Send, problem: Problem) -> None:
        """Answer the request with the problem as JSON; report it if a limit refused the request.

        The error of a connection that is closed by now is ignored.
        """
        self.report(problem)
        body = problem.body(self.id)
        headers = [*JSON_HEADERS, *problem.headers(), (b"content-length", b"%d" % len(body))]
        try:
            await send({"type": "http.response.start", "status": problem.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        except OSError:
            return

    def report(self, problem: Problem) -> None:
        """Count and log the problem if a limit refused the request."""
        if problem.exceeded is not None:
            self._refusals.report(problem, self.id, self.caller.identity)

    @property
    def trackers(self) -> list[RequestTracker]:
        """The trackers of its prompts; before a worker is chosen, that of a request with one prompt."""
        if self.meter is not None and self.meter.trackers:
            return self.meter.trackers
        tracker = None if self.context is None else tracker_of(self.context)
        return [] if tracker is None else [tracker]

    @property
    def trace_id(self) -> str | None:
        """Trace of the span that the request is in, its own or its client's; None without one."""
        link = None if self.context is None else trace_link(self.context)
        return self.span.trace_id if link is None else link.trace_id

    def close(self) -> None:
        """Release the context and the meter. Later messages of the request's tasks still have its id and model."""
        self.context = self.meter = None

    def fields(self) -> dict[str, str]:
        """Return the fields of log messages written in the request's tasks."""
        known = {
            "request": self.id,
            "client_request": self.client_id,
            "trace": self.trace_id,
            "model": self.model,
            "worker": workers_of(self.trackers),
        }
        return {name: value for name, value in known.items() if value}

    def log_access(self) -> None:
        """Write the line of the access log, after the answer has ended or failed to begin."""
        meter, now_s = self.meter, current_time()
        method, path = self.scope["method"], self.scope["path"]
        status = self.status or CLIENT_CLOSED_REQUEST
        known = {
            "method": method,
            "path": path,
            "status": status,
            "duration_ms": _ms(self.started_s, now_s),
            "caller": self.caller.identity,
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


def _ms(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round((end_s - start_s) * 1000, 3)


def log_as_part(part: AnyContext) -> None:
    """Let messages of this task, and of tasks it starts, name this prompt of a request and its worker."""
    whole = current_fields.get()
    if whole is None:
        return

    def fields() -> dict[str, str]:
        tracker = tracker_of(part)
        worker = "" if tracker is None else workers_of([tracker])
        known = {name: value for name, value in whole().items() if name != "worker"}
        return known | {"request": part.id} | ({"worker": worker} if worker else {})

    current_fields.set(fields)
