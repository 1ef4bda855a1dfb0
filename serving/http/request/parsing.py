"""From a body to its record: a short one on the event loop, a long one in a worker thread.

Source: dynamo lib/llm/src/http/service/openai.rs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from anyio.lowlevel import RunVar

from operators.text import check_counts
from pipeline import InvalidArgument, ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.threads import GiveUp, WorkThreads
from pipeline.wire import from_plain, plain_from_json, plain_from_long_json

from ...limits import HttpLimits
from ..options import HttpOptions
from .body import Body, check_tool_arguments, is_small

T = TypeVar("T")

_ONE_PIECE_BYTES = 256 * 1024
"""A body up to this size is decoded by one call, which takes a few milliseconds at most."""
_UNCOUNTED_BYTES = 4 * 1024
"""A body up to this size costs less to convert than to count. The checks of its record count it."""
_WORK_S, _REST_S = 0.002, 0.0002
"""How long a thread parses before it rests, and for how long, so that the loop's thread can run."""

DEFAULT_LIMITS, DEFAULT_REQUEST_LIMITS = HttpLimits(), RequestLimits()


class _Parser:
    """The threads of one loop, and the bytes of the bodies in them and before them."""

    def __init__(self, threads: int) -> None:
        self.threads = WorkThreads(threads)
        self.size_bytes = 0


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
    parser, size_bytes = _parser_of_loop(limits.parser_threads), len(body.content)
    if 0 < limits.max_body_bytes_in_flight < parser.size_bytes + size_bytes:
        name, limit = "max_body_bytes_in_flight", limits.max_body_bytes_in_flight
        raise TooMuchToParse(
            "too much waits to be parsed", exceeded=ExceededLimit(name, parser.size_bytes + size_bytes, limit)
        )
    parser.size_bytes += size_bytes
    try:
        return await parser.threads.run(lambda give_up: work(pause=_Pause(give_up)))
    finally:
        parser.size_bytes -= size_bytes


def _parser_of_loop(threads: int) -> _Parser:
    try:
        return _parser.get()
    except LookupError:
        parser = _Parser(threads)
        _parser.set(parser)
        return parser


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
