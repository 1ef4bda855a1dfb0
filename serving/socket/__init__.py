"""HTTP/1.1 between sockets and an ASGI app, within limits and time-outs."""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    import httptools  # noqa: F401  # before the app's own needs, so that the error names this folder

    from .closing import AppHost, limit_unsent
    from .connection import Connection
    from .connections import Connections, Refused
    from .port_shares import PORT_SHARES, PortShares
    from .shared_listener import SharedListener

__all__ = [
    "PORT_SHARES",
    "AppHost",
    "Connection",
    "Connections",
    "PortShares",
    "Refused",
    "SharedListener",
    "limit_unsent",
]
