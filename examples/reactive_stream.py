"""Use reactivex operators on a stream: synchronous ones with demand kept, timed ones on a scheduler.

python examples/reactive_stream.py
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio

from pipeline import Context, function_engine
from pipeline.rx import AnyIOScheduler, from_observable, ops, to_observable


@function_engine
async def counter(to: int) -> AsyncIterator[int]:
    for number in range(to):
        await anyio.sleep(0.01)
        yield number


def is_even(number: int) -> bool:
    return number % 2 == 0


def squared(number: int) -> int:
    return number * number


async def main() -> None:
    # One number is pulled and pushed through, what comes out is handed on: no task, no buffer. `take` ends the engine.
    stream = await counter.generate(Context(1_000_000))
    async with stream.rx(ops.filter(is_even), ops.map(squared), ops.take(5)) as squares:
        print([square async for square in squares])

    # Operators that take time run on a scheduler, and come back as a stream with a bounded buffer.
    async with AnyIOScheduler() as scheduler:
        context = Context(20)
        numbers = to_observable(await counter.generate(context), scheduler)
        batches = numbers.pipe(ops.buffer_with_time(0.1, scheduler=scheduler))
        async with from_observable(batches, context, buffer_items=8) as stream_of_batches:
            print(sum([len(batch) async for batch in stream_of_batches]), "numbers in batches")


if __name__ == "__main__":
    anyio.run(main)
