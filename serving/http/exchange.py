"""Exchange: one request and its answer, as an event stream or as a whole, while the client is watched."""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup
from attrs import define
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

from pipeline.sse import DONE

from ..openai import Answer, Chunks
from .delivery import StreamDelivery, WholeDelivery
from .event_writer import EventWriter
from .generation import Generation
from .options import HttpOptions
from .problems import explain
from .reply import JSON_TYPE, STREAM_TYPE, reply, reply_headers


@define(eq=False)
class Exchange:
    """A generation with the two ends of its connection. `echo` is the request id the client sees again."""

    generation: Generation
    options: HttpOptions
    echo: str | None
    receive: Receive
    send: Send

    async def whole(self, answer: Answer) -> None:
        """Answers with one body. Raises what failed, or ClientDisconnect; nothing is sent then."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            self._watch(tasks)
            failure = await self.generation.run(WholeDelivery(answer))
            tasks.cancel_scope.cancel()
        self._raise_unanswered(failure)
        await reply(self.send, 200, reply_headers(JSON_TYPE, self.echo), answer.to_json())

    async def stream(self, chunks: Chunks) -> Exception | None:
        """Answers with events. Returns what failed after the first of them, which the client was told.

        Raises what failed before, or ClientDisconnect.
        """
        headers = reply_headers(STREAM_TYPE, self.echo)
        writer = EventWriter(self.send, headers, self.generation.lose_client, self.options.keep_alive_s)
        failures: list[Exception] = []
        begun = False
        async with anyio.create_task_group() as tasks:
            self._watch(tasks)
            tasks.start_soon(self._produce, writer, chunks, failures)
            begun = await writer.run()
            tasks.cancel_scope.cancel()
        failure = failures[0] if failures else None
        self._raise_unanswered(None if begun else failure)
        return failure

    async def _produce(self, writer: EventWriter, chunks: Chunks, failures: list[Exception]) -> None:
        """Fills the writer; a stream that has begun ends with `[DONE]` whatever happens."""
        failure = await self.generation.run(StreamDelivery(writer, chunks, chunks.form.prompts))
        if failure is not None:
            failures.append(failure)
        if self.generation.client_gone:
            writer.abandon()
        if failure is None or writer.committed:
            if failure is not None:
                writer.put(explain(failure, self.options.overload_status).frame())
            elif chunks.form.include_usage and self.generation.finished:
                writer.put(chunks.usage_frame())
            writer.put(DONE)
            writer.commit()
        writer.finish()

    def _watch(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self.generation.watch_client, self.receive)
        if self.options.silence_timeout_s is not None:
            tasks.start_soon(self.generation.watch_silence, self.options.silence_timeout_s)

    def _raise_unanswered(self, failure: Exception | None) -> None:
        if self.generation.client_gone:
            raise ClientDisconnect
        if failure is not None:
            raise failure
