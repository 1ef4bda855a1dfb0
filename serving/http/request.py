"""Reading a request: its headers, its body, the typed record in it.

Source: dynamo lib/llm/src/http/service/openai.rs and metadata.rs. Other than there, bodies are refused while they
arrive, not after.
"""

from __future__ import annotations

import re
from typing import TypeVar
from uuid import UUID, uuid4

from attrs import frozen
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from pipeline import InvalidArgument
from pipeline.codec import from_json
from pipeline.errors import ExceededLimit

from ..limits import HttpLimits
from .options import BODY_LIMIT
from .problems import Refusal

T = TypeVar("T")

REQUEST_ID = "x-request-id"
_OLDER_REQUEST_ID = "x-dynamo-request-id"
_METADATA_PREFIX = "x-dynamo-meta-"
_SESSION_ID = "x-dynamo-session-id"
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key"})
_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_LENGTH = re.compile(r"[0-9]{1,20}")
_MB = 1024 * 1024


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
        """The id the client gave its request, which every answer repeats."""
        return self.values.get(REQUEST_ID)

    def request_id(self) -> str:
        """The client's id if it is a UUID, so that ids stay unique and safe to print; else a new one."""
        for name in (REQUEST_ID, _OLDER_REQUEST_ID):
            if (text := self.values.get(name)) is not None:
                try:
                    return str(UUID(text))
                except ValueError:
                    continue
        return str(uuid4())

    def metadata(self, limits: HttpLimits) -> dict[str, str]:
        """The entries that travel with the request, its session among them.

        Raises Refusal (431) if they are too many or too long.
        """
        found = {
            name.removeprefix(_METADATA_PREFIX): value
            for name, value in self.values.items()
            if name.startswith(_METADATA_PREFIX)
        }
        kept = {name: value for name, value in found.items() if name and name not in _CREDENTIALS}
        if _SESSION_ID in self.values:
            kept[_SESSION_ID] = self.values[_SESSION_ID]
        size_bytes = sum(len(name) + len(value) for name, value in kept.items())
        _check_metadata("max_metadata_entries", len(kept), limits.max_metadata_entries)
        _check_metadata("max_metadata_bytes", size_bytes, limits.max_metadata_bytes)
        return kept

    def require_json(self) -> None:
        """Raises Refusal (415) unless the body is said to be JSON."""
        media_type = self.values.get("content-type", "").partition(";")[0].strip()
        if _JSON_TYPE.fullmatch(media_type) is None:
            raise Refusal(415, "Expected request with `Content-Type: application/json`")


def _check_metadata(name: str, value: int, threshold: int) -> None:
    if 0 < threshold < value:
        raise Refusal(431, "Request metadata is too large", exceeded=ExceededLimit(name, value, threshold))


async def read_body(headers: RequestHeaders, receive: Receive, limit_mb: int) -> bytes:
    """The whole body. Raises Refusal (413) as soon as it is too long, ClientDisconnect if the client goes away."""
    limit_bytes = limit_mb * _MB
    announced = _LENGTH.fullmatch(headers.values.get("content-length", ""))
    _check_size(int(announced[0]) if announced else 0, limit_bytes)
    parts: list[bytes] = []
    size_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        parts.append(part)
        size_bytes += len(part)
        _check_size(size_bytes, limit_bytes)
        more = message.get("more_body", False)
    return b"".join(parts)


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise Refusal(413, f"Request body exceeds the limit of {limit_bytes // _MB} MB set by {BODY_LIMIT}")


def parse(body: bytes, kind: type[T]) -> T:
    """The record in the body; JSON that is nearly right is repaired once. Raises InvalidArgument naming the field."""
    try:
        return from_json(body, kind)
    except InvalidArgument as failure:
        error = failure
    if not error.field and (repaired := repair(body)) != body:  # a wrong value in correct JSON has a place
        try:
            return from_json(repaired, kind)
        except InvalidArgument as failure:
            error = failure
    text = f"Failed to deserialize the JSON body into the target type: {error.message}"
    raise InvalidArgument(text, field=error.field) from error


def repair(body: bytes) -> bytes:
    """The JSON text with raw control characters inside its strings escaped and bytes that are no UTF-8 replaced."""
    return _STRING.sub(_escaped, body.decode("utf-8", "replace")).encode()


# Possessive, and without its closing quote too: one that never ends must not be tried again at each quote inside it.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def _escaped(string: re.Match[str]) -> str:
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", string[0])
