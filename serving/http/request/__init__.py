"""A request on its way in: its headers and ids, its body within limits, and the record of it for logs and answers."""

from .body import Body
from .headers import METADATA_PREFIX, REQUEST_ID, SESSION_ID, RequestHeaders, read_body
from .parsing import parsed
from .record import KEY, RequestRecord, log_as_part

__all__ = [
    "KEY",
    "METADATA_PREFIX",
    "REQUEST_ID",
    "SESSION_ID",
    "Body",
    "RequestHeaders",
    "RequestRecord",
    "log_as_part",
    "parsed",
    "read_body",
]
