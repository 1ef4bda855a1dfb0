"""Reading a request: its headers, its body, the typed record in it.

Source: dynamo lib/llm/src/http/service/openai.rs and metadata.rs. Other than there, bodies are refused while they
arrive, not after.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4

from attrs import frozen
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from operators import check_counts
from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.wire import from_plain, plain_from_json, plain_from_long_json

from ...limits import HttpLimits
from ..problems import Refusal
from .body import ArrivingBody, Body, check_arguments, check_length, is_small

T = TypeVar("T")

REQUEST_ID = "x-request-id"
_OLDER_REQUEST_ID = "x-dynamo-request-id"
METADATA_PREFIX = "x-dynamo-meta-"
SESSION_ID = "x-dynamo-session-id"
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key"})
_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_PRINTABLE_ID = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?")
_UUID_TEXT_MAX = 64
"""Characters of the longest of a UUID's forms, and some more."""
_LENGTH = re.compile(r"[0-9]{1,20}")
_ONE_PIECE_BYTES = 256 * 1024
"""A body up to this size is decoded by one call, which takes a few milliseconds at the most."""
_UNCOUNTED_BYTES = 4 * 1024
"""A body up to this size costs less than its count would save. It is counted with the record's other checks."""
DEFAULT_LIMITS, DEFAULT_REQUEST_LIMITS = HttpLimits(), RequestLimits()


@frozen
class RequestHeaders:
    """The headers of a request, names in lower case; of a repeated one the first."""

    values: dict[str, str]

    @classmethod
    def of(cls, scope: Scope) -> RequestHeaders:
        values: dict[str, str] = {}
        for name, value in scope["headers"]:
            values.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
        return cls(values)

    @property
    def echo(self) -> str | None:
        """The id the client gave its request, which every answer repeats; None for one that is no id.

        An id has up to 256 characters of ASCII that can be printed, with blanks only inside.
        """
        text = self.values.get(REQUEST_ID)
        return None if text is None or _PRINTABLE_ID.fullmatch(text) is None else text

    def request_id(self) -> str:
        """The client's id if it is a UUID, so that ids stay unique and safe to print; else a new one."""
        for name in (REQUEST_ID, _OLDER_REQUEST_ID):
            if (known := uuid_of(self.values.get(name))) is not None:
                return known
        return str(uuid4())

    def metadata(self, limits: HttpLimits) -> dict[str, str]:
        """The entries that travel with the request, its session among them.

        Raises Refusal (431) if they are too many or too long.
        """
        found = {
            name.removeprefix(METADATA_PREFIX): value
            for name, value in self.values.items()
            if name.startswith(METADATA_PREFIX)
        }
        kept = {name: value for name, value in found.items() if name and name not in _CREDENTIALS}
        if SESSION_ID in self.values:
            kept[SESSION_ID] = self.values[SESSION_ID]
        size_bytes = sum(len(name) + len(value) for name, value in kept.items())
        _check_metadata("max_metadata_entries", len(kept), limits.max_metadata_entries)
        _check_metadata("max_metadata_bytes", size_bytes, limits.max_metadata_bytes)
        return kept

    def require_json(self) -> None:
        """Raises Refusal (415) unless the body is said to be JSON."""
        media_type = self.values.get("content-type", "").partition(";")[0].strip()
        if _JSON_TYPE.fullmatch(media_type) is None:
            raise Refusal(415, "Expected request with `Content-Type: application/json`")


def uuid_of(text: str | None) -> str | None:
    """The UUID in the text, in its usual form; None if it is none."""
    if text is None or len(text) > _UUID_TEXT_MAX:
        return None
    try:
        return str(UUID(text))
    except ValueError:
        return None


def _check_metadata(name: str, value: int, threshold: int) -> None:
    if 0 < threshold < value:
        raise Refusal(431, "Request metadata is too large", exceeded=ExceededLimit(name, value, threshold))


async def read_body(headers: RequestHeaders, receive: Receive, limit_mb: int, limits: HttpLimits) -> Body:
    """The whole body.

    Raise Refusal (413) as soon as it is too long, InvalidArgument as soon as it holds too much, and ClientDisconnect if
    the client goes away.
    """
    arriving: ArrivingBody | None = None
    announced = _LENGTH.fullmatch(headers.values.get("content-length", ""))
    check_length(int(announced[0]) if announced else 0, limit_mb)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, is_last = message.get("body", b""), not message.get("more_body", False)
        if arriving is None:
            if is_last and is_small(part, limits):
                return Body(part, is_short=True)
            arriving = ArrivingBody(limit_mb, limits)
        await arriving.add(part)
        if is_last:
            return arriving.whole()


def parse(
    body: bytes | bytearray,
    kind: type[T],
    limits: HttpLimits = DEFAULT_LIMITS,
    request_limits: RequestLimits = DEFAULT_REQUEST_LIMITS,
    pause: Callable[[], object] = lambda: None,
) -> T:
    """The record in the body; JSON that is nearly right is repaired once, unless it is too long.

    Raise InvalidArgument that names the field, with the limit in `exceeded` if the request is beyond one. `pause` is
    called often while a long body is decoded.
    """
    try:
        plain = _plain(body, limits.max_repaired_bytes, pause)
        if is_small(body, limits, _UNCOUNTED_BYTES):
            return from_plain(plain, kind)
        if type(plain) is dict:
            check_counts(plain.get, request_limits)
        request = from_plain(plain, kind)
        check_arguments(request, limits, pause)
        return request
    except InvalidArgument as error:
        if error.exceeded is not None:
            raise
        text = f"Failed to deserialize the JSON body into the target type: {error.message}"
        raise InvalidArgument(text, field=error.field) from error


def _plain(body: bytes | bytearray, max_repaired_bytes: int, pause: Callable[[], object]) -> Any:
    decode = plain_from_json if len(body) <= _ONE_PIECE_BYTES else partial(plain_from_long_json, pause=pause)
    try:
        return decode(body)
    except InvalidArgument:
        if 0 < max_repaired_bytes < len(body) or (repaired := repair(body)) == body:
            raise
    return decode(repaired)


def repair(body: bytes | bytearray) -> bytes:
    """The JSON text with raw control characters inside its strings escaped and bytes that are no UTF-8 replaced.

    The work is done by a few methods of `str` over the whole text, none of which calls Python for each character.
    """
    # No decoded text has these halves of a surrogate pair, so they can stand for escapes that hold a quote.
    text = body.decode("utf-8", "replace").replace("\\\\", _BACKSLASH).replace('\\"', _QUOTE)
    parts = text.split('"')
    inside = '"'.join(parts[1::2])
    for number in range(32):
        if (control := chr(number)) in inside:
            inside = inside.replace(control, f"\\u{number:04x}")
    parts[1::2] = inside.split('"') if len(parts) > 1 else []
    return '"'.join(parts).replace(_QUOTE, '\\"').replace(_BACKSLASH, "\\\\").encode()


_BACKSLASH, _QUOTE = "\ud800", "\ud801"
