"""ServerOptions: how a program's server behaves, beside the graph it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from .access_options import AccessOptions
from .limits import HttpLimits

if TYPE_CHECKING:
    from pipeline.telemetry import Tracer


@frozen
class ServerOptions:
    """What the options of a command that serves come to.

    `limits` bound requests, connections and clients. `access_log` logs every request. `access` is who may use it.
    `tracer` makes the spans of requests; without one there are none.
    """

    limits: HttpLimits = HttpLimits()
    access_log: bool = False
    access: AccessOptions = AccessOptions()
    tracer: Tracer | None = None
