"""Formatters of log messages, as text and JSON, with the fields of the request in whose task each was written.

    handler = logging.StreamHandler()
    handler.addFilter(RequestFields())          # request, trace, model, worker on every record
    handler.setFormatter(JsonLines())           # one JSON object a line; or TextLines()

`with_fields` gives a message fields of its own, those of `FIELDS`. Uses the standard library only.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from .terminal import one_line, printable

ACCESS_LOG = "serving.access"
"""Logger of the access log."""

FIELDS: Mapping[str, str] = {
    "time": "When it was written: RFC 3339, UTC, milliseconds.",
    "level": "`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`.",
    "logger": "Module that wrote it.",
    "message": "Text of the message.",
    "request": "Id of the request: that of its answer's header and error body; of a list of prompts `<id>-<i>`.",
    "client_request": "The client's `X-Request-Id`, if it is not a UUID and so is not the id.",
    "trace": "Trace id, 32 hex digits.",
    "model": "Model of the request.",
    "worker": "Worker that answers, in hex digits; of several those of the latest attempts, with commas.",
    "error": "Exception: `type`, `message` and `stack`, its whole traceback.",
    "method": "Access log: HTTP method.",
    "path": "Access log: path without the query.",
    "status": "Access log and refusals: status of the answer; 499 if the client left before it.",
    "duration_ms": "Access log: from the head of the request to the end of its answer.",
    "first_token_ms": "Access log: from the head of the request to the first token.",
    "tokens_in": "Access log: tokens of the prompts.",
    "tokens_out": "Access log: tokens of the answer, even if it was not completed.",
    "finish_reason": "Access log: why generation ended; of several choices each, with commas.",
    "caller": "Access log and refusals: the client that limits per client count for: an address, or the name of a key.",
    "limit": "Refusals: the limit that refused.",
    "value": "Refusals: the value that exceeded the limit.",
    "threshold": "Refusals: the highest allowed value.",
    "left_out": "Refusals: number of refusals by this limit since its last line.",
}
"""Every field that a JSON line may have, with its meaning. Unknown fields are left out."""

OF_THE_REQUEST = ("request", "client_request", "trace", "model", "worker")
_OWN = "fields"
_TEXT_MAX = 512
"""Characters of a field with a client's text; longer ones are cut."""
_CREDENTIALS = re.compile(
    r"(?i)\b(bearer|basic)(\s+)[\w.~+/=-]{8,}"
    r"|\b((?:x-)?api[_-]?key|authorization|password|secret)([\"']?\s?[:=]\s?[\"']?)[\w.~+/=-]{8,}"
)
_LIKE_A_MESSAGE = re.compile(r"^(?=(?:[A-Z]+|Level \d+) \S*:)", re.MULTILINE)

current_fields: ContextVar[Callable[[], Mapping[str, str]] | None] = ContextVar("current_fields", default=None)
"""Returns the fields of the current task's request; called only when a message is written."""


def with_fields(**fields: Any) -> dict[str, Any]:
    """Return the `extra` of a message with these fields, except those that are None. Raise ValueError for others."""
    if unknown := fields.keys() - FIELDS.keys():
        raise ValueError(f"no field of log messages: {', '.join(sorted(unknown))}")
    return {_OWN: {name: value for name, value in fields.items() if value is not None}}


class RequestFields(logging.Filter):
    """Adds `request`, `client_request`, `trace`, `model` and `worker` to each record, where they are known.

    For handlers, including a program's own: records of other libraries' loggers, written in a request's task, get them
    too. Every record passes.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if (fields_of_request := current_fields.get()) is None:
            return True
        try:
            fields = fields_of_request()
        except Exception:  # a message never fails because of its fields
            return True
        for name, value in fields.items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


class JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII; see `FIELDS`. Credentials in texts are replaced by `***`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": without_credentials(record.getMessage()),
        }
        line |= {name: _bounded(value) for name, value in _fields_of(record).items()}
        if (error := self._error(record)) is not None:
            line["error"] = error
        return json.dumps(line, default=str)

    def _error(self, record: logging.LogRecord) -> dict[str, str] | None:
        if not record.exc_info or record.exc_info[1] is None:
            return None
        error = record.exc_info[1]
        return {
            "type": type(error).__qualname__,
            "message": without_credentials(str(error)),
            "stack": without_credentials(self.formatException(record.exc_info)),
        }


class TextLines(logging.Formatter):
    """`LEVEL logger: message`, the request's fields behind it, and the traceback of an error below.

    No text can begin a line that looks like a message, or control a terminal. Credentials are replaced by `***`.
    """

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        fields = _fields_of(record)
        known = [f"{name}={_word(fields[name])}" for name in OF_THE_REQUEST if name in fields]
        line = one_line(super().formatMessage(record))
        return f"{line} [{' '.join(known)}]" if known else line

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the library's name
        return _LIKE_A_MESSAGE.sub("  ", super().formatException(ei))

    def format(self, record: logging.LogRecord) -> str:
        return without_credentials(printable(super().format(record)))


def rfc3339(seconds: float) -> str:
    """Return a time in seconds since the epoch as text, in UTC, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def without_credentials(text: str) -> str:
    """Return the text with the values behind `Bearer`, `api_key=` and the like replaced by `***`."""
    return _CREDENTIALS.sub(lambda found: f"{found[1] or found[3]}{found[2] or found[4]}***", text)


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the request's fields, then the message's own."""
    known = {name: getattr(record, name) for name in OF_THE_REQUEST if getattr(record, name, None)}
    own = getattr(record, _OWN, None)
    return known | own if isinstance(own, dict) else known


def _bounded(value: Any) -> Any:
    return value[:_TEXT_MAX] if isinstance(value, str) else value


def _word(value: Any) -> str:
    """Return the value as one word, quoted if it is not one."""
    text = one_line(str(value)[:_TEXT_MAX])
    return text if re.fullmatch(r"[^\s\"\[\]=]+", text) else json.dumps(text)


def log_to_stderr(level: str | int, form: Literal["text", "json"] = "text", *, access_log: bool = False) -> None:
    """Write messages of this level and above to standard error, and those of the access log if it is on.

    As text a line each with its trace below it, or one JSON object a line.
    """
    handler = logging.StreamHandler()
    handler.addFilter(RequestFields())
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger(ACCESS_LOG).setLevel(logging.INFO if access_log else logging.WARNING)
