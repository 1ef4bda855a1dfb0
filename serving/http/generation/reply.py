"""The reply to one request: frames on their way to the client while the engine still generates.

    Generation ── take(output), annotate(item) ──► StreamedReply: a frame each
                                               ──► WholeReply: one JSON body at the end
        both: put(frame), room() ──► frames ── at once, or a task while the client reads slowly ──► client

Frames that are ready together leave in one write, a single frame leaves at once, and a client that does not read holds
its engine back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import anyio
from attrs import Factory, define, field

from pipeline import Annotated
from pipeline.errors import ExceededLimit
from pipeline.loop import Wakeup, clock
from pipeline.protocols import BackendOutput
from pipeline.wire import DONE, encode

from ...openai import Answer, Chunks, token_output
from ...problems import Refusal, explain
from ..request import JSON_HEADERS, FirstWriter, Headers, PartWriter
from ..side_task import TIMER_ERROR_S, SideTask, Work, call_later, call_soon, end

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

BUFFER_BYTES = 32 * 1024
"""Frames waiting above which the reader has to wait too."""

PIECE_BYTES = 64 * 1024
"""Most bytes of a write of more than one frame; a whole answer is put in frames that are no longer."""

_KEEP_ALIVE = b":\n\n"


@define(eq=False)
class ReplyWriter:
    """The frames of one answer on their way to one client.

    Nothing is sent before `commit`: until then the caller may still answer with an error status instead. With
    `write_first` and `write_part`, which write at once, a frame costs one call and no task; each call is a system call,
    so frames that begin or end an answer leave with all others of their turn. Without them, and while the client reads
    slowly, a task sends; it exists only while there is something to send, so an answer that waits costs none.

    For a client that does not read there are at most two buffers, the waiting frames and the write under way, each of
    `BUFFER_BYTES` and one more frame of each reader. The caller awaits `close` on every way out.
    """

    _send: Send
    _headers: Headers
    _on_gone: Callable[[], object]
    """Called if a write shows that the client is gone; all frames are then dropped."""
    _start: Callable[[Work], SideTask]
    """Starts the task that sends."""
    _keep_alive_s: float | None
    """After this time the writer commits by itself, and sends a comment whenever so much passes without a frame."""
    _write_first: FirstWriter | None = field(default=None, kw_only=True, alias="write_first")
    """Begins the answer, if the server can do that at once."""
    _write_part: PartWriter | None = field(default=None, kw_only=True, alias="write_part")
    """Continues it."""
    committed: bool = field(init=False, default=False)
    """Whether the status is 200, sent or about to be."""
    failure: Exception | None = field(init=False, default=None)
    """An error of the server's `send`, except that the client is gone."""
    _frames: list[bytes | memoryview] = field(init=False, factory=list)
    _waiting_bytes: int = field(init=False, default=0)
    _begun: bool = field(init=False, default=False)
    _finished: bool = field(init=False, default=False)
    _gone: bool = field(init=False, default=False)
    _is_due: bool = field(init=False, default=False)
    """Whether what waits leaves in the next turn of the loop."""
    _is_whole: bool = field(init=False, default=False)
    """Whether the last frame has left."""
    _task: SideTask | None = field(init=False, default=None)
    _write: Message | None = field(init=False, default=None)
    _space: anyio.Event | None = field(init=False, default=None)
    _ended: Wakeup | None = field(init=False, default=None)
    _keep_alive: _KeepAlive | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self._keep_alive_s is not None:
            self._keep_alive = _KeepAlive(self, self._keep_alive_s)

    @property
    def write(self) -> object:
        """The write under way, a different object each time; None while there is none."""
        return self._write

    def put(self, frame: bytes, *, alone: bool = True) -> bool:
        """Append a frame, which leaves in this turn of the loop or the next one, or after the commit.

        One that is not `alone` leaves with those that follow in this turn. Return whether the reader should await
        `room` before it takes the next item.
        """
        if self._keep_alive is not None:
            self._keep_alive.postpone()
        # Once per token: at once, if nothing waits before it and the client reads.
        write = self._write_part if alone and self._begun and self._task is None else None
        if write is not None and not (self._waiting_bytes or self._finished or self._gone):
            try:
                if write(frame):
                    return False
            except Exception as failure:
                self._fail(failure)
                return False
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        if self._task is None and self.committed:
            self._begin_to_send()
        return self._waiting_bytes >= BUFFER_BYTES

    def put_whole(self, parts: Iterable[bytes | bytearray], headers: Headers) -> None:
        """Append all parts of an answer, then commit and finish. `headers` replace those of the writer."""
        self._headers = headers
        for part in parts:
            view = memoryview(part)
            self._frames += [view[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]
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
        if self._is_due:
            self._drop()
        if self._task is not None:
            self._drop()
            task, self._task = self._task, None
            await end(task)

    # -- what leaves at once

    def _begin_to_send(self) -> None:
        """Let what waits leave, with all that follows in this turn."""
        if self._write_part is None or self._finished:
            self._send_waiting()
        elif not self._is_due:
            self._is_due = True
            call_soon(self._send_waiting)

    def _send_waiting(self) -> None:
        """Send what waits, at once or by a task."""
        self._is_due = False
        if self._gone or self._is_whole or self._task is not None:
            return
        if not self._wrote_waiting() and not self._gone:
            self._task = self._start(self._run())

    def _wrote_waiting(self) -> bool:
        """Return whether the server has taken what waits at once."""
        first, part = self._write_first, self._write_part
        if part is None or self._waiting_bytes > PIECE_BYTES:
            return False
        body, is_last = b"".join(self._frames), self._finished
        try:
            if self._begun:
                is_taken = part(body, is_last=is_last)
            else:
                is_taken = first is not None and first(self._headers, body, is_last=is_last)
        except Exception as failure:
            self._fail(failure)
            return False
        if is_taken:
            self._begun, self._write_first, self._is_whole = True, None, is_last
            self._frames.clear()
            self._waiting_bytes = 0
            self._make_room()
        return is_taken

    # -- the task

    async def _run(self) -> None:
        """Send the waiting frames; the last frame of a finished answer closes it."""
        is_last = False
        try:
            if not self._begun:
                self._begun = True
                self._write = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(self._write)
            while not is_last and (self._frames or self._finished):
                body = self._take()
                is_last = self._finished and not self._frames
                self._write = {"type": "http.response.body", "body": body, "more_body": not is_last}
                await self._send(self._write)
            self._is_whole = is_last
        except Exception as failure:
            self._fail(failure)
        finally:
            self._task = self._write = None
            if self._ended is not None:
                self._ended.wake()

    def _take(self) -> bytes:
        """Remove and return the next write: all frames, or the first of them if they are long."""
        count, size_bytes = len(self._frames), self._waiting_bytes
        if size_bytes > PIECE_BYTES:
            count, size_bytes = 1, len(self._frames[0])
            while count < len(self._frames) and size_bytes + len(self._frames[count]) <= PIECE_BYTES:
                size_bytes += len(self._frames[count])
                count += 1
        body = b"".join(self._frames[:count])
        del self._frames[:count]
        self._waiting_bytes -= size_bytes
        if self._waiting_bytes < BUFFER_BYTES:
            self._make_room()
        return body

    def _fail(self, failure: Exception) -> None:
        """Drop all, as a write has failed."""
        if not isinstance(failure, OSError):  # some servers raise it if the client is gone, others only from `receive`
            self.failure = failure
        self._drop()
        self._on_gone()

    def _drop(self) -> None:
        """Drop the waiting frames and all later ones."""
        self._gone = True
        self._frames.clear()
        self._waiting_bytes = 0
        self._make_room()
        if self._ended is not None:
            self._ended.wake()

    def _make_room(self) -> None:
        if self._space is not None:
            self._space.set()
            self._space = None


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


STREAM_HEADERS: Headers = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))
"""Shared by all streams; the edge adds the request id."""

