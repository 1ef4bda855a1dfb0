"""Exchange: one request to a server, and its answer as it comes; a stop or a kill ends every wait.

The events of a streamed completion -> items of an engine, with the number of tokens each brought. Pure.

How many tokens a chunk holds: as many as it has ids for; else as the running total grew; else one where it has text.
What a total has beyond these, as that at the end may, comes where it is said.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import anyio
import httpx2

from pipeline import Cancelled, Control, InvalidArgument
from pipeline.errors import Disconnected, InvalidMessage, StreamIncomplete
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, RoutingData, TimingInfo, WorkerIdInfo
from pipeline.wire import SSEDecoder, SSEMessage, from_json, from_plain

from .client import Client
from .errors import of_frame

T = TypeVar("T")

_BODY_MAX_BYTES = 4 * 1024 * 1024
_TAIL_S = 0.2
"""How long the end of a body may take to follow the end of its answer, for the connection to be used again."""


class Exchange:
    """One request and its answer.

    Every wait raises Cancelled once the request is stopped or killed, and what `Client.problem` says. Leaving the block
    closes the connection unless the answer was read to its end: so the server hears that nobody waits any more.
    """

    def __init__(self, client: Client, control: Control) -> None:
        self._client = client
        self._control = control
        self._parts: AsyncIterator[bytes] | None = None
        self._has_connected = self._has_sent = False
        self._scope: anyio.CancelScope | None = None
        self._forget: Callable[[], None] | None = None
        self.content_type = ""
        """Of the answer, without its parameters; in lower case."""
        self.is_whole = False
        """Whether the answer has been read to the end that its head promised."""

    async def __aenter__(self) -> Self:
        self._client.in_flight += 1
        self._forget = self._control.on_stop(self._cut)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._forget is not None:
            self._forget()
        try:
            await self._close()
        finally:
            self._client.in_flight -= 1

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> int:
        """Sends the request; the status of the answer. One that a kept connection did not take goes out again.

        Raises Disconnected where the client is closed.
        """
        http = self._client.http
        asked = http.build_request(method, path, headers=headers, content=body, extensions={"trace": self._trace})
        while True:
            if http.is_closed:
                raise Disconnected("the connections to the server were closed")
            self._has_connected = self._has_sent = False
            try:
                answer = await self._wait(lambda: http.send(asked, stream=True))
            except Disconnected:
                if self._has_connected or not self._has_sent:
                    raise
            else:
                break
        self._parts = answer.aiter_raw()
        self.content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        return answer.status_code

    async def read(self) -> bytes:
        """What has come of the body; nothing once it has ended or the connection was closed."""
        parts = self._parts
        assert parts is not None, "nothing was asked"
        try:
            return await self._wait(lambda: anext(parts))
        except StopAsyncIteration:
            self.is_whole = True
        except Disconnected:
            self.is_whole = False
        return b""

    async def body(self) -> bytes:
        """The whole body, up to more than any message or list of models needs."""
        parts: list[bytes] = []
        while sum(map(len, parts)) < _BODY_MAX_BYTES and (data := await self.read()):
            parts.append(data)
        return b"".join(parts)

    async def finish(self) -> None:
        """The answer is complete; reads what is still to come before the connection can be used again."""
        if self._parts is None or self._control.is_stopped:
            return
        with suppress(httpx2.TransportError):  # there is nothing left to lose
            with anyio.CancelScope(deadline=anyio.current_time() + _TAIL_S) as self._scope:
                async for _ in self._parts:
                    pass

    async def _wait(self, wait: Callable[[], Awaitable[T]]) -> T:
        if not self._control.is_stopped:
            with anyio.CancelScope() as self._scope:
                try:
                    return await wait()
                except httpx2.TransportError as error:
                    raise self._client.problem(error) from error
        raise Cancelled("the request was stopped")

    async def _close(self) -> None:
        """Ends what is not read to its end by a read that is cancelled at once: that unwinds httpx2 from inside, and
        leaves none of its generators to the garbage collector, which on trio would warn of them."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        with suppress(httpx2.TransportError), anyio.CancelScope(shield=True) as scope:
            scope.cancel()
            async for _ in parts:
                pass

    def _cut(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _trace(self, event: str, info: Any) -> None:
        """httpx2 says what it does with the request: it went out, and on a new connection or on one that was kept."""
        self._has_connected |= event == "connection.connect_tcp.complete"
        self._has_sent |= event == "http11.send_request_headers.started"


UNKNOWN_TOKEN = 0
"""Stands for each token whose id the server does not say."""

_ERROR_EVENT = "error"
_EXCERPT = 80


class AnswerReader:
    """Reads one answer as its bytes arrive. The finish reason comes with the last item, however early it was said."""

    def __init__(self) -> None:
        self._events = SSEDecoder()
        self._tokens = 0
        self._reason: FinishReason | None = None
        self._usage: CompletionUsage | None = None
        self.is_done = False
        """Whether `[DONE]` was read."""

    def feed(self, data: bytes) -> Iterator[LLMEngineOutput]:
        """The items that are whole now. Raises what an error frame says, InvalidMessage for what is no chunk, and
        StreamIncomplete for an answer that is said to be done without having been finished."""
        yield from self._take(self._events.feed(data))

    def end(self, *, whole: bool) -> Iterator[LLMEngineOutput]:
        """The items of what was begun, for nothing comes any more; raises unless it is done then, and as `feed`.

        `whole` says whether HTTP agrees that this is the end.
        """
        yield from self._take(self._events.finish())
        if self.is_done:
            return
        if whole:
            raise StreamIncomplete(f"the answer ended after {self._tokens} tokens without [DONE]")
        raise Disconnected(f"the connection was closed after {self._tokens} tokens of the answer")

    def _take(self, messages: list[SSEMessage]) -> Iterator[LLMEngineOutput]:
        for message in messages:
            yield from self._read(message)
        if self._events.is_done and not self.is_done:
            self.is_done = True
            yield self._last()

    def _read(self, message: SSEMessage) -> Iterator[LLMEngineOutput]:
        if message.event == _ERROR_EVENT:
            raise of_frame(_plain(message.data, {"message": " ".join(message.comments)}), has_tokens=self._tokens > 0)
        if message.data is None:
            return
        chunk = _object(message.data)
        if chunk.get("error") or chunk.get("object") == "error":
            raise of_frame(chunk.get("error") or chunk, has_tokens=self._tokens > 0)
        try:
            output = self._output(chunk)
        except (InvalidArgument, AttributeError, TypeError, ValueError) as error:
            raise InvalidMessage(f"not a chunk of a completion: {_excerpt(message.data)}", cause=error) from error
        if output is not None:
            yield output

    def _output(self, chunk: dict[str, Any]) -> LLMEngineOutput | None:
        """The item of a chunk; None for one that says nothing."""
        choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
        nvext: dict[str, Any] = chunk.get("nvext") or {}
        text = choice.get("text") or ""
        if (usage := chunk.get("usage")) is not None:
            self._usage = from_plain(usage, CompletionUsage)
        if (reason := choice.get("finish_reason")) is not None:
            self._reason = _reason(reason)
        ids = nvext.get("completion_token_ids") or choice.get("token_ids")
        token_ids = from_plain(ids, list[int]) if ids else self._uncounted(bool(text), usage is not None)
        self._tokens += len(token_ids)
        routing = _routing(nvext)
        if not token_ids and not text and routing is None:
            return None
        return LLMEngineOutput(token_ids, text=text or None, routing_data=routing)

    def _uncounted(self, has_text: bool, has_total: bool) -> list[int]:
        """Tokens that a total has and no item had so far; without a total, or while it stays 0, one for a text."""
        total = self._usage.completion_tokens if has_total and self._usage is not None else 0
        return [UNKNOWN_TOKEN] * (max(0, total - self._tokens) if total else has_text)

    def _last(self) -> LLMEngineOutput:
        if self._reason is None:
            raise StreamIncomplete(f"the answer was done after {self._tokens} tokens without a finish reason")
        return LLMEngineOutput([], finish_reason=self._reason, completion_usage=self._usage)


def _object(data: str) -> dict[str, Any]:
    try:
        plain = from_json(data, cast("type[Any]", Any))
    except InvalidArgument as error:
        raise InvalidMessage(f"not a chunk of a completion: {_excerpt(data)}", cause=error) from error
    if not isinstance(plain, dict):
        raise InvalidMessage(f"not a chunk of a completion: {_excerpt(data)}")
    return plain


def _plain(data: str | None, otherwise: Any) -> Any:
    """What an error event says, wherever it says it."""
    if data is None:
        return otherwise
    try:
        plain = from_json(data, dict[str, Any])
    except InvalidArgument:
        return {"message": data}
    return plain.get("error") or plain


def _reason(text: str) -> FinishReason:
    """What engines say beyond the words we know, such as `tool_calls`, ends an answer like any stop."""
    if text == "error":
        return FinishReason.error("the server finished the answer with an error")
    try:
        return FinishReason.parse(text)
    except ValueError:
        return FinishReason.STOP


def _routing(nvext: dict[str, Any]) -> RoutingData | None:
    worker, timing = nvext.get("worker_id"), nvext.get("timing")
    if worker is None and timing is None:
        return None
    return RoutingData(
        timing=None if timing is None else from_plain(timing, TimingInfo),
        worker_id=None if worker is None else from_plain(worker, WorkerIdInfo),
    )


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…")
