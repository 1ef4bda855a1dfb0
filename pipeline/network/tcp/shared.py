"""Shared: what all connections of a request plane have in common."""

from __future__ import annotations

from attrs import frozen

from pipeline.rx import AnyIOScheduler

from ..log_limit import LogLimit
from .options import TcpOptions


@frozen
class Shared:
    """The means of a plane's connections."""

    scheduler: AnyIOScheduler
    """Runs calls and timers."""
    options: TcpOptions
    faults: LogLimit
    """Logs why connections were closed: whatever reaches a port can cause that."""
    process: str
    """Names this process, other than all before it at its addresses."""
