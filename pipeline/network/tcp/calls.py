"""The caller's side: calls over one connection, and the streams that come back.

    generate ──► CALL             ◄── BEGUN: the stream is there      or ERROR: `generate` raises it
    read     ──► CREDIT           ◄── ITEMS, then END                 or ERROR: the read raises it
    stop, kill, close ──► STOP, KILL, CLOSE

Items are decoded when they are read, so what waits for a slow reader stays bytes, within the window of its stream.
Tokens that wait together are read as one item. What the router wants to know of a stream, its failure and its end, is
called from here: see `RemoteStream`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from pipeline import (
    Annotated,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    PenstockError,
    ReleaseOnce,
    ResponseStream,
    State,
)
from pipeline.errors import InvalidMessage, MessageTooLarge, TransportError
from pipeline.loop import Wakeup
from pipeline.telemetry import inject
from pipeline.wire import to_msgpack, to_plain

from ...stream import Watch
from ..names import Instance
from . import framing
from .connection import Connection
from .framing import Handler
from .messages import CallHead, read
from .parts import PART_BYTES, SentBody
from .shared import Shared

Decode = Callable[[deque[bytes]], tuple[list[Any], int, int]]
"""Removes the first of the frames that wait, or several. Returns items, how many the frames had, and their bytes."""

_STREAMS_MAX = 2**31
"""Calls over one connection; then another is made."""


class CallerConnection(Connection):
    """A connection that this process has made. `on_lost` is called once, when no more calls can be made over it."""

    is_caller = True

    def __init__(
        self,
        shared: Shared,
        on_end: Callable[[Connection], object],
        on_lost: Callable[[CallerConnection], object],
    ) -> None:
        super().__init__(shared, on_end)
        self._on_lost = on_lost
        self._calls: dict[int, RemoteCall] = {}
        self._last_stream = 0

    @property
    def is_usable(self) -> bool:
        """Whether new calls may be made over it."""
        return self.is_open and self._last_stream < _STREAMS_MAX

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def add(self, call: RemoteCall) -> int:
        """Return the number of a new stream, whose frames the call gets."""
        self._last_stream += 1
        self._calls[self._last_stream] = call
        return self._last_stream

    def remove(self, stream: int) -> None:
        """Drop what may still come for the stream."""
        self._calls.pop(stream, None)
        self._parts_in.drop(stream)

    def _ended(self, reason: TransportError) -> None:
        self._on_lost(self)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.on_lost(reason)

    def _stream_handlers(self) -> Mapping[int, Handler]:
        return {
            framing.BEGUN: self._on_begun,
            framing.ITEMS: self._on_items,
            framing.PART: self._on_part,
            framing.END: self._on_end_of_stream,
            framing.ERROR: self._on_error,
        }

    def _call(self, stream: int) -> RemoteCall | None:
        """Return the call with this stream; None if it has ended here."""
        if (call := self._calls.get(stream)) is None and not 0 < stream <= self._last_stream:
            raise InvalidMessage(f"a frame of stream {stream}, which was never opened")
        return call

    def _on_begun(self, stream: int, body: bytes) -> None:
        if (call := self._call(stream)) is not None:
            call.on_begun()

    def _on_items(self, stream: int, body: bytes) -> None:
        call = self._calls.get(stream)
        if call is not None or (call := self._call(stream)) is not None:
            call.on_items(body)

    def _on_part(self, stream: int, part: bytes) -> None:
        if (call := self._call(stream)) is not None and (body := self._parts_in.take(stream, part)) is not None:
            call.on_items(body)

    def _on_end_of_stream(self, stream: int, body: bytes) -> None:
        if (call := self._call(stream)) is not None:
            if stream in self._parts_in:
                raise InvalidMessage("a stream ended within an item")
            self.remove(stream)
            call.on_end(None)

    def _on_error(self, stream: int, body: bytes) -> None:
        if stream == 0:
            self._on_refusal(stream, body)
        elif (call := self._call(stream)) is not None:
            error = read(body, PenstockError)
            self.remove(stream)
            call.on_end(error)


class RemoteStream(ResponseStream[Any]):
    """The stream of a call. What reads the call also watches it: another generator would cost 0.5 us an item."""

    __slots__ = ("_call",)

    def __init__(self, call: RemoteCall, released: ReleaseOnce) -> None:
        super().__init__(call.read(released), call.request, released)
        self._call = call

    def watched(self, watch: Watch) -> ResponseStream[Any]:
        """See `ResponseStream`. The first watch before the first read returns this stream."""
        if self._call.watch is not None or (self._pace is not None and self._pace.was_read):
            return super().watched(watch)
        self._call.watch = watch
        self._own(watch.reservation)
        return self


class RemoteCall:
    """One call: made in the task that calls, then fed by its connection and read by one reader."""

    __slots__ = (
        "_bodies", "_bytes", "_bytes_max", "_connection", "_decode", "_error", "_forget", "_grant_bytes",
        "_grant_items", "_has_begun", "_instance", "_is_over", "_items", "_items_max", "_read_bytes", "_read_items",
        "_sending", "_stream", "_wakeup", "request", "watch",
    )  # fmt: skip

    def __init__(self, connection: CallerConnection, instance: Instance, request: Context[Any], decode: Decode) -> None:
        self._connection = connection
        self._instance = instance
        self.request = request
        self._decode = decode
        self._wakeup = Wakeup()
        self._bodies: deque[bytes] = deque()
        self._items = self._bytes = 0
        """Under way: sent by the worker and not yet given back as credit."""
        options = connection.options
        self._items_max = options.window_items
        # A worker sends one more item as long as there is a byte left.
        self._bytes_max = options.window_bytes + options.message_limit_bytes + framing.HEADROOM_BYTES
        self._read_items = self._read_bytes = 0
        """Read and not yet given back."""
        self._grant_items, self._grant_bytes = (options.window_items + 1) // 2, (options.window_bytes + 1) // 2
        self._has_begun = self._is_over = False
        self._error: PenstockError | None = None
        self._stream = 0
        self._sending: SentBody | None = None
        self._forget: tuple[Callable[[], None], ...] = ()
        self.watch: Watch | None = None

    # -- calling

    async def begin(self) -> ResponseStream[Any]:
        """Send the call and return its stream once the worker has one. Raise what the worker's engine raises."""
        request, connection = self.request, self._connection
        payload = to_plain(request.payload)  # by its own rules, which leave out what stays in this process
        head = CallHead(self._instance.key, request.id, payload, request.metadata, inject(request), request.is_stopped)
        body = to_msgpack(head)
        self._check_size(len(body))
        released = ReleaseOnce(self.release)
        try:
            self._forget = (request.control.on_stop(self._on_stop), request.control.on_kill(self._on_kill))
            while connection.is_full and not self._is_over:
                connection.wake_when_sent(self._wakeup)
                await self._wakeup.wait()
            self._send(body)
            while not (self._is_sent or self._is_over):
                await self._wakeup.wait()
                self._raise_if_lost()
            if request.is_stopped and not head.is_stopped:  # while it waited for the network
                self._on_stop()
            while not (self._has_begun or self._is_over):
                await self._wakeup.wait()
            self._raise_if_failed()
        except BaseException:
            released.release()
            raise
        return RemoteStream(self, released)

    def _send(self, body: bytes) -> None:
        connection = self._connection
        if self._is_over:  # killed before
            return
        self._raise_if_lost()
        if len(body) <= PART_BYTES or not connection.takes_parts:
            connection.send(framing.CALL, self._open(), body)
        else:
            self._sending = SentBody(body, self._open, self._wakeup)
            connection.send_in_parts(self._sending)

    def _raise_if_lost(self) -> None:
        """Raise CannotConnect if the connection has ended before the worker could have the call."""
        if not self._stream and not self._is_over and (reason := self._connection.reason) is not None:
            raise CannotConnect(f"{self._instance} was lost: {reason}", cause=reason)

    def _open(self) -> int:
        self._stream = self._connection.add(self)
        return self._stream

    @property
    def _is_sent(self) -> bool:
        """Whether the worker has the call: a stop goes behind it."""
        return self._stream > 0 if self._sending is None else self._sending.is_sent

    def _check_size(self, size_bytes: int) -> None:
        other = self._connection.other
        assert other is not None, "the connection is open"
        limit_bytes = min(self._connection.options.message_limit_bytes, other.message_limit_bytes)
        if size_bytes > limit_bytes:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=limit_bytes)

    def _raise_if_failed(self) -> None:
        """Raise the error that came instead of a stream; Cancelled for a call that was killed."""
        if self.request.is_killed:
            raise Cancelled("killed before there was an answer")
        if self._has_begun:
            return
        error = self._error or Disconnected(f"{self._instance} ended a call without an answer")
        if self.request.is_stopped and isinstance(error, Disconnected):
            raise Cancelled("stopped before there was an answer", cause=error)
        raise error

    def _on_stop(self) -> None:
        if self._is_sent and not (self._is_over or self.request.is_killed):
            self._connection.send(framing.STOP, self._stream)

    def _on_kill(self) -> None:
        self._leave(framing.KILL)
        self._bodies.clear()
        self._wakeup.wake()

    def release(self) -> None:
        """End the call, wherever it is."""
        self._leave(framing.CLOSE)
        forget, self._forget = self._forget, ()
        for one in forget:
            one()
        self._bodies.clear()

    def _leave(self, kind: int) -> None:
        if not self._is_over:
            self._is_over = True
            if self._sending is not None:
                self._connection.take_back(self._sending)
            if self._stream:
                self._connection.send(kind, self._stream)
                self._connection.remove(self._stream)

    # -- what the connection brings

    def on_begun(self) -> None:
        if self._has_begun:
            raise InvalidMessage("a stream began twice")
        self._has_begun = True
        self._wakeup.wake()

    def on_items(self, body: bytes) -> None:
        first = body[0]
        count = first & 0x0F if first & 0xF0 == 0x90 else framing.list_length(body)
        self._items += count
        self._bytes += len(body)
        if not self._has_begun or not count or self._items > self._items_max or self._bytes > self._bytes_max:
            raise InvalidMessage("items outside of their stream's window")
        self._bodies.append(body)
        self._wakeup.wake()

    def on_end(self, error: PenstockError | None) -> None:
        self._is_over = True
        if not self._is_sent and self._sending is not None:  # the worker wants no more of the request
            self._connection.take_back(self._sending)
            self._connection.send(framing.CLOSE, self._stream)
        self._error = error
        self._wakeup.wake()

    def on_lost(self, reason: TransportError) -> None:
        self.on_end(self._lost(reason))

    def _lost(self, reason: TransportError) -> Disconnected:
        return Disconnected(f"{self._instance} was lost: {reason}", cause=reason)

    # -- reading

    async def read(self, released: ReleaseOnce) -> AsyncGenerator[Any, None]:
        control, bodies, decode = self.request.control, self._bodies, self._decode
        watch = self.watch
        try:
            while True:
                while bodies:
                    try:
                        items, count, size_bytes = decode(bodies)
                    except Exception as error:  # a record's own check may raise anything
                        raise self._unreadable(error) from error
                    for item in items:
                        if watch is not None and isinstance(item, Annotated) and item.event is not None:
                            watch.look_at(item)
                        yield item
                        if control.state is State.KILLED:
                            return
                    self._read_items += count
                    self._read_bytes += size_bytes
                    if self._read_items >= self._grant_items or self._read_bytes >= self._grant_bytes:
                        self._give_credit()
                if self._is_over:
                    self._raise_the_end()
                    return
                await self._wakeup.wait()
        except Exception as error:
            released.release()
            _failed(watch, error)
            raise
        finally:
            released.release()
            _ended(watch)

    def _unreadable(self, error: Exception) -> InvalidMessage:
        return InvalidMessage(f"{self._instance} sent an item that cannot be read: {error}")

    def _raise_the_end(self) -> None:
        if self._error is None or self.request.is_killed:
            return
        if self.request.is_stopped and isinstance(self._error, Disconnected):
            return
        raise self._error

    def _give_credit(self) -> None:
        """Let the worker send as many more as were read."""
        if not self._is_over:
            self._items -= self._read_items
            self._bytes -= self._read_bytes
            self._connection.send(framing.CREDIT, self._stream, to_msgpack([self._read_items, self._read_bytes]))
            self._read_items = self._read_bytes = 0


def _failed(watch: Watch | None, error: Exception) -> None:
    if watch is not None:
        watch.on_failure(error)


def _ended(watch: Watch | None) -> None:
    if watch is not None:
        watch.reservation.release()
