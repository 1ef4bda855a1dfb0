"""HttpLimits: what one request, one connection and one client may take of the server."""

from __future__ import annotations

from attrs import frozen

from pipeline.protocols.settings import setting


@frozen
class HttpLimits:
    """Bounds that the HTTP side holds; 0 turns a bound off."""

    max_metadata_entries: int = setting(64, "Headers `x-dynamo-meta-*` of a request; more are refused with 431.")
    max_metadata_bytes: int = setting(65_536, "Bytes in the names and values of these headers.")
