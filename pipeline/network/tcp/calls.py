"""The caller's side: a call over a connection, and the stream that comes back.

    generate ──► CALL             ◄── BEGUN: the stream is there      or ERROR: `generate` raises it
    read     ──► CREDIT           ◄── ITEMS, then END                 or ERROR: the read raises it
    stop, kill, close ──► STOP, KILL, CLOSE

Items are decoded when they are read, so what waits for a slow reader stays bytes, within the window of its stream.
Tokens that wait together are read as one item; a token that comes alone while its reader waits may be taken without
waking it: see `ResponseStream.feed`. What the router wants to know of a stream, its failure and its end, is
called from here: see `RemoteStream`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pipeline import (
    KILLED,
    Annotated,
    Cancelled,
    CannotConnect,
    Context,
    Disconnected,
    Gate,
    PenstockError,
    ReleaseOnce,
    ResponseStream,
    Take,
    Watch,
)
from pipeline.errors import InvalidMessage, MessageTooLarge, TransportError
from pipeline.loop import Wakeup
from pipeline.telemetry import inject
from pipeline.wire import items_of_token, to_msgpack, to_plain

from ..names import Instance
from . import framing
from .caller import CallerConnection
from .items import ItemReader
from .messages import CallHead
from .parts import PART_BYTES, SentBody

_SHUT = Gate()
_SHUT.is_open = False


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

    def feed(self, take: Take, gate: Gate) -> bool:
        """See `ResponseStream`."""
        return self._call.feed(take, gate)


class RemoteCall:
    """One call: made in the task that calls, then fed by its connection and read by one reader."""

    __slots__ = (
        "_bodies", "_bytes", "_bytes_max", "_connection", "_control", "_error", "_forget", "_gate", "_grant_bytes",
        "_grant_items", "_has_begun", "_instance", "_is_awaited", "_is_due", "_is_over", "_items", "_items_max",
        "_plain", "_read_bytes", "_read_items", "_reader", "_sending", "_stream", "_take", "_token", "_wakeup",
        "request", "watch",
    )  # fmt: skip

    def __init__(
        self, connection: CallerConnection, instance: Instance, request: Context[Any], reader: ItemReader
    ) -> None:
        self._connection = connection
        self._instance = instance
        self.request, self._control = request, request.control
        self._reader = reader
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
        self._error: Exception | None = None
        self._stream = 0
        self._sending: SentBody | None = None
        self._forget: tuple[Callable[[], None], ...] = ()
        self.watch: Watch | None = None
        self._take: Take | None = None
        """Takes a plain item while the gate is open, if the call is fed."""
        self._gate = _SHUT
        self._token: int | None = None
        """A lone token that came with what is handled now, of a call that is fed."""
        self._is_due = False
        """Whether `deliver` is to be called."""
        self._is_awaited = False
        """Whether the reader waits and was not woken. Known here: at each token another object would be looked up."""

    # -- calling

    async def begin(self) -> ResponseStream[Any]:
        """Send the call and return its stream once the worker has one. Raise what the worker's engine raises."""
        request, connection = self.request, self._connection
        payload = to_plain(request.payload)  # by its own rules, which leave out what stays in this process
        head = CallHead(
            self._instance.key,
            request.id,
            payload,
            request.metadata,
            inject(request),
            request.is_stopped,
            has_short_items=self._reader.plain is not None,
        )
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
        self._drop()
        self._wake()

    def release(self) -> None:
        """End the call, wherever it is."""
        self._leave(framing.CLOSE)
        forget, self._forget = self._forget, ()
        for one in forget:
            one()
        self._drop()

    def _drop(self) -> None:
        """Drop what was not read."""
        self._token = None
        self._bodies.clear()

    def _leave(self, kind: int) -> None:
        if not self._is_over:
            self._is_over = True
            if self._sending is not None:
                self._connection.take_back(self._sending)
            if self._stream:
                self._connection.send(kind, self._stream)
                self._connection.remove(self._stream)

    def _wake(self) -> None:
        self._is_awaited = False
        self._wakeup.wake()

    # -- what the connection brings

    def on_begun(self) -> None:
        if self._has_begun:
            raise InvalidMessage("a stream began twice")
        self._has_begun = True
        self._wake()

    def on_items(self, body: bytes) -> bool:
        """Take a list of items. Return whether to call `deliver` when all that came with it was handled."""
        first = body[0]
        count = first & 0x0F if first & 0xF0 == 0x90 else framing.list_length(body)
        self._items += count
        self._bytes += len(body)
        if not self._has_begun or not count or self._items > self._items_max or self._bytes > self._bytes_max:
            raise InvalidMessage("items outside of their stream's window")
        return self._queue(body)

    def on_token(self, token_id: int) -> bool:
        """Take an item of this token alone. Return as `on_items`."""
        self._items = items = self._items + 1
        if not self._has_begun or items > self._items_max:
            raise InvalidMessage("items outside of their stream's window")
        if self._take is None or self._is_due:
            if self._reader.plain is None:
                raise InvalidMessage("a token for a caller that reads other items")
            return self._queue(items_of_token(token_id))
        self._token, self._is_due = token_id, True
        return True

    def _queue(self, body: bytes) -> bool:
        """Leave a list of items to the reader, unless it is alone when it is delivered. Return as `on_items`."""
        self._queue_token()
        self._bodies.append(body)
        if self._take is None:
            self._wake()
            return False
        was_due, self._is_due = self._is_due, True
        return not was_due

    def _queue_token(self) -> None:
        """Leave the lone token to the reader, if there is one: it is not alone any more, or is not taken."""
        if self._token is not None:
            self._bodies.append(items_of_token(self._token))
            self._token = None

    def deliver(self) -> None:
        """Have a plain item taken if it came alone and the reader waits; else wake the reader."""
        self._is_due = False
        take, token_id, index, size_bytes = self._take, self._token, None, 0
        if self._is_awaited and take is not None and self._gate.is_open and self._control.state is not KILLED:
            if token_id is None and len(bodies := self._bodies) == 1 and (plain := self._plain(bodies[0])) is not None:
                (token_id, index), size_bytes = plain, len(bodies[0])
            if token_id is not None:
                try:
                    is_taken = take(token_id, index)
                except Exception as error:
                    self._fail(error)
                    return
                if is_taken:
                    if self._token is None:
                        self._bodies.clear()  # of what was taken, or of all after a kill
                    self._token = None
                    self._count_read(1, size_bytes)
                    return
        self._queue_token()
        if self._bodies:
            self._wake()

    def _fail(self, error: Exception) -> None:
        """End the call, because a stage that takes its items failed."""
        self._leave(framing.CLOSE)
        self._drop()
        self._error = error
        self._wake()

    def on_end(self, error: PenstockError | None) -> None:
        self._is_over = True
        self._queue_token()
        if not self._is_sent and self._sending is not None:  # the worker wants no more of the request
            self._connection.take_back(self._sending)
            self._connection.send(framing.CLOSE, self._stream)
        self._error = error
        self._wake()

    def on_lost(self, reason: TransportError) -> None:
        self.on_end(self._lost(reason))

    def _lost(self, reason: TransportError) -> Disconnected:
        return Disconnected(f"{self._instance} was lost: {reason}", cause=reason)

    # -- reading

    def feed(self, take: Take, gate: Gate) -> bool:
        """Have plain items taken without the reader from now on. Return whether the items may be plain."""
        if self._reader.plain is None:
            return False
        self._take, self._gate, self._plain = take, gate, self._reader.plain
        return True

    async def read(self, released: ReleaseOnce) -> AsyncGenerator[Any, None]:
        control, bodies, decode = self.request.control, self._bodies, self._reader.ready
        watch = self.watch
        try:
            while True:
                while bodies:
                    if self.request.is_killed:  # by another thread: `_on_kill` is called in the next turn
                        return
                    try:
                        items, count, size_bytes = decode(bodies)
                    except Exception as error:  # a record's own check may raise anything
                        raise self._unreadable(error) from error
                    for item in items:
                        if watch is not None and isinstance(item, Annotated) and item.event is not None:
                            watch.look_at(item)
                        yield item
                        if control.state is KILLED:
                            return
                    self._count_read(count, size_bytes)
                if self._is_over:
                    self._raise_the_end()
                    return
                self._is_awaited = True
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

    def _count_read(self, items: int, size_bytes: int) -> None:
        """Let the worker send as many more as were read, once these are half of its window."""
        self._read_items = read_items = self._read_items + items
        self._read_bytes = read_bytes = self._read_bytes + size_bytes
        if (read_items >= self._grant_items or read_bytes >= self._grant_bytes) and not self._is_over:
            read_bytes = min(read_bytes, self._bytes)  # a token that was left to the reader had come as no bytes
            self._items -= read_items
            self._bytes -= read_bytes
            self._connection.send(framing.CREDIT, self._stream, to_msgpack([read_items, read_bytes]))
            self._read_items = self._read_bytes = 0


def _failed(watch: Watch | None, error: Exception) -> None:
    if watch is not None:
        watch.on_failure(error)


def _ended(watch: Watch | None) -> None:
    if watch is not None:
        watch.reservation.release()
