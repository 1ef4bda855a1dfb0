"""One request to a server and its answer: Exchange sends and reads bytes, AnswerReader makes items of them.

`of_status` and `of_frame` make an error of the tree of a server's error answer, and of an error event.

A chunk holds as many tokens as it has ids; without ids as many as the running total grew; without a total one if it has
text. Tokens that only the total at the end has come with that total.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self, TypeVar

import anyio
import httpx2

from pipeline import Cancelled, Control, InvalidArgument, PenstockError
from pipeline.errors import (
    OVERLOADED,
    BackendCannotConnect,
    BackendResponseTimeout,
    BackendUnknown,
    Disconnected,
    InvalidMessage,
    ResourceExhausted,
    StatusError,
    StreamIncomplete,
    Unavailable,
)
from pipeline.protocols import CompletionUsage, FinishReason, LLMEngineOutput, RoutingData
from pipeline.wire import SSEDecoder, SSEMessage, from_json, from_plain

from .client import Client

T = TypeVar("T")

_BODY_MAX_BYTES = 4 * 1024 * 1024
_TAIL_S = 0.2
"""How long to wait for the end of a body after the end of its answer, so that the connection can be used again."""


class Exchange:
    """One request and its answer.

    Every wait raises Cancelled once the request is stopped or killed, and the errors of `Client.problem`. Leaving the
    block closes the connection, which shows the server that its client is gone, unless the answer was read to its end.
    """

    def __init__(self, client: Client, control: Control) -> None:
        self._client = client
        self._control = control
        self._parts: AsyncIterator[bytes] | None = None
        self._has_connected = self._has_sent = False
        self._scope: anyio.CancelScope | None = None
        self._forget: Callable[[], None] | None = None
        self.content_type = ""
        """Content type of the answer in lower case, without parameters."""
        self.is_whole = False
        """Whether the answer has been read to the end that its head promised."""

    async def __aenter__(self) -> Self:
        self._client.in_flight += 1
        self._forget = self._control.on_stop(self._cut)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._forget is not None:
            self._forget()
        try:
            await self._close()
        finally:
            self._client.in_flight -= 1

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> int:
        """Send the request and return the status of its answer. A request that a kept connection lost is sent again.

        Raise Disconnected if the client is closed.
        """
        http = self._client.http
        request = http.build_request(method, path, headers=headers, content=body, extensions={"trace": self._trace})
        while True:
            if http.is_closed:
                raise Disconnected("the connections to the server were closed")
            self._has_connected = self._has_sent = False
            try:
                answer = await self._wait(lambda: http.send(request, stream=True))
            except Disconnected:
                if self._has_connected or not self._has_sent:
                    raise
            else:
                break
        self._parts = answer.aiter_raw()
        self.content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        return answer.status_code

    async def read(self) -> bytes:
        """Return the next part of the body; empty once it has ended or the connection is closed."""
        parts = self._parts
        assert parts is not None, "nothing was sent"
        try:
            return await self._wait(lambda: anext(parts))
        except StopAsyncIteration:
            self.is_whole = True
        except Disconnected:
            self.is_whole = False
        return b""

    async def body(self) -> bytes:
        """Return the whole body, up to a size that no message or list of models needs."""
        parts: list[bytes] = []
        while sum(map(len, parts)) < _BODY_MAX_BYTES and (data := await self.read()):
            parts.append(data)
        return b"".join(parts)

    async def finish(self) -> None:
        """Read the rest of a complete answer, so that the connection can be used again."""
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
        """End an unfinished answer by a read that is cancelled at once.

        That unwinds httpx2 from inside: its generators do not reach the garbage collector, which on trio would warn.
        """
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
        """Called by httpx2 when it connects, and when it sends the request."""
        self._has_connected |= event == "connection.connect_tcp.complete"
        self._has_sent |= event == "http11.send_request_headers.started"


UNKNOWN_TOKEN = 0
"""Stands for each token whose id the server does not send."""

_ERROR_EVENT = "error"
_EXCERPT = 80


class AnswerReader:
    """Makes the items of one answer while its bytes arrive. The finish reason comes with the last item."""

    def __init__(self) -> None:
        self._events = SSEDecoder()
        self._tokens = 0
        self._reason: FinishReason | None = None
        self._usage: CompletionUsage | None = None
        self.is_done = False
        """Whether `[DONE]` was read."""

    def feed(self, data: bytes) -> Iterator[LLMEngineOutput]:
        """Yield the items that these bytes complete.

        Raise the error of an error event, InvalidMessage for an invalid chunk, and StreamIncomplete for `[DONE]`
        without a finish reason.
        """
        yield from self._take(self._events.feed(data))

    def end(self, *, whole: bool) -> Iterator[LLMEngineOutput]:
        """Yield the items that the end of the body completes. Raise as `feed`, and unless the answer is done.

        `whole`: whether the body ended as HTTP announced.
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
        """Return the item of a chunk, None for an empty one."""
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
        """Return tokens that a total has and no item had so far; without a total, or while it is 0, one for a text."""
        total = self._usage.completion_tokens if has_total and self._usage is not None else 0
        return [UNKNOWN_TOKEN] * (max(0, total - self._tokens) if total else has_text)

    def _last(self) -> LLMEngineOutput:
        if self._reason is None:
            raise StreamIncomplete(f"the answer was done after {self._tokens} tokens without a finish reason")
        return LLMEngineOutput([], finish_reason=self._reason, completion_usage=self._usage)


