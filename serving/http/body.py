"""The body of a request: read within limits, then parsed to a record.

Its size and its JSON are counted while it arrives, so a body beyond a limit is refused before the rest of it is read. A
short body is parsed on the event loop, a long one in a worker thread.

Source: dynamo lib/llm/src/http/service/openai.rs. Other than there, bodies are refused while they arrive, not after.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from anyio.lowlevel import RunVar, checkpoint
from attrs import define, field, frozen
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from operators.text import check_counts
from pipeline import InvalidArgument, ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest
from pipeline.threads import GiveUp, WorkThreads
from pipeline.wire import WINDOW, JsonSize, from_plain, plain_from_json, plain_from_long_json

from ..limits import HttpLimits
from ..problems import Refusal
from .options import HttpOptions
from .request import RequestHeaders

T = TypeVar("T")

_MB = 1024 * 1024
_SMALL_BYTES = 16 * 1024
"""A body up to this size costs less to decode than to count; only its brackets are counted."""
_TURN_BYTES = 8 * WINDOW
"""Bytes counted in one turn of the loop; a server rarely delivers more at once."""
_SHORT_BYTES, _SHORT_PARTS, _SHORT_VALUES = 512 * 1024, 1_000, 10_000
"""Any body within all three is decoded, checked and converted in about 5 ms."""
_LENGTH = re.compile(r"[0-9]{1,20}")


@frozen
class Body:
    """A body that has arrived completely."""

    content: bytes | bytearray
    is_short: bool
    """Whether the event loop may parse it; a long body is parsed in a worker thread."""


async def read_body(headers: RequestHeaders, receive: Receive, limit_mb: int, limits: HttpLimits) -> Body:
    """Return the whole body.

    Raise Refusal (413) as soon as it is too long, InvalidArgument as soon as its JSON is beyond a limit, and
    ClientDisconnect if the client leaves.
    """
    arriving: ArrivingBody | None = None
    announced = _LENGTH.fullmatch(headers.values.get("content-length", ""))
    check_length(int(announced[0]) if announced else 0, limit_mb)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, is_last = message.get("body", b""), not message.get("more_body", False)
        if arriving is None:
            if is_last and is_small(part, limits):
                return Body(part, is_short=True)
            arriving = ArrivingBody(limit_mb, limits)
        await arriving.add(part)
        if is_last:
            return arriving.complete()


def check_length(size_bytes: int, limit_mb: int) -> None:
    """Raise Refusal (413) if a body of this size is too long."""
    if size_bytes > limit_mb * _MB:
        text = f"Request body exceeds the limit of {limit_mb} MB set by DYN_HTTP_BODY_LIMIT_MB"
        raise Refusal(413, text, exceeded=ExceededLimit("body_limit_mb", size_bytes / _MB, limit_mb))


def is_small(content: bytes | bytearray, limits: HttpLimits, most_bytes: int = _SMALL_BYTES) -> bool:
    """Return whether a JSON text is so short that it needs no count, and cannot be nested too deeply."""
    return len(content) <= most_bytes and not (0 < limits.max_json_depth < content.count(b"[") + content.count(b"{"))


@define
class ArrivingBody:
    """The part of a body that has arrived, within all limits so far."""

    _limit_mb: int
    _limits: HttpLimits
    _content: bytearray = field(factory=bytearray)
    _size: JsonSize = field(factory=JsonSize)
    _counted: int = 0
    """Bytes of the content that `_size` covers."""

    async def add(self, part: bytes) -> None:
        """Append the next bytes. Raise Refusal (413) if the body is too long, InvalidArgument for its JSON."""
        check_length(len(self._content) + len(part), self._limit_mb)
        with memoryview(part) as view:
            for at in range(0, len(part), WINDOW):
                self._content += view[at : at + WINDOW]
                if len(self._content) - self._counted >= WINDOW:
                    self._count()
                if at % _TURN_BYTES == _TURN_BYTES - WINDOW:
                    await checkpoint()

    def complete(self) -> Body:
        """Return the body after its last byte. Raise InvalidArgument if its JSON is beyond a limit."""
        content, limits = self._content, self._limits
        if not is_small(content, limits):
            self._count()
        size = self._size
        is_short = len(content) <= _SHORT_BYTES and size.parts <= _SHORT_PARTS and size.values <= _SHORT_VALUES
        return Body(content, is_short)

    def _count(self) -> None:
        """Count one more window."""
        with memoryview(self._content) as view:
            self._size.add(bytes(view[self._counted : self._counted + WINDOW]))
        self._counted += WINDOW
        check_json(self._size, self._limits)


def check_json(size: JsonSize, limits: HttpLimits, what: str = "JSON body", field: str = "") -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, if a JSON text is beyond a limit."""
    for name, value, threshold, counted in (
        ("max_json_values", size.values, limits.max_json_values, "values"),
        ("max_json_parts", size.parts, limits.max_json_parts, "strings, lists and objects"),
        ("max_json_depth", size.depth, limits.max_json_depth, "levels of lists and objects"),
    ):
        if 0 < threshold < value:
            text = f"Validation: The {what} must have at most {threshold} {counted}"
            raise InvalidArgument(text, field=field, exceeded=ExceededLimit(name, value, threshold))


