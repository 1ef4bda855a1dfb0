"""A request on its way in: its headers and ids, its body within limits, and the record of it for logs and answers."""

from .body import Body, read_body
from .headers import METADATA_PREFIX, REQUEST_ID, SESSION_ID, RequestHeaders
from .parsing import parse_body
from .record import JSON_HEADERS, KEY, Headers, RequestRecord, log_as_part

__all__ = [
    "JSON_HEADERS",
    "KEY",
    "METADATA_PREFIX",
    "REQUEST_ID",
    "SESSION_ID",
    "Body",
    "Headers",
    "RequestHeaders",
    "RequestRecord",
    "log_as_part",
    "parse_body",
    "read_body",
]
