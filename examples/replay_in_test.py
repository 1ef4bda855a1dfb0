"""Replay traffic through an operator of your own, in a test: five minutes of it in virtual time.

python examples/replay_in_test.py          or, with pytest, as any test
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engines import as_engine
from engines.mocker import MockEngine
from pipeline import AsyncEngine, Context, Operator, ResponseStream
from pipeline.errors import WorkerOverloaded
from pipeline.testing import run_in_virtual_time
from serving.replay import SyntheticLoad, report_text, run


class AtMost(Operator[Any, Any, Any, Any]):
    """Refuses a request while `limit` others are being answered."""

    def __init__(self, limit: int) -> None:
        self.limit, self.running = limit, 0

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        if self.running >= self.limit:
            raise WorkerOverloaded(f"{self.running} requests are being answered")
        stream = await next.generate(request)
        return ResponseStream(self._items(stream), request, stream)

    async def _items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        self.running += 1
        try:
            async with stream:
                async for item in stream:
                    yield item
        finally:
            self.running -= 1


@asynccontextmanager
async def at_most_two() -> AsyncIterator[AsyncEngine[Any, Any]]:
    async with as_engine(MockEngine()) as engine:
        yield AtMost(2) >> engine


async def test_what_is_not_refused_gets_its_first_token_soon() -> None:
    load = SyntheticLoad(input_tokens=3000, output_tokens=50, request_count=300, request_rate=1.0)
    report = await run(at_most_two, load.make())
    assert report.completed_requests + report.rejected_requests == 300
    assert report.ttft.p99 < 200
    print(report_text(report))


if __name__ == "__main__":
    run_in_virtual_time(test_what_is_not_refused_gets_its_first_token_soon)