def check_tool_arguments(request: object, limits: HttpLimits, pause: Callable[[], object]) -> None:
    """Raise InvalidArgument if the arguments of a chat's tool calls, as JSON, are beyond the limits of a body.

    Each is one string in the body; the chat template gets it as lists and objects.
    """
    if not isinstance(request, ChatCompletionRequest):
        return
    texts = [call.function.arguments for message in request.messages for call in message.tool_calls or ()]
    contents = [text.encode("utf-8", "replace") for text in texts]
    if sum(map(len, contents)) <= _SMALL_BYTES and all(is_small(content, limits) for content in contents):
        return
    size = JsonSize()
    for content in contents:
        size = JsonSize(size.values, size.parts)  # values and parts add up over all texts, depth does not
        for at in range(0, len(content), WINDOW):
            size.add(content[at : at + WINDOW])
            check_json(size, limits, "arguments of all tool calls", "messages")
            pause()


# -- parsing

_ONE_PIECE_BYTES = 256 * 1024
"""A body up to this size is decoded by one call, which takes a few milliseconds at most."""
_UNCOUNTED_BYTES = 4 * 1024
"""A body up to this size costs less to convert than to count. The checks of its record count it."""
_WORK_S, _REST_S = 0.002, 0.0002
"""How long a thread parses before it rests, and for how long, so that the loop's thread can run."""

DEFAULT_LIMITS, DEFAULT_REQUEST_LIMITS = HttpLimits(), RequestLimits()


class _Parser(WorkThreads):
    """The threads of one loop, and the bytes of the bodies in them and before them."""

    size_bytes = 0


_parser: RunVar[_Parser] = RunVar("penstock.parser")


class TooMuchToParse(ResourceExhausted):
    """The long bodies in and before the threads hold as many bytes as they may. `retry_after_s`: when to retry."""

    retry_after_s = 1.0


async def parse_body(body: Body, kind: type[T], options: HttpOptions) -> T:
    """Return the record in a body. Raise what `parse` raises.

    Cancelling the caller returns at once; the thread ends soon after. Raise TooMuchToParse if the bodies that are
    parsed or queued, including those of clients that have left, hold more than `max_body_bytes_in_flight`.
    """
    limits = options.limits
    work = partial(parse, body.content, kind, limits, options.request_limits)
    if body.is_short:
        return work()
    if (parser := _parser.get(None)) is None:
        _parser.set(parser := _Parser(limits.parser_threads))
    size_bytes, limit_bytes = len(body.content), limits.max_body_bytes_in_flight
    if 0 < limit_bytes < (found := parser.size_bytes + size_bytes):
        exceeded = ExceededLimit("max_body_bytes_in_flight", found, limit_bytes)
        raise TooMuchToParse("too much waits to be parsed", exceeded=exceeded)
    parser.size_bytes += size_bytes
    try:
        return await parser.run(lambda give_up: work(pause=_Pause(give_up)))
    finally:
        parser.size_bytes -= size_bytes


class _Pause:
    """Called between pieces of work in a thread. Every few milliseconds it lets the loop's thread run, or gives up."""

    def __init__(self, give_up: GiveUp) -> None:
        self._give_up = give_up
        self._rests_at_s = 0.0

    def __call__(self) -> None:
        if time.monotonic() >= self._rests_at_s:
            self._give_up()
            time.sleep(_REST_S)  # Python would let the waiting thread run only after 5 ms
            self._rests_at_s = time.monotonic() + _WORK_S


def parse(
    body: bytes | bytearray,
    kind: type[T],
    limits: HttpLimits = DEFAULT_LIMITS,
    request_limits: RequestLimits = DEFAULT_REQUEST_LIMITS,
    pause: Callable[[], object] = lambda: None,
) -> T:
    """Return the record in the body. JSON with small faults is repaired once, unless it is too long.

    Raise InvalidArgument that names the field, with the limit in `exceeded` if the request is beyond one. `pause` is
    called often while a long body is decoded.
    """
    try:
        plain = _decode(body, limits.max_repaired_bytes, pause)
        if is_small(body, limits, _UNCOUNTED_BYTES):
            return from_plain(plain, kind)
        if type(plain) is dict:
            check_counts(plain.get, request_limits)
        request = from_plain(plain, kind)
        check_tool_arguments(request, limits, pause)
        return request
    except InvalidArgument as error:
        if error.exceeded is not None:
            raise
        text = f"Failed to deserialize the JSON body into the target type: {error.message}"
        raise InvalidArgument(text, field=error.field) from error


def _decode(body: bytes | bytearray, max_repaired_bytes: int, pause: Callable[[], object]) -> Any:
    decode = plain_from_json if len(body) <= _ONE_PIECE_BYTES else partial(plain_from_long_json, pause=pause)
    try:
        return decode(body)
    except InvalidArgument:
        if 0 < max_repaired_bytes < len(body) or (repaired := repair(body)) == body:
            raise
    return decode(repaired)


def repair(body: bytes | bytearray) -> bytes:
    """Return the JSON text with raw control characters in its strings escaped and invalid UTF-8 replaced.

    A few methods of `str` over the whole text do the work; none of them calls Python for each character.
    """
    # A decoded text never contains these halves of a surrogate pair, so they can stand for escaped quotes.
    text = body.decode("utf-8", "replace").replace("\\\\", _BACKSLASH).replace('\\"', _QUOTE)
    parts = text.split('"')
    inside = '"'.join(parts[1::2])
    for number in range(32):
        if (control := chr(number)) in inside:
            inside = inside.replace(control, f"\\u{number:04x}")
    parts[1::2] = inside.split('"') if len(parts) > 1 else []
    return '"'.join(parts).replace(_QUOTE, '\\"').replace(_BACKSLASH, "\\\\").encode()


_BACKSLASH, _QUOTE = "\ud800", "\ud801"
