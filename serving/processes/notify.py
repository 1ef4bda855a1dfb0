"""Notices of a process to the one that started it, in the form of systemd: also units of `Type=notify` are served.

Source: sd_notify(3) of systemd. A notice is one datagram of lines `NAME=value`, sent to the socket in `NOTIFY_SOCKET`.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""Variable with the path of the socket; one that begins with `@` is in the abstract namespace of Linux."""

_READY, _STATUS = "READY=1", "STATUS="
_log = logging.getLogger(__name__)


def notify_ready(environment: Mapping[str, str], status: str) -> None:
    """Send that this process serves, with a line that says what. Without a socket in the environment do nothing.

    A socket that cannot be reached is logged: the process serves all the same.
    """
    if not (path := environment.get(NOTIFY_SOCKET, "")):
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    notice = f"{_READY}\n{_STATUS}{status.splitlines()[0] if status else ''}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(notice.encode(errors="replace"), address)
    except OSError as error:
        _log.warning("the process that started this one was not notified: %s", error)


def ready_status(notice: bytes) -> str | None:
    """Return the status in a notice that the process serves, None for any other notice."""
    lines = notice.decode(errors="replace").split("\n")
    if _READY not in lines:
        return None
    return next((line.removeprefix(_STATUS) for line in lines if line.startswith(_STATUS)), "")
