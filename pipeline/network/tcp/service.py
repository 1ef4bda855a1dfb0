"""The worker's side: calls that come over a connection.

    CALL ──► task: engine.generate ──► BEGUN ──► ITEMS, as long as there is credit ──► END or ERROR
    STOP, KILL, CLOSE, the end of the connection ──► the call's context

Items that are ready in one turn of the loop are sent in one frame.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from pipeline import Context, PenstockError, WorkerOverloaded, to_error
from pipeline.errors import InvalidMessage, MessageTooLarge, TransportError
from pipeline.loop import Wakeup
from pipeline.protocols.field_rules import U32_MAX
from pipeline.telemetry import extract
from pipeline.wire import stream_tokens_to_msgpack, token_to_msgpack

from . import framing
from .connection import Connection
from .framing import Handler
from .links import HIGH_WATER_BYTES
from .messages import CallHead, error_body, read
from .parts import PART_BYTES, SentBody
from .shared import Shared

_log = logging.getLogger(__name__)

_JOINED_BYTES = 32 * 1024
"""Bytes of items above which a frame is complete within a turn."""

_JOINED_NUMBERS = 8192
"""Streams and token ids of a frame, at most: 40 KiB, less than what a frame may have beyond the limit of a message."""

_UNREAD_PARTS = 50_000
"""Parts of frames that may wait to be sent to a caller that makes further calls: refusals need no credit."""

Serve = Callable[["ServedCall", CallHead], Awaitable[None]]
"""Serves one call to its end. Raises nothing but what ends its task."""


class ServedConnection(Connection):
    """A connection that another process has made. `serve` is called with each call, in a task of its own."""

    is_caller = False

    def __init__(self, shared: Shared, serve: Serve, on_end: Callable[[Connection], object]) -> None:
        super().__init__(shared, on_end)
        self._serve = serve
        self._calls: dict[int, ServedCall] = {}
        self._last_stream = 0
        self._joining: list[ServedCall] = []
        self.tokens: list[int] = []
        """Streams and token ids, by turns, for the next frame of them; whoever adds the first calls `wants_output`."""

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def remove(self, stream: int) -> None:
        """Forget a call that has ended."""
        self._calls.pop(stream, None)

    def joins(self, call: ServedCall) -> None:
        """Take the call's items with the next output."""
        if not self._joining:
            self.wants_output()
        self._joining.append(call)

    def put_tokens(self) -> None:
        """Have the tokens that wait go before what is sent next."""
        if self.tokens:
            self.put(*self._tokens_frame())

    def _tokens_frame(self) -> tuple[bytes, bytes]:
        body = stream_tokens_to_msgpack(self.tokens)
        self.tokens.clear()
        return framing.header(framing.TOKENS, 0, len(body)), body

    def _gather(self, out: list[bytes]) -> None:
        if self.tokens:
            out += self._tokens_frame()
        for call in self._joining:
            call.joined(out)
        self._joining.clear()

    def _ended(self, reason: TransportError) -> None:
        for call in list(self._calls.values()):
            call.cancel()

    def _stream_handlers(self) -> Mapping[int, Handler]:
        return {
            framing.CALL: self._on_call,
            framing.PART: self._on_part,
            framing.CREDIT: self._on_credit,
            framing.STOP: self._on_stop,
            framing.KILL: self._on_kill,
            framing.CLOSE: self._on_close,
        }

    def _on_call(self, stream: int, body: bytes) -> None:
        self._open(stream)
        self._begin(stream, body)

    def _on_part(self, stream: int, part: bytes) -> None:
        if stream not in self._parts_in:
            self._open(stream)
        if (body := self._parts_in.take(stream, part)) is not None:
            self._begin(stream, body)

    def _open(self, stream: int) -> None:
        if stream <= self._last_stream:
            raise InvalidMessage(f"stream {stream} was opened twice")
        self._last_stream = stream

    def _begin(self, stream: int, body: bytes) -> None:
        if self.waiting_parts > _UNREAD_PARTS:
            raise InvalidMessage("more calls than it reads answers")
        if len(self._calls) >= self.options.calls_max:
            refusal = WorkerOverloaded(f"a connection has {self.options.calls_max} calls already")
            self.send(framing.ERROR, stream, error_body(refusal))
            return
        call = self._calls[stream] = ServedCall(self, stream, body)
        self._scheduler.spawn(call.run)

    def _call(self, stream: int) -> ServedCall | None:
        """Return the call with this stream; None if it has ended here."""
        if (call := self._calls.get(stream)) is None and not 0 < stream <= self._last_stream:
            raise InvalidMessage(f"a frame of stream {stream}, which was never opened")
        return call

    def _on_credit(self, stream: int, body: bytes) -> None:
        if (call := self._call(stream)) is not None:
            given = read(body, list[int])
            if len(given) != 2 or min(given) < 0:
                raise InvalidMessage("expected credit in items and bytes")
            call.on_credit(*given)

    def _on_stop(self, stream: int, body: bytes) -> None:
        if (call := self._call(stream)) is not None:
            call.stop()

    def _on_kill(self, stream: int, body: bytes) -> None:
        self._parts_in.drop(stream)
        if (call := self._call(stream)) is not None:
            call.was_stopped = True
            call.cancel()

    def _on_close(self, stream: int, body: bytes) -> None:
        self._parts_in.drop(stream)
        if (call := self._call(stream)) is not None:
            call.cancel()

    def serve(self, call: ServedCall, head: CallHead) -> Awaitable[None]:
        """Serve one call to its end."""
        return self._serve(call, head)


