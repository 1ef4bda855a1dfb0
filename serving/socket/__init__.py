"""HTTP/1.1 over connections, within limits and time-outs: what stands between the sockets and an ASGI app."""

from .connection import Connection, Hosted
from .connections import Connections, Refused
from .unsent import limit_unsent

__all__ = ["Connection", "Connections", "Hosted", "Refused", "limit_unsent"]
