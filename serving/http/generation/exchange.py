"""Exchange: one request and its answer, as an event stream or as a whole, while the client is watched."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

from pipeline import PenstockError, ResponseTimeout
from pipeline.errors import ExceededLimit
from pipeline.wire import DONE

from ...openai import Answer, Chunks
from ..gone import OnGone
from ..options import HttpOptions
from ..problems import Refusal, explain
from ..request import JSON_HEADERS, Headers
from ..side_task import SideTask, Work, end, task_starter
from ..time_limits import RequestClock
from .delivery import StreamDelivery, WholeDelivery
from .event_writer import EventWriter
from .generation import Generation

STREAM_HEADERS: Headers = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))


@define(eq=False)
class Exchange:
    """A generation with the two ends of its connection.

    The caller's own task reads the graph. Beside it one sends while there is something to send, and where the server
    does not call back by `on_gone` one waits for the client to go away. `look` ends what takes too long, as `patience`
    decides.
    """

    generation: Generation
    options: HttpOptions
    receive: Receive
    send: Send
    patience: RequestClock
    on_gone: OnGone | None = None
    _start: Callable[[Work], SideTask] = field(init=False, factory=task_starter)
    _watcher: SideTask | None = field(init=False, default=None)
    _forget: Callable[[], object] | None = field(init=False, default=None)
    _writer: EventWriter | None = field(init=False, default=None)
    _failure: Exception | None = field(init=False, default=None)

    async def whole(self, answer: Answer) -> None:
        """Answers with one body. Raises what failed, or ClientDisconnect; nothing is sent then."""
        self._watch()
        try:
            delivery = WholeDelivery(answer, self.options.limits.max_whole_answer_bytes)
            self._raise_unanswered(await self.generation.run(delivery))
            parts = answer.json_parts()
            headers = [*JSON_HEADERS, (b"content-length", b"%d" % sum(map(len, parts)))]
            self._writer = writer = self._make_writer(headers)
            writer.put_whole(parts)
            await writer.sent()
            self._raise_unanswered(None)
        finally:
            await self._close()

    async def stream(self, chunks: Chunks) -> Exception | None:
        """Answers with events. Returns what failed after the first of them, which the client was told.

        Raises what failed before, or ClientDisconnect.
        """
        self._writer = writer = self._make_writer(STREAM_HEADERS, self.options.keep_alive_s)
        self._watch()
        try:
            failure = await self.generation.run(StreamDelivery(writer, chunks, chunks.form.prompts))
            self._raise_unanswered(None if writer.committed else failure)
            self._put_tail(writer, chunks, failure)
            await writer.sent()
            self._raise_unanswered(None)
        finally:
            await self._close()
        return failure

    def check_time(self, now_s: float) -> None:
        """End the request if it has gone beyond a limit of time by now; called now and then."""
        generation, writer, patience = self.generation, self._writer, self.patience
        if generation.client_gone:
            return
        if writer is not None and patience.stalled_write(now_s, writer.write) is not None:
            self._lose_client()
        elif generation.is_complete:
            if patience.lasted_too_long(now_s) is not None:  # its end is being sent, too slowly to wait for
                self._lose_client()
        elif (limit := patience.lasted_too_long(now_s)) is not None:
            text = "The request took longer than the server allows"
            generation.cut(Refusal(504, text, "response_timeout", exceeded=limit))
        else:
            is_excused = generation.waits_for_client
            if (limit := patience.silence(now_s, generation.items, is_excused=is_excused)) is not None:
                generation.cut(_silent(limit))

    def _put_tail(self, writer: EventWriter, chunks: Chunks, failure: Exception | None) -> None:
        """Ends the stream: with `[DONE]`, whatever happened."""
        if failure is not None:
            writer.put(explain(failure, self.options.overload_status).frame())
        elif chunks.form.include_usage and self.generation.finished:
            writer.put(chunks.usage_frame())
        writer.put(DONE)
        writer.commit()
        writer.finish()

    def _make_writer(self, headers: Headers, keep_alive_s: float | None = None) -> EventWriter:
        return EventWriter(self.send, headers, self.generation.lose_client, self._start, keep_alive_s)

    def _watch(self) -> None:
        """Ends the request when its client goes away, from now on and until `_close`."""
        if self.on_gone is not None:
            self._forget = self.on_gone(self._notice_gone)
        else:
            self._watcher = self._start(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        try:
            while (await self.receive())["type"] != "http.disconnect":
                pass
        except Exception as failure:
            self._failure = failure
        self._notice_gone()

    def _notice_gone(self) -> None:
        """The client has gone; after a complete answer that is no loss."""
        if not self.generation.is_complete:
            self._lose_client()
        elif self._writer is not None:
            self._writer.abandon()

    def _lose_client(self) -> None:
        self.generation.lose_client()
        if self._writer is not None:
            self._writer.abandon()

    def _raise_unanswered(self, failure: Exception | None) -> None:
        """Raise what keeps the client from an answer, if anything does."""
        broken = self._failure
        if broken is None and self._writer is not None:
            broken = self._writer.failure
        if broken is not None:
            raise broken
        if self.generation.client_gone:
            raise ClientDisconnect
        if failure is not None:
            raise failure

    async def _close(self) -> None:
        if self._forget is not None:
            self._forget()
            self._forget = None
        if self._writer is not None:
            await self._writer.close()
        if self._watcher is not None:
            watcher, self._watcher = self._watcher, None  # it has this exchange, in a circle
            await end(watcher)


def _silent(limit: ExceededLimit) -> PenstockError:
    error = ResponseTimeout("the engine said nothing for too long")
    error.exceeded = limit
    return error