class ServedCall:
    """One call: what its server sends, and what its caller does."""

    __slots__ = (
        "_body", "_bytes_out", "_connection", "_context", "_is_over", "_item_head", "_items_out", "_joined",
        "_joined_bytes", "_limit_bytes", "_sending", "_stream", "_wakeup", "_whole_bytes", "_window_bytes",
        "_window_items", "was_stopped",
    )  # fmt: skip

    was_stopped: bool
    """Whether the caller has stopped or killed it."""

    def __init__(self, connection: ServedConnection, stream: int, body: bytes) -> None:
        other, options = connection.other, connection.options
        assert other is not None, "the connection is open"
        self._connection = connection
        self._stream = stream
        self._item_head = framing.item_head(stream)
        self._body: bytes | None = body
        self._context: Context[Any] = Context(None, id="")
        self._wakeup: Wakeup | None = None
        self._limit_bytes = min(options.message_limit_bytes, other.message_limit_bytes)
        self._whole_bytes = min(PART_BYTES, self._limit_bytes) if connection.takes_parts else self._limit_bytes
        self._sending: SentBody | None = None
        self._window_items, self._window_bytes = other.window_items, other.window_bytes
        self._items_out = self._bytes_out = 0  # sent and not yet given back as credit
        self._joined: list[bytes] = []
        self._joined_bytes = 0
        self._is_over = False  # the caller has left, or has had its last frame
        self.was_stopped = False

    async def run(self, scope: anyio.CancelScope) -> None:
        """Serve the call. Return when it has ended, however it ends."""
        self._wakeup = Wakeup()
        try:
            with scope:
                body, self._body = self._body, None
                assert body is not None, "it is served once"
                head = read(body, CallHead)
                del body
                await self._connection.serve(self, head)
        except InvalidMessage as error:
            self._connection.fail(error)
        except Exception as error:  # a fault of this process must not end all that its scheduler runs
            _log.exception("a call could not be served")
            self.fail(to_error(error))
        finally:
            self._is_over = True
            self._take_back()
            self._connection.remove(self._stream)

    # -- what the caller does

    def stop(self) -> None:
        """The caller has stopped the request."""
        self.was_stopped = True
        self._context.stop()

    def cancel(self) -> None:
        """End the call at once: its caller expects nothing more."""
        self._is_over = True
        self._joined.clear()
        self._joined_bytes = 0
        self._take_back()
        self._context.kill()
        self._wake()

    def on_credit(self, items: int, size_bytes: int) -> None:
        """The caller's reader has taken so much."""
        self._items_out -= items
        self._bytes_out -= size_bytes
        if min(self._items_out, self._bytes_out) < 0:
            raise InvalidMessage("more credit than was used")
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.wake()

    # -- what its server does

    def context(self, head: CallHead, payload: Any) -> Context[Any]:
        """Return the request for the engine. The caller's stop and kill reach it, those of before included."""
        context = Context(payload, id=head.id, metadata=head.metadata, control=self._context.control)
        context.trace = extract(head.trace) if head.trace else None
        self._context = context
        if head.is_stopped:
            self.stop()
        return context

    def begin(self) -> None:
        """Let the caller have its stream."""
        self._send(framing.BEGUN)

    def send_item(self, item: bytes) -> bool:
        """Send an item, together with others of this turn. Raise MessageTooLarge.

        Return whether another one may be sent now; else `room` waits until one may.
        """
        size_bytes = len(item)
        if size_bytes > self._whole_bytes:
            return self._send_in_parts(item)
        if self._is_over:
            return True
        connection = self._connection
        if not self._joined:
            connection.joins(self)
        elif self._joined_bytes + size_bytes > _JOINED_BYTES:
            self._put_joined()
            connection.joins(self)
        self._joined.append(item)
        self._joined_bytes += size_bytes
        self._items_out += 1
        self._bytes_out += size_bytes
        # As `_has_room`, without a call for each item.
        return (
            self._items_out < self._window_items
            and self._bytes_out < self._window_bytes
            and (connection.out_bytes <= HIGH_WATER_BYTES or not connection.is_full)
        )

    def send_token(self, token_id: int) -> bool:
        """Send an item of this token alone, without an index, to a caller with short items; otherwise as `send_item`.

        It goes in one frame with the tokens of other streams in this turn, and counts as an item of no bytes: so the
        counts of a stream of tokens are small integers, which are not in other memory for each stream.
        """
        if self._joined_bytes or type(token_id) is not int or not 0 <= token_id <= U32_MAX:
            return self.send_item(token_to_msgpack(token_id, None))
        if self._is_over:
            return True
        connection = self._connection
        if not (tokens := connection.tokens):
            connection.wants_output()
        tokens += (self._stream, token_id)
        if len(tokens) >= _JOINED_NUMBERS:
            connection.put_tokens()
        self._items_out = items_out = self._items_out + 1
        return items_out < self._window_items and (connection.out_bytes <= HIGH_WATER_BYTES or not connection.is_full)

    def _send_in_parts(self, item: bytes) -> bool:
        """Send an item too long for one frame, behind those before it. There is no room until it is sent."""
        if len(item) > self._limit_bytes:
            raise MessageTooLarge(size_bytes=len(item), limit_bytes=self._limit_bytes)
        if self._is_over:
            return True
        assert self._wakeup is not None, "the call runs"
        self._put_joined()
        prefix = framing.list_header(1)
        self._items_out += 1
        self._bytes_out += len(prefix) + len(item)
        self._sending = SentBody(item, lambda: self._stream, self._wakeup, prefix)
        self._connection.send_in_parts(self._sending)
        return False

    @property
    def _is_sending(self) -> bool:
        """Whether an item is sent in parts, and its last one was not."""
        return self._sending is not None and not self._sending.is_sent

    def _take_back(self) -> None:
        if self._sending is not None:
            self._connection.take_back(self._sending)
            self._sending = None

    def joined(self, out: list[bytes]) -> None:
        """Add the frame of the items that have come together, if there are any."""
        items = self._joined
        if len(items) == 1:
            out += framing.item_length(self._joined_bytes), self._item_head, items[0]
            self._bytes_out += 1
        elif items:
            count = framing.list_header(len(items))
            out.append(framing.header(framing.ITEMS, self._stream, len(count) + self._joined_bytes))
            out.append(count)
            out += items
            self._bytes_out += len(count)
        items.clear()
        self._joined_bytes = 0

    def _put_joined(self) -> None:
        self._connection.put_tokens()
        parts: list[bytes] = []
        self.joined(parts)
        self._connection.put(*parts)

    def _has_room(self) -> bool:
        return (
            self._items_out < self._window_items
            and self._bytes_out < self._window_bytes
            and not self._is_sending
            and not self._connection.is_full
        )

    async def room(self) -> None:
        """Wait until an item may be sent, or until the call has ended."""
        assert self._wakeup is not None, "the call runs"
        while not (self._has_room() or self._is_over):
            if self._connection.is_full:
                self._connection.wake_when_sent(self._wakeup)
            await self._wakeup.wait()

    def end(self) -> None:
        """The stream has ended."""
        self._finish(framing.END)

    def fail(self, error: PenstockError) -> None:
        """The call has failed, before or in its stream."""
        self._finish(framing.ERROR, error_body(error))

    def cut(self, error: PenstockError) -> None:
        """End the call at once. Its caller gets the error, or an end if it has stopped the request.

        Within an item it gets the error in any case, which it takes for an end then.
        """
        if self.was_stopped and not self._is_sending:
            self.end()
        else:
            self.fail(error)
        self.cancel()

    def _send(self, kind: int, body: bytes = framing.NIL) -> None:
        if not self._is_over:
            self._connection.send(kind, self._stream, body)

    def _finish(self, kind: int, body: bytes = framing.NIL) -> None:
        self._put_joined()
        self._send(kind, body)
        self._is_over = True
