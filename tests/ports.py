"""Ports for programs that a test starts: free when they are named, and still free when the program listens."""

from __future__ import annotations

import atexit
import socket
from collections import deque

_HELD_MAX = 128
"""Ports that are kept; a test takes some twenty."""

_held: deque[socket.socket] = deque()


def reserved_port() -> int:
    """Return a port that nothing listens on, and that only a program which names it can have.

    A port that is merely free may be the next one that the kernel gives to a connection of another program, or to the
    client that looks whether the server is there yet: then the server cannot listen, also when it is started again.
    So a socket that does not listen stays bound here, with SO_REUSEADDR: servers set it too, and can listen beside it.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("0.0.0.0", 0))
    _held.append(one)
    if len(_held) > _HELD_MAX:
        _held.popleft().close()
    port: int = one.getsockname()[1]
    return port


@atexit.register
def _release() -> None:
    while _held:
        _held.pop().close()
