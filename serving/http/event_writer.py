"""EventWriter: the sending half of a streamed answer.

    reader task ── put(frame), room() ──► frames ── run() ──► client

What is ready together leaves in one write, what is alone leaves at once, and a client that does not read holds its
engine back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import anyio

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BUFFER_BYTES = 32 * 1024
"""Frames waiting above which the reader has to wait too."""

_KEEP_ALIVE = b":\n\n"


class EventWriter:
    """Frames of one answer on their way to one client.

    Nothing is sent before `commit`: until then the caller may still answer with an error status instead. With
    `keep_alive_s` set the writer commits by itself after that time, and sends a comment whenever so much time passes
    without a frame. `on_gone` is called if the client turns out to be gone; frames are then dropped.
    """

    def __init__(
        self,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        on_gone: Callable[[], object],
        keep_alive_s: float | None = None,
    ) -> None:
        self.committed = False
        self._send = send
        self._headers = list(headers)
        self._on_gone = on_gone
        self._keep_alive_s = keep_alive_s
        self._frames: list[bytes] = []
        self._waiting_bytes = 0
        self._finished = False
        self._gone = False
        self._wake: anyio.Event | None = None
        self._space: anyio.Event | None = None

    def put(self, frame: bytes) -> bool:
        """Adds a frame, which leaves on the next turn of the loop, or as soon as there is a commit.

        Whether the reader should now await `room` before it takes the next item.
        """
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        if self._wake is not None and self.committed:
            self._wake_up()
        return self._waiting_bytes >= BUFFER_BYTES

    def commit(self) -> None:
        """From now on the status is 200 and frames leave."""
        self.committed = True
        self._wake_up()

    def finish(self) -> None:
        """Nothing more will be put; `run` returns when all is sent."""
        self._finished = True
        self._wake_up()

    def abandon(self) -> None:
        """The client is gone: nothing more is sent, `run` still waits for `finish`."""
        self._gone = True

    async def room(self) -> None:
        """Waits until enough has left."""
        while self._waiting_bytes >= BUFFER_BYTES and not self._gone:
            if self._space is None:
                self._space = anyio.Event()
            await self._space.wait()

    async def run(self) -> bool:
        """Sends until `finish`, also to a client that is gone; whether an answer was begun at all."""
        while not (self._finished or (self.committed and self._frames)):
            await self._wait()
        if not self.committed:
            return False
        await self._deliver({"type": "http.response.start", "status": 200, "headers": self._headers})
        while True:
            last, body = self._finished, self._take()
            await self._deliver({"type": "http.response.body", "body": body, "more_body": not last})
            if last:
                return True
            while not (self._finished or self._frames):
                await self._wait()

    def _take(self) -> bytes:
        body = b"".join(self._frames)
        self._frames.clear()
        self._waiting_bytes = 0
        if self._space is not None:
            self._space.set()
            self._space = None
        return body

    def _wake_up(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake.set()

    async def _wait(self) -> None:
        """Until something changed; if that takes too long there is a comment to send."""
        wake = self._wake = anyio.Event()
        if self._keep_alive_s is None:  # the usual case, without the cost of a timer
            await wake.wait()
            return
        with anyio.move_on_after(self._keep_alive_s) as patience:
            await wake.wait()
        if patience.cancelled_caught:
            self._wake = None
            self.committed = True
            self.put(_KEEP_ALIVE)

    async def _deliver(self, message: MutableMapping[str, Any]) -> None:
        if self._gone:
            return
        try:
            await self._send(message)
        except OSError:  # how some servers say that the client is gone; others only answer `receive`
            self.abandon()
            self._on_gone()
