"""The headers of a request: its id, its metadata, and the kind of its body.

Source: dynamo lib/llm/src/http/service/openai.rs and metadata.rs.
"""

from __future__ import annotations

import re
from uuid import UUID, uuid4

from attrs import frozen
from starlette.types import Scope

from pipeline.errors import ExceededLimit

from ...limits import HttpLimits
from ..problems import Refusal

REQUEST_ID = "x-request-id"
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
            if (known := uuid_of(self.values.get(name))) is not None:
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


def uuid_of(text: str | None) -> str | None:
    """Return the UUID in the text in its canonical form, None if the text is not a UUID."""
    if text is None or len(text) > _UUID_TEXT_MAX:
        return None
    try:
        return str(UUID(text))
    except ValueError:
        return None


def _check_metadata(name: str, value: int, threshold: int) -> None:
    if 0 < threshold < value:
        raise Refusal(431, "Request metadata is too large", exceeded=ExceededLimit(name, value, threshold))