_ITEM_BYTES = 40
"""Bytes of an item in a whole answer beside its text, with the id of its token, which clients may want."""

_CANDIDATE_BYTES = 128
"""Bytes of a token or candidate with its log probability (measured: 75 to 115 for a short one)."""


@define(eq=False)
class Reply(ReplyWriter, ABC):
    """The answer of one request, made of the items of all its prompts."""

    @abstractmethod
    def begin(self) -> None:
        """Called when one more prompt has its first item that is not an error."""

    @abstractmethod
    def take(self, output: BackendOutput, prompt: int) -> bool:
        """Add an item of that prompt. Return whether to await `room` before the next one."""

    def take_token(self, token_id: int, index: int | None, text: str, prompt: int) -> bool:
        """Add an item of one token and its text, and nothing else. Return as `take` does."""
        return self.take(token_output(token_id, index, text), prompt)

    @abstractmethod
    def annotate(self, item: Annotated[Any]) -> bool:
        """Add the event and comments of an item, without its data. Return as `take` does."""

    @abstractmethod
    def end(self, failure: Exception | None, *, finished: bool) -> None:
        """Complete the answer. `finished`: whether a choice has its finish reason."""


@define(eq=False)
class StreamedReply(Reply):
    """Server-sent events, which leave once no prompt can fail with a status any more."""

    _chunks: Chunks
    _overload_status: int
    """Status in the event of a refusal by overload."""
    _not_begun: int = field(init=False, default=Factory(lambda self: self._chunks.form.prompts, takes_self=True))
    """Prompts without an item."""

    def begin(self) -> None:
        self._not_begun -= 1
        if self._not_begun == 0:
            self.commit()

    def take(self, output: BackendOutput, prompt: int) -> bool:
        frame = self._chunks.frame(output, prompt)
        # Behind a finish reason mostly comes the end.
        return frame is not None and self.put(frame, alone=output.finish_reason is None)

    def take_token(self, token_id: int, index: int | None, text: str, prompt: int) -> bool:
        frame = self._chunks.token_frame(token_id, index, text, prompt)
        return frame is not None and self.put(frame)

    def annotate(self, item: Annotated[Any]) -> bool:
        frame = encode(item.transfer(None))
        return frame is not None and self.put(frame)

    def end(self, failure: Exception | None, *, finished: bool) -> None:
        """Put the failure or the usage, then `[DONE]`, which ends every stream."""
        if failure is not None:
            self.put(explain(failure, self._overload_status).frame(), alone=False)
        elif self._chunks.form.include_usage and finished:
            self.put(self._chunks.usage_frame(), alone=False)
        self.put(DONE, alone=False)
        self.commit()
        self.finish()


