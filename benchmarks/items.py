"""What a stage costs an item: the floor is an async generator around an async generator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any

from pipeline import AsyncEngine, Context, Operator, ResponseStream, identity, link

from .measure import Result, best_of

ITEMS = 100_000
DEPTHS = (0, 4)


async def _source(count: int) -> AsyncGenerator[int, None]:
    for i in range(count):
        yield i


async def _pass(items: AsyncIterable[int]) -> AsyncGenerator[int, None]:
    async for item in items:
        yield item


class _Source(AsyncEngine[int, int]):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream(_source(request.payload), request)


class PassThrough(Operator[Any, Any, Any, Any]):
    """Touches every item and changes none: what any stage that looks at the stream pays at least."""

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return ResponseStream(self._items(stream), request, stream)

    async def _items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        async with stream:
            async for item in stream:
                yield item


async def _floor(depth: int) -> float:
    async def run() -> int:
        items: AsyncGenerator[int, None] = _source(ITEMS)
        for _ in range(depth):
            items = _pass(items)
        async for _ in items:
            pass
        return ITEMS

    return await best_of(run)


async def _through(stage: Operator[Any, Any, Any, Any], depth: int) -> float:
    graph = link(*[stage] * depth, _Source())

    async def run() -> int:
        async with await graph.generate(Context(ITEMS)) as stream:
            async for _ in stream:
                pass
        return ITEMS

    return await best_of(run)


async def _per_stage(kind: Callable[[int], Awaitable[float]]) -> float:
    shallow, deep = [await kind(depth) for depth in DEPTHS]
    return (deep - shallow) / (DEPTHS[1] - DEPTHS[0]) * 1e9


async def measure() -> list[Result]:
    floor = await _per_stage(_floor)
    touching = await _per_stage(lambda depth: _through(PassThrough(), depth))
    untouched = await _per_stage(lambda depth: _through(identity(), depth))
    return [
        Result("item through a stage that looks at it", touching, "ns", floor, "≤ 2 floors"),
        Result("item through a stage that does not touch the stream", untouched, "ns", floor, "0"),
    ]
