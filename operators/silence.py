"""Silence: gives up on a stream that brings nothing for too long."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import anyio

from pipeline import AnyContext, ResponseTimeout

T = TypeVar("T")


async def until_silent(
    items: AsyncIterator[T], request: AnyContext, timeout_s: float, source: str
) -> AsyncGenerator[T, None]:
    """The items; raises ResponseTimeout, naming the source, when the next is not there after `timeout_s`.

    Only waiting counts, not the time the reader takes. Once the request is stopped the stream ends instead. Costs a
    cancel scope for each item, so it is for those who ask for it. Whoever gave the items closes them.
    """
    ended: Any = object()
    while True:
        item = ended
        with anyio.move_on_after(timeout_s) as scope:
            item = await anext(items, ended)
        if scope.cancelled_caught and not request.is_stopped:
            raise ResponseTimeout(f"{source} sent nothing for {timeout_s:g} s")
        if item is ended:
            return
        yield item
