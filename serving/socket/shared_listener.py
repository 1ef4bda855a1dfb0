"""SharedListener: takes this process's part of the connections of a listening socket that several processes share.

An event loop takes all connections that wait in one turn. With several processes, the one that is woken first would
then have them all. Taken one in a turn, the last of many would wait for as many turns, which are long where much is to
do. So each process takes at once what brings it level with the others, and one that has more than another leaves it a
moment to be first.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Callable

from .port_shares import ABSENT, PortShares

_PAUSE_S = 1.0
"""After an error of the system, such as no descriptor left."""


_OTHERS_TURN_S = 0.002
"""How long a connection is left to a process that has fewer; it may hang, or be busy."""

_TAKEN_AT_ONCE = 32
"""Connections taken in one turn of the loop; each takes about 80 us."""

_PART_OF_UNKNOWN = 4
"""Where it is unknown what others have, a process takes a fourth of what waits."""

_WAITING_AT, _WAITING = 24, struct.Struct("=I")
"""Where in the TCP_INFO of a listening socket Linux has the number of connections that wait: `tcpi_unacked`."""


class SharedListener:
    """Takes connections until it is closed; it leaves the socket open. Made in the running loop.

    `count` returns the open connections of this process, and `shares` has those of the others; None: they are unknown.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        count: Callable[[], int] = lambda: 0,
        shares: PortShares | None = None,
    ) -> None:
        self._listener, self._protocol = listener, protocol
        self._count, self._shares = count, shares
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._listen()

    def close(self) -> None:
        """Leave further connections to the other processes. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()
        if self._shares is not None:
            self._shares.set(ABSENT)

    def report(self) -> None:
        """Show the others how many connections this process has; called now and then."""
        if self._shares is not None and not self._is_closed:
            self._shares.set(self._taken())

    async def wait_closed(self) -> None:
        """Return once each connection that was taken has its protocol."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _taken(self) -> int:
        return self._count() + len(self._tasks)

    def _listen(self) -> None:
        self._timer = None
        self.report()
        self._loop.add_reader(self._listener, self._take_turn)

    def _take_turn(self) -> None:
        part = self._part()
        if not part:
            self._loop.remove_reader(self._listener)
            self._timer = self._loop.call_later(_OTHERS_TURN_S, self._take_late)
        for _ in range(min(part, _TAKEN_AT_ONCE)):
            if not self._take():
                break

    def _part(self) -> int:
        """Return how many of the connections that wait are for this process."""
        waiting = waiting_connections(self._listener)
        if self._shares is None:
            return -(-waiting // _PART_OF_UNKNOWN)
        return self._shares.part(self._taken(), waiting)

    def _take_late(self) -> None:
        """Take a connection if no other process has, then listen again."""
        self._timer = None
        self._take()
        if self._timer is None:
            self._listen()

    def _take(self) -> bool:
        """Take a connection; return whether there was one."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process was faster, or the client has left
        except OSError as error:
            self._loop.remove_reader(self._listener)
            self._timer = self._loop.call_later(_PAUSE_S, self._listen)
            context = {"message": "no connection can be taken", "exception": error, "socket": self._listener}
            self._loop.call_exception_handler(context)
            return False
        connection.setblocking(False)
        task = self._loop.create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.report()
        return True

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has left
            connection.close()


def waiting_connections(listener: socket.socket) -> int:
    """Return how many connections wait to be taken; 1 where the system does not show it."""
    if sys.platform != "linux":
        return 1
    try:
        state = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WAITING_AT + _WAITING.size)
    except OSError:  # no TCP
        return 1
    if len(state) < _WAITING_AT + _WAITING.size:
        return 1
    waiting: int = _WAITING.unpack_from(state, _WAITING_AT)[0]
    return max(1, waiting)
