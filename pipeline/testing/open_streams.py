"""A ledger of every stream in the process: which are open, and which were never brought to an end.

A stream is brought to an end by its close, or by a read that reaches its end or its error. Nothing else counts: not
its drop, the cancellation of its reader, or the end of its loop, which finalises its generator. Ends are recorded when
they happen, so a test may be judged after its loop has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import coroutine
from typing import Any
from weakref import WeakSet, ref

from .. import stream as _stream
from ..control import ReleaseOnce
from ..stream import ResponseStream


class OpenStreams:
    """Every stream made while it watches."""

    def __init__(self) -> None:
        self._seen: WeakSet[ResponseStream[Any]] = WeakSet()
        self._unclosed: dict[int, _Entry] = {}
        self.made = 0

    def __call__(self, stream: ResponseStream[Any]) -> None:
        self.made += 1
        self._seen.add(stream)
        entry = self._unclosed[self.made] = _Entry(stream)
        ended = partial(self._unclosed.pop, self.made, None)
        stream._owned = (*stream._owned, _OnClose(ended))
        stream.__anext__ = _Reader(stream, entry, ended)  # type: ignore[method-assign]

    @property
    def open(self) -> list[ResponseStream[Any]]:
        """Those that have neither ended nor been closed, and are still held."""
        return [stream for stream in self._seen if stream.is_open]

    @property
    def unclosed(self) -> list[str]:
        """A line for each that was neither closed nor read to its end or its error.

        Besides the open ones these are those that were dropped, and those that ended with their loop or with the
        cancellation of their reader. A stream that was closed later is not among them.
        """
        return [str(entry) for entry in self._unclosed.values()]


class _Entry:
    """A stream that has not been brought to an end, by weak reference."""

    __slots__ = ("_id", "_stream", "read")

    def __init__(self, stream: ResponseStream[Any]) -> None:
        self._id = stream.context.id
        self._stream = ref(stream)
        self.read = 0

    def __str__(self) -> str:
        stream = self._stream()
        if stream is None:
            state = "dropped"
        elif stream.is_open:
            state = "still open"
        else:
            state = "cut off with its reader or its loop"
        return f"stream of request {self._id!r} ({state} behind {self.read} items)"


class _OnClose(ReleaseOnce):
    """Runs its action when its stream is closed, and not when the stream is dropped."""

    def release_soon(self) -> None:
        pass


class _Reader:
    """A watched stream's `__anext__`."""

    __slots__ = ("_ended", "_entry", "_items", "_read")

    def __init__(self, stream: ResponseStream[Any], entry: _Entry, ended: Callable[[], object]) -> None:
        self._items, self._read, self._entry, self._ended = stream._items, stream.__anext__, entry, ended

    @coroutine  # a generator, since it does not warn if it is never awaited: nor does what stands here otherwise
    def __call__(self) -> Generator[Any, Any, Any]:
        try:
            item = yield from self._read().__await__()
        except Exception:
            if self._items.ag_frame is None:  # else the read itself was wrong, such as a second one at a time
                self._ended()
            raise
        self._entry.read += 1
        return item


@contextmanager
def watch_streams() -> Iterator[OpenStreams]:
    """Watch every stream made inside the block. Blocks may nest; the outer one misses the streams of the inner one."""
    watcher, before = OpenStreams(), _stream._opened
    _stream._opened = watcher
    try:
        yield watcher
    finally:
        _stream._opened = before
