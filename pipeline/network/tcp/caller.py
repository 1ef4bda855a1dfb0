"""The caller's side of a connection: hands what comes to the calls it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from pipeline import PenstockError
from pipeline.errors import InvalidMessage, TransportError
from pipeline.wire import stream_tokens_from_msgpack

from . import framing
from .connection import Connection
from .framing import Handler
from .messages import read
from .shared import Shared

_STREAMS_MAX = 2**31
"""Calls over one connection; then another is made."""


class Call(Protocol):
    """What a connection does with a call of its own."""

    def on_begun(self) -> None:
        """Called when the worker has a stream."""

    def on_items(self, body: bytes) -> bool:
        """Take a list of items. Return whether to call `deliver` when all that came with it was handled."""
        ...

    def on_token(self, token_id: int) -> bool:
        """Take an item of this token alone; as `on_items`."""
        ...

    def deliver(self) -> None:
        """Hand on what came, or wake the reader."""

    def on_end(self, error: PenstockError | None) -> None:
        """Called when the stream has ended, or failed with the error."""

    def on_lost(self, reason: TransportError) -> None:
        """Called when the connection has ended before the call."""


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
        self._calls: dict[int, Call] = {}
        self._due: list[Call] = []
        """Calls that are fed and got items with what is handled now."""
        self._last_stream = 0

    @property
    def is_usable(self) -> bool:
        """Whether new calls may be made over it."""
        return self.is_open and self._last_stream < _STREAMS_MAX

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def add(self, call: Call) -> int:
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
            framing.TOKENS: self._on_tokens,
            framing.PART: self._on_part,
            framing.END: self._on_end_of_stream,
            framing.ERROR: self._on_error,
        }

    def _call(self, stream: int) -> Call | None:
        """Return the call with this stream; None if it has ended here."""
        if (call := self._calls.get(stream)) is None and not 0 < stream <= self._last_stream:
            raise InvalidMessage(f"a frame of stream {stream}, which was never opened")
        return call

    def _on_begun(self, stream: int, body: bytes) -> None:
        if (call := self._call(stream)) is not None:
            call.on_begun()

    def _on_items(self, stream: int, body: bytes) -> None:
        call = self._calls.get(stream)
        if (call is not None or (call := self._call(stream)) is not None) and call.on_items(body):
            self._due.append(call)

    def _on_tokens(self, _: int, body: bytes) -> None:
        calls, due = self._calls, self._due
        for stream, token_id in stream_tokens_from_msgpack(body):
            call = calls.get(stream)
            if (call is not None or (call := self._call(stream)) is not None) and call.on_token(token_id):
                due.append(call)

    def _handled(self) -> None:
        due = self._due
        if due:
            self._due = []
            for call in due:
                call.deliver()

    def _on_part(self, stream: int, part: bytes) -> None:
        if (call := self._call(stream)) is not None and (body := self._parts_in.take(stream, part)) is not None:
            call.on_items(body)
            call.deliver()

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
