"""A source that records how it was ended, and a kill that comes while it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio

from pipeline import Context


def assert_not_being_cancelled() -> None:
    """The task that reads is as it was: no cancellation is pending or counted."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio has no such count
        return
    assert task is not None
    assert task.cancelling() == 0


class Source:
    """Waits for ever behind its first item, and records how it was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def items(self) -> AsyncIterator[int]:
        try:
            yield 0
            await anyio.sleep_forever()
            yield 1
        except GeneratorExit:
            self.ended.append("closed")
            raise
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise


async def kill_soon(context: Context[Any], after_s: float = 1.0) -> None:
    await anyio.sleep(after_s)
    context.kill()
