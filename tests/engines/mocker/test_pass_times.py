"""When a mock engine's passes begin and end in simulated time, with all requests that have arrived by then."""

from __future__ import annotations

from typing import Any, TypeAlias

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs
from pipeline import AsyncEngine, Context
from pipeline.protocols import PreprocessedRequest, StopConditions
from pipeline.testing import run_in_virtual_time

Graph: TypeAlias = AsyncEngine[PreprocessedRequest, Any]

ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=4, max_num_batched_tokens=64)


class Steady:
    """Takes no time for prompts, and a constant time for a token."""

    def __init__(self, pass_ms: float) -> None:
        self.pass_ms = pass_ms

    def prefill_ms(self, batch: int, mean_prompt_tokens: int, mean_cached_tokens: int) -> float:
        return 0.0

    def decode_ms(self, batch: int, active_kv_tokens: int, total_kv_tokens: int, mean_context_tokens: int) -> float:
        return self.pass_ms


async def token_times_ms(graph: Graph, outputs: list[int], turns: int = 0) -> list[list[float]]:
    """When each token came, in ms, of requests that are sent one after the other, each as soon as the last has ended.

    In between so many turns of the loop go by, as in the stages of a graph.
    """
    times = []
    for output in outputs:
        for _ in range(turns):
            await checkpoint()
        request = PreprocessedRequest([1, 2, 3], stop_conditions=StopConditions(max_tokens=output))
        async with await graph.generate(Context(request)) as stream:
            times.append([anyio.current_time() * 1000 async for item in stream if item.ok().data.token_ids])
    return times


def times_of(pass_ms: float, *clients: list[int], turns: int = 0) -> list[list[list[float]]]:
    """Return the token times of several clients that use one engine at the same time."""
    found: dict[int, list[list[float]]] = {}

    async def note(graph: Graph, at: int) -> None:
        found[at] = await token_times_ms(graph, clients[at], turns)

    async def main() -> None:
        async with as_engine(MockEngine(ARGS, timing=Steady(pass_ms))) as graph, anyio.create_task_group() as tasks:
            for at in range(len(clients)):
                tasks.start_soon(note, graph, at)

    run_in_virtual_time(main, backend="asyncio")
    return [found[at] for at in range(len(clients))]


@pytest.mark.parametrize("turns", [0, 30])
def test_a_request_that_arrives_as_a_pass_ends_is_in_the_next_pass(turns: int) -> None:
    """A closed loop sends a request the moment another one ends, through as many stages as there may be."""
    long, short = times_of(20.0, [6], [2, 2], turns=turns)
    assert long == [pytest.approx([20, 40, 60, 80, 100, 120])]
    assert short == [pytest.approx([20, 40]), pytest.approx([60, 80])]


def test_passes_of_less_than_a_millisecond_take_their_time_too() -> None:
    assert times_of(0.3, [3, 2]) == [[pytest.approx([0.3, 0.6, 0.9]), pytest.approx([1.2, 1.5])]]


def test_passes_that_take_no_time_come_to_an_end() -> None:
    assert times_of(0.0, [5, 1]) == [[[0.0] * 5, [0.0]]]