@define(eq=False)
class WholeReply(Reply):
    """One JSON body. Annotations are left out. `take` raises Refusal (400) for an answer beyond the limit."""

    _answer: Answer
    _limit_bytes: float
    """Bytes of the answer at most, as it is held in memory."""
    _held_bytes: int = field(init=False, default=0)

    def begin(self) -> None:
        return

    def take(self, output: BackendOutput, prompt: int) -> bool:
        self._held_bytes += _ITEM_BYTES + len(output.text or "")
        if output.top_logprobs is not None or output.log_probs is not None:
            positions = output.top_logprobs or ()
            self._held_bytes += _CANDIDATE_BYTES * sum(1 + len(candidates) for candidates in positions)
            self._held_bytes += _CANDIDATE_BYTES * len(output.log_probs or ())
        if self._held_bytes > self._limit_bytes:
            limit = ExceededLimit("max_whole_answer_bytes", self._held_bytes, self._limit_bytes)
            raise Refusal(400, "The answer is too long for one piece: ask for a stream", "validation", exceeded=limit)
        self._answer.add(output, prompt)
        return False

    def annotate(self, item: Annotated[Any]) -> bool:
        return False

    def end(self, failure: Exception | None, *, finished: bool) -> None:
        """Put the whole body."""
        parts = self._answer.json_parts()
        self.put_whole(parts, [*JSON_HEADERS, (b"content-length", b"%d" % sum(map(len, parts)))])