def _object(data: str) -> dict[str, Any]:
    try:
        return from_json(data, dict[str, Any])
    except InvalidArgument as error:
        raise InvalidMessage(f"not a chunk of a completion: {_excerpt(data)}", cause=error) from error


def _plain(data: str | None, otherwise: Any) -> Any:
    """Return the error in an event, which servers put into different places."""
    if data is None:
        return otherwise
    try:
        plain = from_json(data, dict[str, Any])
    except InvalidArgument:
        return {"message": data}
    return plain.get("error") or plain


def _reason(text: str) -> FinishReason:
    """Return the finish reason; an unknown word, such as `tool_calls`, counts as a stop."""
    if text == "error":
        return FinishReason.error("the server finished the answer with an error")
    try:
        return FinishReason.parse(text)
    except ValueError:
        return FinishReason.STOP


def _routing(nvext: dict[str, Any]) -> RoutingData | None:
    known = {name: value for name in ("timing", "worker_id") if (value := nvext.get(name)) is not None}
    return from_plain(known, RoutingData) if known else None


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…")


# -- errors

_MESSAGE_MAX = 300
"""Characters of a server's message that are kept."""

_OF_STATUS: dict[int, type[PenstockError]] = {
    429: ResourceExhausted,
    OVERLOADED: ResourceExhausted,
    503: Unavailable,
    502: BackendCannotConnect,
    504: BackendResponseTimeout,
}


def of_status(status: int, body: bytes) -> PenstockError:
    """Return the error of an answer with a status other than 200.

    Too many requests, overload and 503 are refusals; any other 4xx keeps its status.
    """
    return _error(status, f"HTTP {status}: {_message(body)}")


def of_frame(frame: Any, *, has_tokens: bool) -> PenstockError:
    """Return the error of an error event. After tokens it is a failure, whatever its status: nothing was refused."""
    code = frame.get("code") if isinstance(frame, dict) else None
    text = _text(frame) or "the answer ends with an error without a message"
    is_status = isinstance(code, int) and 400 <= code < 600
    return _error(code, text) if is_status and not has_tokens and isinstance(code, int) else BackendUnknown(text)


def _error(status: int, text: str) -> PenstockError:
    if (kind := _OF_STATUS.get(status)) is not None:
        return kind(text)
    return StatusError(text, status=status) if status < 500 else BackendUnknown(text)


def _message(body: bytes) -> str:
    """Return the message in a body of the usual forms, else its text."""
    try:
        text = _text(from_json(body, dict[str, Any]))
    except InvalidArgument:
        text = ""
    return text or _short(body.decode("utf-8", "replace")) or "no message"


def _text(plain: Any) -> str:
    """Return the message in an object, or in the object that is its `error`."""
    if isinstance(plain, dict):
        inner = plain.get("error")
        plain = _text(inner) if inner else next((plain[name] for name in ("message", "detail") if plain.get(name)), "")
    return _short(plain if isinstance(plain, str) else str(plain or ""))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_MAX else line[: _MESSAGE_MAX - 1] + "…"
