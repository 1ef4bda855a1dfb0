"""HTTP/1.1 over connections, within limits and time-outs: what stands between the sockets and an ASGI app."""

from .connection import Connection, Hosted
from .connections import Connections, Refused

__all__ = ["Connection", "Connections", "Hosted", "Refused"]
