"""HTTP/1.1 over connections, within limits and time-outs: what stands between the sockets and an ASGI app."""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    import httptools  # noqa: F401  # before the app's own needs, so that the error names this folder

    from .connection import Connection, Hosted
    from .connections import Connections, Refused
    from .unsent import limit_unsent

__all__ = ["Connection", "Connections", "Hosted", "Refused", "limit_unsent"]
