"""EventWriter: the sending half of an answer.

    reader task ── put(frame), room() ──► frames ── a task while there are any ──► client

What is ready together leaves in one write, what is alone leaves at once, and a client that does not read holds its
engine back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

import anyio

from pipeline.loop import Bell, loop_clock

from ..side_task import SideTask, Work, call_later, end

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

BUFFER_BYTES = 32 * 1024
"""Frames waiting above which the reader has to wait too."""

PIECE_BYTES = 64 * 1024
"""Most bytes of a write of more than one frame; a whole answer is put in frames that are no longer."""

_CLOCK_S = 1e-3
"""Timers of some loops are early by as much."""

_KEEP_ALIVE = b":\n\n"


class EventWriter:
    """Frames of one answer on their way to one client.

    Nothing is sent before `commit`: until then the caller may still answer with an error status instead. With
    `keep_alive_s` set the writer commits by itself after that time, and sends a comment whenever so much time passes
    without a frame. `on_gone` is called if the client turns out to be gone; frames are then dropped. `start` starts
    the task that sends: there is one only while there is something to send, so an answer that waits costs none.

    For a client that does not read there are at most two buffers here, the frames that wait and the write under way,
    each of `BUFFER_BYTES` and one more frame of each reader. The caller awaits `close` on every way out.
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
        self.committed = False
        self.failure: Exception | None = None
        """What the server raised when it was to send, other than that the client is gone."""
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
        self._ended: Bell | None = None
        self._keep_alive = None if keep_alive_s is None else _KeepAlive(self, keep_alive_s)

    @property
    def write(self) -> object:
        """The write that is under way, each one another object; None while there is none."""
        return self._write

    def put(self, frame: bytes) -> bool:
        """Adds a frame, which leaves on the next turn of the loop, or as soon as there is a commit.

        Whether the reader should now await `room` before it takes the next item.
        """
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        if self._keep_alive is not None:
            self._keep_alive.postpone()
        if self._task is None and self.committed:
            self._begin_to_send()
        return self._waiting_bytes >= BUFFER_BYTES

    def put_whole(self, parts: Iterable[bytes]) -> None:
        """Adds all parts of an answer, then commits and finishes."""
        for part in parts:
            self._frames += [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]
            self._waiting_bytes += len(part)
        self._finished = True
        self.commit()

    def commit(self) -> None:
        """From now on the status is 200 and frames leave."""
        self.committed = True
        if self._task is None and self._frames:
            self._begin_to_send()

    def finish(self) -> None:
        """Nothing more will be put."""
        self._finished = True
        if self._task is None and self.committed:
            self._begin_to_send()

    def abandon(self) -> None:
        """The client is gone: nothing more is sent, and nothing waits for it. A write under way is cancelled."""
        self._drop()
        if self._task is not None:
            self._task.cancel()

    async def room(self) -> None:
        """Waits until enough has left, or the client is gone."""
        while self._waiting_bytes >= BUFFER_BYTES and not self._gone:
            if self._space is None:
                self._space = anyio.Event()
            await self._space.wait()

    async def sent(self) -> None:
        """Waits until all that was put is sent, after `finish`, or the client is gone."""
        while self._task is not None and not self._gone:
            if self._ended is None:
                self._ended = Bell()
            await self._ended.wait()

    async def close(self) -> None:
        """Cancel what is still being sent; idempotent."""
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
        """Sends what there is; the last of it closes the answer."""
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
        except OSError:  # how some servers say that the client is gone; others only answer `receive`
            self._lose()
        except Exception as failure:
            self.failure = failure
            self._lose()
        finally:
            self._task = None
            if self._ended is not None:
                self._ended.ring()

    async def _deliver(self, message: Message) -> None:
        self._write = message
        try:
            await self._send(message)
        finally:
            self._write = None

    def _take(self) -> bytes:
        """What is sent next: all frames, or the first of them where they are long."""
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
        """Forget what waits, for ever."""
        self._gone = True
        self._frames.clear()
        self._waiting_bytes = 0
        if self._space is not None:
            self._space.set()
            self._space = None
        if self._ended is not None:
            self._ended.ring()


class _KeepAlive:
    """Puts a comment whenever so much time passes without a frame."""

    def __init__(self, writer: EventWriter, period_s: float) -> None:
        self._writer = writer
        self._period_s = period_s
        self._now = loop_clock()
        self._due_s = self._now() + period_s
        self.cancel = call_later(period_s, self._ring)

    def postpone(self) -> None:
        """A frame was put."""
        self._due_s = self._now() + self._period_s

    def _ring(self) -> None:
        if self._due_s - self._now() <= _CLOCK_S:
            if self._writer.write is None:
                self._writer.committed = True
                self._writer.put(_KEEP_ALIVE)
            self.postpone()
        self.cancel = call_later(max(self._due_s - self._now(), 0.0), self._ring)
