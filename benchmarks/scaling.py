"""What a request costs the machine by the number of workers: the graph a replay drives, over 8 to 1,000 of them.

    python -m benchmarks.scaling [--workers 8 64 1000] [--html FILE] [--json FILE]

Each worker has cached a system prompt that all have, and a conversation of its own, and each has two requests in
flight. Then requests for one token come one after the other, each the next turn of a conversation. What is given is
CPU time of this process, engine and request plane included, the median of some passes. Metrics are not exported.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import ClassVar, cast

import anyio
from attrs import evolve

from engines import EngineConfig, GenerateContext, KvEventPublisher, LLMEngine, PushSource
from operators.kv import KvRouterConfig, PromptBlocks
from pipeline import Context
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.protocols.kv import KvStored, StoredBlock
from serving.deployment import GraphConfig, HostOptions, TokenGraph, hosted_graph

WORKERS = (8, 16, 32, 64, 128, 256, 512, 1000)
BLOCK_TOKENS = 16
SYSTEM_BLOCKS, OWN_BLOCKS, NEW_BLOCKS = 16, 44, 4
IN_FLIGHT = 2
REQUESTS, PASSES = 100, 7

GRAPHS: Mapping[str, GraphConfig] = {
    "round robin": GraphConfig(router="round-robin", seed=1),
    "two choices": GraphConfig(router="p2c", seed=1),
    "least loaded": GraphConfig(router="least-loaded", seed=1),
    "KV, by events": GraphConfig(router="kv", seed=1),
    "KV, approximate": GraphConfig(router="kv", seed=1, kv_router=KvRouterConfig(use_kv_events=False)),
}

Costs = dict[str, list[tuple[int, float]]]


class HoldingEngine(LLMEngine):
    """Generate one token; a request for more of them then waits until it is closed. It has cached a conversation."""

    ends_on_kill: ClassVar[bool] = True
    made = count()

    def __init__(self, workers: int) -> None:
        self.number = next(self.made) % workers
        self.publishers: list[KvEventPublisher] = []

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(
            model="holding", kv_cache_block_size=BLOCK_TOKENS, total_kv_blocks=2**16, max_num_batched_tokens=8192
        )

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.stop_conditions.max_tokens != 1:
            yield LLMEngineOutput([1])
            await context.control.stopped()
        yield LLMEngineOutput([1], finish_reason=FinishReason.LENGTH)

    async def kv_event_sources(self) -> Sequence[PushSource]:
        return [PushSource(self.publishers.append)]

    def publish(self) -> None:
        """Publish what it has cached to the present subscribers."""
        blocks = PromptBlocks(conversation(self.number), BLOCK_TOKENS)
        pairs = zip(blocks.sequence_hashes, blocks.local_hashes, strict=True)
        for publisher in self.publishers:
            publisher.publish(KvStored(None, [StoredBlock(name, local) for name, local in pairs]))

    async def cleanup(self) -> None:
        """There is nothing to release."""


def conversation(number: int) -> list[int]:
    """Return the tokens of a conversation: the system prompt and more that only this one has."""
    own = range(2**20 + number * 2**12, 2**20 + number * 2**12 + OWN_BLOCKS * BLOCK_TOKENS)
    return [*range(SYSTEM_BLOCKS * BLOCK_TOKENS), *own]


def next_turn(number: int, turn: int, max_tokens: int) -> PreprocessedRequest:
    """Return a request that continues a conversation with tokens that no worker has cached."""
    begin = 2**24 + (number * 2**10 + turn) * NEW_BLOCKS * BLOCK_TOKENS
    tokens = [*conversation(number), *range(begin, begin + NEW_BLOCKS * BLOCK_TOKENS)]
    return PreprocessedRequest(
        model="holding", token_ids=tokens, stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True)
    )


async def request_us(config: GraphConfig) -> float:
    """CPU microseconds of a request through the graph of the config."""
    rng, turns = Random(7), count()
    async with hosted_graph(config, HostOptions()) as opened, AsyncExitStack() as held:
        for worker in opened.workers:
            cast(HoldingEngine, worker.engine).publish()
        await anyio.sleep(0.1)  # until the router has received it
        for turn in range(IN_FLIGHT):
            for number in range(config.workers):
                stream = await opened.tokens.generate(Context(next_turn(number, turn, 2)))
                held.push_async_callback(stream.aclose)
                await anext(stream)
        took = []
        for at in range(PASSES + 1):
            turn = IN_FLIGHT + next(turns)
            payloads = [next_turn(rng.randrange(config.workers), turn, 1) for _ in range(REQUESTS)]
            gc.collect()
            seconds = await _pass_s(opened.tokens, payloads)
            if at:  # the first is for warming up
                took.append(seconds / REQUESTS)
    return 1e6 * median(took)


async def _pass_s(graph: TokenGraph, payloads: Sequence[PreprocessedRequest]) -> float:
    begun_s = process_time()
    for payload in payloads:
        async with await graph.generate(Context(payload)) as stream:
            async for _ in stream:
                pass
    return process_time() - begun_s


def measure(workers: Sequence[int]) -> Costs:
    """Microseconds of a request by workers, for each graph; each in a loop of its own."""
    costs: Costs = {name: [] for name in GRAPHS}
    for number in workers:
        for name, config in GRAPHS.items():
            fleet = evolve(
                config, engine="benchmarks.scaling:HoldingEngine", engine_args={"workers": str(number)}, workers=number
            )
            cost_us = anyio.run(partial(request_us, fleet), backend_options={"use_uvloop": True})
            costs[name].append((number, cost_us))
            print(f"{name}, {number:,} workers: {cost_us:,.0f} µs a request", flush=True)
    return costs


def main() -> None:
    about = "Measures the cost of a request by workers."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=about)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, metavar="N")
    parser.add_argument("--html", type=Path, help="where a page with the chart is written")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    arguments = parser.parse_args()
    costs = measure(arguments.workers)
    if arguments.html is not None:
        from serving.replay.page import scaling_page

        arguments.html.write_text(scaling_page(costs, "CPU time of a request, µs"), encoding="utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(costs, indent=2) + "\n")


if __name__ == "__main__":
    main()
