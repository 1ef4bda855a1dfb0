"""One harness for the tests that end requests at random: how a reader ends a stream, and what must be closed then."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from hypothesis import strategies as st

from pipeline import Context, PenstockError, ResponseStream
from pipeline.testing import watch_streams

ENDINGS = ("read", "read", "stop", "kill", "close", "drop", "cancel", "unread")
BACKENDS = st.sampled_from(["asyncio", "trio"])


def seeds(most: int, endings: tuple[str, ...] = ENDINGS) -> st.SearchStrategy[list[tuple[int, str]]]:
    """Return up to so many requests: the seed of each, and how its reader ends it."""
    return st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(endings)), min_size=1, max_size=most)


@asynccontextmanager
async def all_closed(settle_s: float = 0) -> AsyncIterator[TaskGroup]:
    """Give a task group for the requests, and fail if a stream of theirs is open so long after the last has ended."""
    with watch_streams() as streams:
        async with anyio.create_task_group() as tasks:
            yield tasks
        gc.collect(0)
        await anyio.sleep(settle_s)
        for _ in range(20):
            await checkpoint()
        assert streams.open == []


@asynccontextmanager
async def ended(request: Context[Any], ending: str, after_s: float, cancel_after_s: float) -> AsyncIterator[None]:
    """Stop, kill or cancel the request in the block after a time, where that is its end. Its errors end the block."""
    async with anyio.create_task_group() as tasks:
        if ending in ("stop", "kill"):
            tasks.start_soon(later, getattr(request, ending), after_s)
        with anyio.move_on_after(cancel_after_s if ending == "cancel" else 60), suppress(PenstockError):
            yield


async def later(act: Callable[[], None], delay_s: float) -> None:
    """Call a function after so many seconds."""
    await anyio.sleep(delay_s)
    act()


async def read(
    stream: ResponseStream[Any],
    ending: str,
    after: int,
    request: Context[Any] | None = None,
    on_item: Callable[[Any], object] = lambda _: None,
) -> None:
    """Read a stream and end it in this way, where that is the reader's to do, after so many items.

    With the request, a stop or a kill is the reader's too.
    """
    if ending == "drop":
        with suppress(StopAsyncIteration):
            for _ in range(after):
                with anyio.move_on_after(1):
                    on_item(await stream.__anext__())
        return
    async with stream:
        if ending == "unread":
            return
        with anyio.move_on_after(30):  # and then it is closed
            seen = 0
            async for item in stream:
                assert request is None or not request.is_killed
                on_item(item)
                seen += 1
                if seen >= after and ending in ("close", "again"):
                    return
                if seen >= after and ending in ("stop", "kill") and request is not None:
                    getattr(request, ending)()
