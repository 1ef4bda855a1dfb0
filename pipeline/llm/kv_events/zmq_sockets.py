"""The sockets that follow an engine's events: what it publishes now, and what it published before.

    PUB socket of the engine ────► SUB       frames as they come, and whether the connection stands
    ROUTER socket of the engine ◄─► DEALER   one request for a replay: empty │ first sequence, 8 bytes big endian

One of the two doors of pyzmq (extra `zmq`), imported when the sockets are opened. Sockets are waited for in the loop
itself, by their descriptors.

Source: vllm/distributed/kv_events.py, ZmqEventPublisher; dynamo lib/llm/src/kv_router/publisher/zmq_listener.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from pipeline import InvalidArgument

if TYPE_CHECKING:
    import zmq

Frames = list[bytes]

_MESSAGES_PER_TURN = 32
"""So many messages, of some 60 µs each, are taken before other tasks have their turn."""
_LOOK_EVERY_S = 0.5
"""How often at least the connection is looked at."""
_LOOK_SOON_S = 0.01
"""The first look after a change of the connection, which no descriptor signals; each wait is twice the one before."""
_QUEUED_MESSAGES = 2**14
"""Messages that wait in a socket while the program does something else; further ones are dropped by the sender."""
_HEARTBEAT_MS, _HEARTBEAT_LOST_MS = 5000, 15_000
"""How often the publisher's process gets a heartbeat, and after how long a connection without one is lost:
TCP alone does not notice a machine that is gone."""


class Link(Enum):
    """What became of the connection to the publisher."""

    UP = auto()
    """It stands: what is published from now on arrives."""
    LOST = auto()
    """The other side has gone. ZeroMQ connects again by itself."""
    CUT = auto()
    """ZeroMQ has given it up, as it does for a message that is too large or none: `reconnect` makes it anew."""


class EventSockets:
    """The sockets for one publisher, opened by `opened`.

    `endpoint` is that of the PUB socket; `topic` is what its topics begin with, and a message of more than
    `message_bytes` is not taken.
    """

    def __init__(self, zmq: Any, context: Any, endpoint: str, *, topic: bytes, message_bytes: int) -> None:
        self.endpoint, self._message_bytes = endpoint, message_bytes
        self._zmq, self._context = zmq, context
        self._live = self._socket(zmq.SUB)
        self._live.subscribe(topic)
        self._watch = _ConnectionWatch(zmq, self._live)
        self._connect(self._live, endpoint, "endpoint")
        self._descriptor: Any = self._live.getsockopt(zmq.FD)
        self._taken = 0
        self._look_s = _LOOK_SOON_S

    @classmethod
    @contextmanager
    def opened(cls, endpoint: str, *, topic: bytes, message_bytes: int) -> Iterator[EventSockets]:
        """Open the sockets, and close them at the end. Raise InvalidArgument without pyzmq and for no endpoint."""
        zmq = _zmq()
        context = zmq.Context()
        try:
            yield cls(zmq, context, endpoint, topic=topic, message_bytes=message_bytes)
        finally:
            context.destroy(linger=0)

    async def receive(self) -> Frames | Link:
        """Return the next message, or what became of the connection once the messages that came before are taken."""
        while True:
            self._taken += 1
            if self._taken % _MESSAGES_PER_TURN == 0:
                await checkpoint()
                if (link := self._change()) is not None:
                    return link
            if (frames := _received(self._zmq, self._live)) is not None:
                return frames
            # The descriptor only signals a change, so messages that are there are taken before it is waited for.
            if (link := self._change()) is not None:
                return link
            with anyio.move_on_after(self._look_s):
                await anyio.wait_readable(self._descriptor)
            self._look_s = min(2 * self._look_s, _LOOK_EVERY_S)

    def reconnect(self) -> None:
        """Make a connection that was cut anew."""
        with suppress(self._zmq.ZMQError):
            self._live.disconnect(self.endpoint)  # else connecting does nothing
        self._live.connect(self.endpoint)
        self._look_s = _LOOK_SOON_S

    @contextmanager
    def replay(self, endpoint: str, first_sequence: int) -> Iterator[Replay]:
        """Request the batches from a sequence on; the socket is closed at the end. Raise InvalidArgument likewise."""
        socket = self._socket(self._zmq.DEALER)
        try:
            self._connect(socket, endpoint, "replay_endpoint")
            socket.send_multipart([b"", first_sequence.to_bytes(8, "big")], self._zmq.NOBLOCK)
            yield Replay(self._zmq, socket)
        finally:
            socket.close(linger=0)

    def _change(self) -> Link | None:
        if (link := self._watch.change()) is not None:
            self._look_s = _LOOK_SOON_S
        return link

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(self._zmq.IPV6, 1)  # beside IPv4; without it, connecting to IPv6 fails without an error
        socket.setsockopt(self._zmq.RCVHWM, _QUEUED_MESSAGES)
        socket.setsockopt(self._zmq.MAXMSGSIZE, self._message_bytes)
        socket.setsockopt(self._zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(self._zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_LOST_MS)
        return socket

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str, field: str) -> None:
        try:
            socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise InvalidArgument(f"{endpoint!r}: {error}", field=field, cause=error) from error


class Replay:
    """The messages of one replay."""

    def __init__(self, zmq: Any, socket: zmq.Socket[bytes]) -> None:
        self._zmq, self._socket = zmq, socket
        self._descriptor: Any = socket.getsockopt(zmq.FD)
        self._taken = 0

    async def receive(self) -> Frames:
        """Return the next message, as the publisher sent it."""
        while True:
            if (frames := _received(self._zmq, self._socket)) is not None:
                self._taken += 1
                if self._taken % _MESSAGES_PER_TURN == 0:
                    await checkpoint()
                return frames
            with anyio.move_on_after(_LOOK_EVERY_S):
                await anyio.wait_readable(self._descriptor)


def _received(zmq: Any, socket: zmq.Socket[bytes]) -> Frames | None:
    try:
        frames: Frames = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return frames


class _ConnectionWatch:
    """Sees how the connection of a socket stands.

    ZeroMQ connects again by itself when the other side goes: its next event is the new attempt then. After a frame that
    it refuses it does not.
    """

    def __init__(self, zmq: Any, socket: zmq.Socket[bytes]) -> None:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        self._zmq, self._monitor = zmq, socket.get_monitor_socket(events)
        self._lost_at_s: float | None = None

    def change(self) -> Link | None:
        """Return what has become of the connection, one change at a time; None if nothing did."""
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._lost_at_s = anyio.current_time() if event == self._zmq.EVENT_DISCONNECTED else None
            if event != self._zmq.EVENT_CONNECT_RETRIED:
                return Link.UP if event == self._zmq.EVENT_HANDSHAKE_SUCCEEDED else Link.LOST
        if self._lost_at_s is None or anyio.current_time() - self._lost_at_s < _LOOK_EVERY_S / 2:
            return None
        self._lost_at_s = None
        return Link.CUT


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        text = "KV events over ZeroMQ need pyzmq: install penstock[zmq]"
        raise InvalidArgument(text, field="endpoint", cause=error) from error
    return zmq
