"""Bytes written to a client that it has not taken yet: in the transport, and in the system."""

from __future__ import annotations

import socket
import struct
from typing import Any

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ  # the same number as SIOCOUTQ, see tcp(7)
except ImportError:  # there are none on Windows
    ioctl, TIOCOUTQ = None, 0  # type: ignore[assignment, misc]

UNSENT_BYTES = 128 * 1024
"""Bytes that the system takes of an answer beyond what is on its way; by default it takes megabytes."""


def limit_unsent(listener: socket.socket) -> None:
    """Let the connections of a TCP listener hold no more than `UNSENT_BYTES` in the system, where that can be set."""
    if (option := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
        listener.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


def unsent_bytes(transport: Any) -> int:
    """Return the bytes that wait for the client; the system's only where it shows them.

    A slow client takes bytes from the system long before the transport has room to write.
    """
    waiting_bytes: int = transport.get_write_buffer_size()
    if ioctl is None:
        return waiting_bytes
    try:
        queued = ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
    except OSError:
        return waiting_bytes
    return waiting_bytes + int(struct.unpack("i", queued)[0])
