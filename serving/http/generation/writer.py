"""ReplyWriter: sends one answer while its engine still generates.

    reader task ── put(frame), room() ──► frames ── a task while there are any ──► client

Frames that are ready together leave in one write, a single frame leaves at once, and a client that does not read holds
its engine back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

import anyio

from pipeline.loop import Wakeup, clock

from ..side_task import TIMER_ERROR_S, SideTask, Work, call_later, end

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

BUFFER_BYTES = 32 * 1024
"""Frames waiting above which the reader has to wait too."""

PIECE_BYTES = 64 * 1024
"""Most bytes of a write of more than one frame; a whole answer is put in frames that are no longer."""

_KEEP_ALIVE = b":\n\n"


class ReplyWriter:
    """The frames of one answer on their way to one client.

    Nothing is sent before `commit`: until then the caller may still answer with an error status instead. A task sends;
    it exists only while there is something to send, so an answer that waits costs none.

    For a client that does not read there are at most two buffers, the waiting frames and the write under way, each of
    `BUFFER_BYTES` and one more frame of each reader. The caller awaits `close` on every way out.
    """

    __slots__ = (
        "_begun",
        "_ended",
        "_finished",
        "_frames",
        "_gone",
        "_headers",
        "_keep_alive",
        "_on_gone",
        "_send",
        "_space",
        "_start",
        "_task",
        "_waiting_bytes",
        "_write",
        "committed",
        "failure",
    )

    def __init__(
        self,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        on_gone: Callable[[], object],
        start: Callable[[Work], SideTask],
        keep_alive_s: float | None = None,
    ) -> None:
        """`on_gone` is called if a write shows that the client is gone; all frames are then dropped.

        `start` starts the task that sends. With `keep_alive_s` the writer commits by itself after that time, and sends
        a comment whenever so much time passes without a frame.
        """
        self.committed = False
        """Whether the status is 200, sent or about to be."""
        self.failure: Exception | None = None
        """An error of the server's `send`, except that the client is gone."""
        self._send = send
        self._headers = headers
        self._on_gone = on_gone
        self._start = start
        self._frames: list[bytes] = []
        self._waiting_bytes = 0
        self._begun = False
        self._finished = False
        self._gone = False
        self._task: SideTask | None = None
        self._write: Message | None = None
        self._space: anyio.Event | None = None
        self._ended: Wakeup | None = None
        self._keep_alive = None if keep_alive_s is None else _KeepAlive(self, keep_alive_s)

    @property
    def write(self) -> object:
        """The write under way, a different object each time; None while there is none."""
        return self._write

    def put(self, frame: bytes) -> bool:
        """Append a frame, which leaves on the next turn of the loop, or after the commit.

        Return whether the reader should await `room` before it takes the next item.
        """
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        if self._keep_alive is not None:
            self._keep_alive.postpone()
        if self._task is None and self.committed:
            self._begin_to_send()
        return self._waiting_bytes >= BUFFER_BYTES

    def put_whole(self, parts: Iterable[bytes], headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Append all parts of an answer, then commit and finish. `headers` replace those of the writer."""
        self._headers = headers
        for part in parts:
            self._frames += [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]
            self._waiting_bytes += len(part)
        self._finished = True
        self.commit()

    def commit(self) -> None:
        """Answer with status 200 and let frames leave."""
        self.committed = True
        if self._task is None and self._frames:
            self._begin_to_send()

    def finish(self) -> None:
        """End the answer after the frames so far."""
        self._finished = True
        if self._task is None and self.committed:
            self._begin_to_send()

    def abandon(self) -> None:
        """Drop everything for a client that is gone: the write under way is cancelled, and nothing waits any more."""
        self._drop()
        if self._task is not None:
            self._task.cancel()

    async def room(self) -> None:
        """Return once there is room for more frames, or the client is gone."""
        while self._waiting_bytes >= BUFFER_BYTES and not self._gone:
            if self._space is None:
                self._space = anyio.Event()
            await self._space.wait()

    async def sent(self) -> None:
        """Return once every frame is sent, after `finish`, or the client is gone."""
        while self._task is not None and not self._gone:
            if self._ended is None:
                self._ended = Wakeup()
            await self._ended.wait()

    async def close(self) -> None:
        """Cancel what is still being sent. Idempotent."""
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if self._task is not None:
            self._drop()
            task, self._task = self._task, None
            await end(task)

    # -- the task

    def _begin_to_send(self) -> None:
        if not self._gone:
            self._task = self._start(self._run())

    async def _run(self) -> None:
        """Send the waiting frames; the last frame of a finished answer closes it."""
        try:
            if not self._begun:
                self._begun = True
                await self._deliver({"type": "http.response.start", "status": 200, "headers": self._headers})
            while self._frames or self._finished:
                body = self._take()
                is_last = self._finished and not self._frames
                await self._deliver({"type": "http.response.body", "body": body, "more_body": not is_last})
                if is_last:
                    break
        except OSError:  # raised by some servers if the client is gone; others only return it from `receive`
            self._lose()
        except Exception as failure:
            self.failure = failure
            self._lose()
        finally:
            self._task = None
            if self._ended is not None:
                self._ended.wake()

    async def _deliver(self, message: Message) -> None:
        self._write = message
        try:
            await self._send(message)
        finally:
            self._write = None

    def _take(self) -> bytes:
        """Remove and return the next write: all frames, or the first of them if they are long."""
        if self._waiting_bytes <= PIECE_BYTES:
            body = b"".join(self._frames)
            self._frames.clear()
        else:
            body = self._take_first()
        self._waiting_bytes -= len(body)
        if self._space is not None and self._waiting_bytes < BUFFER_BYTES:
            self._space.set()
            self._space = None
        return body

    def _take_first(self) -> bytes:
        count, size_bytes = 1, len(self._frames[0])
        while count < len(self._frames) and size_bytes + len(self._frames[count]) <= PIECE_BYTES:
            size_bytes += len(self._frames[count])
            count += 1
        body = b"".join(self._frames[:count])
        del self._frames[:count]
        return body

    def _lose(self) -> None:
        self._drop()
        self._on_gone()

    def _drop(self) -> None:
        """Drop the waiting frames and all later ones."""
        self._gone = True
        self._frames.clear()
        self._waiting_bytes = 0
        if self._space is not None:
            self._space.set()
            self._space = None
        if self._ended is not None:
            self._ended.wake()


class _KeepAlive:
    """Puts a comment whenever `period_s` pass without a frame."""

    def __init__(self, writer: ReplyWriter, period_s: float) -> None:
        self._writer = writer
        self._period_s = period_s
        self._now = clock()
        self._due_s = self._now() + period_s
        self.cancel = call_later(period_s, self._on_timer)

    def postpone(self) -> None:
        """Start the period again, because of a frame."""
        self._due_s = self._now() + self._period_s

    def _on_timer(self) -> None:
        if self._due_s - self._now() <= TIMER_ERROR_S:
            if self._writer.write is None:
                self._writer.committed = True
                self._writer.put(_KEEP_ALIVE)
            self.postpone()
        self.cancel = call_later(max(self._due_s - self._now(), 0.0), self._on_timer)
