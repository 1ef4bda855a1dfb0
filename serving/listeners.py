"""Listening sockets: opened at an address, or inherited from the process above.

Inherited ones come as systemd passes them, so units with a socket work too: `LISTEN_FDS` is their number, the first one
is descriptor 3, and `LISTEN_FDNAMES` has their names between colons. Source: sd_listen_fds(3) of systemd.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from pipeline import InvalidArgument

from .socket import limit_unsent

BACKLOG = 2048
"""Connections that wait to be taken."""
LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
SOCKET_NAMES = ("http", "admin", "status")
"""The server for clients, that of the admin address, and that of a worker's status."""

_FIRST_FD = 3


@contextmanager
def inherited_sockets(environment: Mapping[str, str]) -> Iterator[dict[str, socket.socket]]:
    """Give the listening sockets that this process inherited, by name, and close them in the end.

    A single one of another name is that of the server for clients. Raise InvalidArgument for a descriptor that is no
    listening socket, and for an unknown name among several.
    """
    with ExitStack() as opened:
        found: dict[str, socket.socket] = {}
        for number, name in enumerate(_names(environment)):
            if name in found or name not in SOCKET_NAMES:
                known = ", ".join(SOCKET_NAMES)
                raise InvalidArgument(f"must name each of {known} once at most, got {name}", field="LISTEN_FDNAMES")
            found[name] = opened.enter_context(_listener(_FIRST_FD + number))
        yield found


def _names(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the inherited sockets in their order; none if they are for another process."""
    pid, count, names = (environment.get(name, "") for name in LISTEN_VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    given = names.split(":") if names else []
    if int(count) == 1 and given[:1] not in ([name] for name in SOCKET_NAMES):
        return ["http"]
    return [given[at] if at < len(given) else "unknown" for at in range(int(count))]


def _listener(file: int) -> socket.socket:
    try:
        os.set_inheritable(file, False)
        listener = socket.socket(fileno=file)
    except OSError as error:
        raise InvalidArgument(f"descriptor {file} is no socket: {error.strerror}", field="LISTEN_FDS") from error
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise InvalidArgument(f"descriptor {file} is no listening socket", field="LISTEN_FDS")
    listener.setblocking(False)
    _tune(listener)
    return listener


def _tune(listener: socket.socket) -> None:
    """Have connections of the listener send every token at once, and buffer little."""
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_unsent(listener)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket whose connections send every token at once, without waiting to fill a packet.

    Port 0 is any free one. Raise InvalidArgument, its field `host` or `port`, if it cannot listen there. Event loops
    turn Nagle's algorithm off only for sockets that are made as TCP, and uvicorn's own are not.
    """
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = known[0]
        with ExitStack() as opening:
            listener = opening.enter_context(socket.socket(family, kind, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _tune(listener)
            listener.bind(address)
            listener.listen(BACKLOG)
            opening.pop_all()
    except UnicodeError as error:  # a part of the name is empty, or longer than names may be
        raise InvalidArgument(f"{host!r} is no name of a host", field="host") from error
    except OSError as error:
        raise _no_address(error, host, port) from error
    return listener


def _no_address(error: OSError, host: str, port: int) -> InvalidArgument:
    """Return the error of an address that cannot be listened on."""
    if isinstance(error, socket.gaierror):
        return InvalidArgument(f"{host!r} is no known host: {error.strerror}", field="host")
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidArgument(f"{host} is no address of this machine", field="host")
    if error.errno == errno.EADDRINUSE:
        return InvalidArgument(f"port {port} on {host} is in use; 0 takes a free one", field="port")
    if error.errno in (errno.EACCES, errno.EPERM):
        return InvalidArgument(f"no permission to listen at port {port} on {host}", field="port")
    return InvalidArgument(f"cannot listen at port {port} on {host}: {error.strerror}", field="port")


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
