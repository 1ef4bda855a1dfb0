"""ServerOptions: how a program's server behaves, beside the graph it serves."""

from __future__ import annotations

from attrs import frozen

from .limits import HttpLimits


@frozen
class ServerOptions:
    """What the options of a command that serves come to.

    `limits` bound requests, connections and clients. `access_log` logs every request.
    """

    limits: HttpLimits = HttpLimits()
    access_log: bool = False
