"""Connection: one side of an open connection: first frames, heartbeat, what waits to be sent.

    caller ──► HELLO            HELLO ◄── worker       version, nonce, limits
    caller ──► PROOF                                   of the token, for both nonces
                                PROOF ◄── worker       only to a caller with the token
    caller ──► CALL, STOP, ...  BEGUN, ITEMS, ... ◄── worker

Nothing but these two frames is read of a side that has not proved that it knows the token.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Any

import anyio

from pipeline import CannotConnect, PenstockError
from pipeline.errors import CodecError, InvalidMessage, TransportError
from pipeline.loop import Wakeup
from pipeline.rx import Disposable, DisposableBase
from pipeline.wire import to_msgpack

from . import framing
from .framing import Handler
from .links import HIGH_WATER_BYTES, Link, LinkHandler
from .messages import NONCE_BYTES, NONCE_TEXT_LENGTH, Hello, Version, error_body, is_proof, proof, read
from .parts import IncomingParts, OutgoingParts, SentBody
from .shared import Shared

_log = logging.getLogger(__name__)

_FIRST_FRAMES_BYTES = 1024
"""Limit of a frame of a side that has not proved that it knows the token."""


class Connection(LinkHandler):
    """Common to both sides. Ends by `close`, `fail`, a fault of the other side, its silence, or the loss of the link.

    `on_end` is called once, when the link is gone.
    """

    is_caller: bool

    def __init__(self, shared: Shared, on_end: Callable[[Connection], object]) -> None:
        self._shared = shared
        self._scheduler = shared.scheduler
        self.options = shared.options
        self._on_end = on_end
        self._link: Link | None = None
        self._reader = framing.FrameReader(_FIRST_FRAMES_BYTES, self._first_handlers(framing.HELLO, self._on_hello))
        self._nonce = token_hex(NONCE_BYTES)
        self.other: Hello | None = None
        """What the other side states of itself, once it has."""
        self.is_open = False
        """Whether both sides have proved that they know the token, and the connection has not ended."""
        self.reason: TransportError | None = None
        """Why it has ended or is ending."""
        self._out: list[bytes] = []
        self.out_bytes = 0
        """Bytes of the frames that wait to be sent."""
        self._parts_out, self._sends_parts = OutgoingParts(), False
        self._parts_in = IncomingParts(self.options.message_limit_bytes + framing.HEADROOM_BYTES)
        self._blocked: list[Wakeup] = []
        self._was_heard = self._has_sent = False
        self._silent_s = 0.0
        self._timer: DisposableBase = Disposable()
        self._settled, self._closed = anyio.Event(), anyio.Event()

    # -- what subclasses add

    @property
    @abstractmethod
    def calls(self) -> int:
        """Calls that have not ended."""

    @abstractmethod
    def _ended(self, reason: TransportError) -> None:
        """End what runs over the connection."""

    @abstractmethod
    def _stream_handlers(self) -> Mapping[int, Handler]:
        """Return what is called with frames of each kind."""

    def _handled(self) -> None:
        """Called when all frames of one read were handled."""

    def _gather(self, out: list[bytes]) -> None:
        """Add the frames of what has come together since the last output."""

    # -- sending

    def send(self, kind: int, stream: int, body: bytes = framing.NIL) -> None:
        """Send a frame on the loop's next turn; without effect once the connection has ended."""
        self.put(framing.header(kind, stream, len(body)), body)

    def put(self, *parts: bytes) -> None:
        """Send the parts of a frame, as `send` does."""
        if self.reason is None:
            self._out += parts
            self.out_bytes += sum(map(len, parts))
            self.wants_output()

    @property
    def takes_parts(self) -> bool:
        """Whether the other side takes long bodies in parts."""
        return self._parts_out.limit_bytes > 0

    def send_in_parts(self, body: SentBody) -> None:
        """Send a body of a CALL or of ITEMS in parts, between what else is sent. No more of its stream may be sent
        until it is sent, or taken back."""
        if self.reason is None:
            self._parts_out.add(body)
            self._sends_parts = True
            self.wants_output()

    def take_back(self, body: SentBody) -> None:
        """Send no more of the body: its stream ends."""
        self._parts_out.remove(body)

    def wants_output(self) -> None:
        """There is something to be sent."""
        if self._link is not None:
            self._link.ready()

    @property
    def is_full(self) -> bool:
        """Whether more waits to be sent than should; then wait, with `wake_when_sent`."""
        return self.out_bytes > HIGH_WATER_BYTES and self.reason is None

    @property
    def waiting_parts(self) -> int:
        """Parts of frames that wait to be sent."""
        return len(self._out)

    def wake_when_sent(self, wakeup: Wakeup) -> None:
        """Wake once, when what waits has been handed to the link, or when the connection has ended."""
        self._blocked.append(wakeup)

    def output(self) -> bytes:
        self._has_sent = True
        self._gather(self._out)
        if self._sends_parts:
            self._put_part()
        out = b"".join(self._out)
        self._out.clear()
        self.out_bytes = 0
        if self._blocked:
            self._wake_blocked()
        return out

    def _put_part(self) -> None:
        self._sends_parts = bool(self._parts_out)
        if self._sends_parts:
            self._out += self._parts_out.next_part()
            self.wants_output()

    def _wake_blocked(self) -> None:
        blocked, self._blocked = self._blocked, []
        for wakeup in blocked:
            wakeup.wake()

    # -- beginning

    def opened(self, link: Link) -> None:
        self._link = link
        if self.reason is not None:
            link.abort()
            return
        options = self.options
        hello = Hello(
            framing.VERSION,
            self._nonce,
            heartbeat_ms=round(1000 * options.heartbeat_s),
            message_limit_bytes=options.message_limit_bytes,
            window_items=options.window_items,
            window_bytes=options.window_bytes,
            has_parts=True,
            process=self._shared.process,
        )
        self.send(framing.HELLO, 0, to_msgpack(hello))
        self._timer = self._scheduler.schedule_relative(options.connect_timeout_s, self._check_open)

    def _first_handlers(self, kind: int, handler: Handler) -> dict[int, Handler]:
        """Return what is called before both sides are known. A caller is told why it is refused."""
        return {kind: handler} | ({framing.ERROR: self._on_refusal} if self.is_caller else {})

    def _check_open(self, *_: Any) -> None:
        if not self.is_open:
            self.fail(CannotConnect(f"{self.peer} sent no valid first frames in {self.options.connect_timeout_s:g} s"))

    def _on_hello(self, stream: int, body: bytes) -> None:
        if (version := read(body, Version).version) != framing.VERSION:
            text = f"{self.peer} speaks version {version} of the request plane, this process version {framing.VERSION}"
            raise InvalidMessage(text)
        self.other = other = read(body, Hello)
        if len(other.nonce) != NONCE_TEXT_LENGTH or not min(other.window_items, other.window_bytes):
            raise InvalidMessage("a Hello without a nonce or a window")
        self._reader.handlers = self._first_handlers(framing.PROOF, self._on_proof)
        if self.is_caller:
            self._send_proof(other)

    def _send_proof(self, other: Hello) -> None:
        own = proof(self.options.token, is_caller=self.is_caller, own_nonce=self._nonce, other_nonce=other.nonce)
        self.send(framing.PROOF, 0, own)

    def _on_proof(self, stream: int, body: bytes) -> None:
        assert self.other is not None, "its Hello came first"
        if not is_proof(
            body,
            self.options.token,
            is_caller=not self.is_caller,
            own_nonce=self.other.nonce,
            other_nonce=self._nonce,
        ):
            raise InvalidMessage(f"{self.peer} does not know the token")
        if not self.is_caller:  # a worker proves nothing to those without the token
            self._send_proof(self.other)
        self._reader.handlers = {
            framing.BEAT: lambda *_: self._parts_in.on_beat(),
            framing.ERROR: self._on_refusal,
            **self._stream_handlers(),
        }
        self._reader.limit_bytes = self.options.message_limit_bytes + framing.HEADROOM_BYTES
        self._parts_out.limit_bytes = self.other.message_limit_bytes if self.other.has_parts else 0
        self.is_open = True
        self._timer.dispose()
        self._timer = self._scheduler.schedule_relative(self.options.heartbeat_s, self._beat)
        self._settled.set()

    # -- receiving

    @property
    def peer(self) -> str:
        """The other side, for messages."""
        return "" if self._link is None else self._link.peer

    def received(self, data: bytes) -> None:
        self._was_heard = True
        if self.reason is not None:
            return
        try:
            self._reader.feed(data)
            self._handled()
        except CodecError as error:
            self.fail(error)
        except Exception as error:  # a fault of this process must not end its loop
            _log.exception("a frame of %s could not be handled", self.peer)
            self.fail(InvalidMessage(f"a frame could not be handled: {error!r}"))

    def _on_refusal(self, stream: int, body: bytes) -> None:
        """The other side has ended the connection."""
        error = read(body, PenstockError)
        self.fail(CannotConnect(f"{self.peer} ended the connection: {error.message}", cause=error))

    def _beat(self, *_: Any) -> None:
        """Send something if nothing else was sent; give up a side that has been silent for too long.

        The beat does not answer one of the other side: that would stay unheard behind a long message.
        """
        assert self.other is not None, "the connection is open"
        options = self.options
        self._silent_s = 0.0 if self._was_heard else self._silent_s + options.heartbeat_s
        if self._silent_s >= max(options.lost_after_s, 3 * self.other.heartbeat_ms / 1000):
            self.fail(TransportError(f"{self.peer} has been silent for {self._silent_s:g} s"))
            return
        try:
            self._parts_in.check()
        except InvalidMessage as error:
            self.fail(error)
            return
        if not self._has_sent:
            self.send(framing.BEAT, 0)
        self._was_heard = self._has_sent = False
        self._timer = self._scheduler.schedule_relative(options.heartbeat_s, self._beat)

    async def settled(self) -> None:
        """Wait until the connection is open, or has failed."""
        await self._settled.wait()

    @property
    def is_closed(self) -> bool:
        """Whether the link, which was opened, is gone."""
        return self._closed.is_set()

    async def closed(self) -> None:
        """Wait until the link, which was opened, is gone."""
        await self._closed.wait()

    # -- ending

    def close(self) -> None:
        """Send what waits and that this is the end, then end the connection."""
        if self.reason is None:
            if self.is_open:
                self.send(framing.ERROR, 0, error_body(TransportError("it is closing")))
            self._end(TransportError("this process closed the connection"))
            self._close_link()

    def abort(self) -> None:
        """End the connection at once."""
        self._end(TransportError("this process closed the connection"))
        if self._link is not None:
            self._link.abort()

    def fail(self, error: PenstockError) -> None:
        """End the connection for a fault. The other side is sent a fault of its own."""
        if self.reason is not None:
            return
        if isinstance(error, CodecError):
            self._shared.faults.warning(
                "closing the connection with %s: %s", self.peer or "another process", error.render()
            )
            self.send(framing.ERROR, 0, error_body(error))
        self._end(error if isinstance(error, TransportError) else TransportError(error.message, cause=error))
        if isinstance(error, CodecError):
            self._close_link()
        elif self._link is not None:
            self._link.abort()

    def _close_link(self) -> None:
        """Have what waits sent, for which the other side has some time."""
        if self._link is not None:
            self._link.close()
            self._timer = self._scheduler.schedule_relative(self.options.close_timeout_s, lambda *_: self.abort())

    def lost(self, error: Exception | None) -> None:
        self._link = None
        self._timer.dispose()
        text = "the connection ended" if error is None else f"the connection ended: {error}"
        self._end(TransportError(text, cause=error))
        self._closed.set()
        self._on_end(self)

    def _end(self, reason: TransportError) -> None:
        if self.reason is None:
            self.reason = reason
            self.is_open = False
            self._reader.close()
            self._timer.dispose()
            self._parts_out.clear()
            self._parts_in.clear()
            self._ended(reason)
            self._wake_blocked()
            self._settled.set()
