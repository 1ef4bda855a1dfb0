"""What routing does to conversations: cached prompt tokens and times to the first token, in virtual time, as a table.

    python -m benchmarks.conversations --workers 4 --conversations 200 --seed 7

Clients talk to mock workers through the graph that `penstock serve` runs. Every conversation begins with one of a few
system prompts and has several turns, each with the whole conversation before it and a pause in front. The caches of the
workers are smaller than all conversations together, so that it matters which worker gets which. The same seed gives the
same table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from statistics import fmean, quantiles

import anyio
from attrs import define, field, frozen
from rich.console import Console
from rich.table import Table

from operators.kv import KvRouterConfig
from pipeline import Context
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig, StandardGraph, standard_graph

SYSTEM_PROMPTS = 20
SYSTEM_CHARACTERS = (1024, 4096)
"""A character is a token of the byte-level model that is served."""
QUESTION_CHARACTERS = (128, 2048)
ANSWER_TOKENS = (32, 256)
TURNS = (3, 8)
ARRIVALS_PER_S = 8.0
THINKING_S = 10.0
CACHE_BLOCKS, BLOCK_TOKENS = 8192, 16
"""Of each worker: together they hold less than half of all conversations."""


@frozen
class Conversation:
    """When it begins, with what, and its turns: a question, and how long its answer is."""

    begins_s: float
    system: str
    turns: list[tuple[str, int, float]]


@define
class Measured:
    """What the answers of a run were."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(factory=list)
    ends_s: float = 0.0

    def row(self) -> Iterator[str]:
        times_ms = [1000 * seconds for seconds in self.first_token_s]
        cuts = quantiles(times_ms, n=100, method="inclusive")
        yield f"{self.cached_tokens / self.prompt_tokens:.3f}"
        yield from (f"{value:.1f}" for value in (fmean(times_ms), cuts[49], cuts[98]))
        yield f"{self.ends_s:.1f}"


def conversations(count: int, rng: Random) -> list[Conversation]:
    """Made up from the random numbers alone."""
    systems = [_text(rng, SYSTEM_CHARACTERS) for _ in range(SYSTEM_PROMPTS)]
    made, begins_s = [], 0.0
    for _ in range(count):
        begins_s += rng.expovariate(ARRIVALS_PER_S)
        turns = [
            (_text(rng, QUESTION_CHARACTERS), rng.randint(*ANSWER_TOKENS), rng.expovariate(1 / THINKING_S))
            for _ in range(rng.randint(*TURNS))
        ]
        made.append(Conversation(begins_s, rng.choice(systems), turns))
    return made


def _text(rng: Random, characters: tuple[int, int]) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(*characters)))


async def talk(talks: Sequence[Conversation], config: GraphConfig) -> Measured:
    """All of it through a graph of its own."""
    measured = Measured()
    async with standard_graph(config) as graph:
        begun_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for one in talks:
                tasks.start_soon(_converse, one, graph, measured, begun_s)
        measured.ends_s = anyio.current_time() - begun_s
    return measured


async def _converse(one: Conversation, graph: StandardGraph, measured: Measured, begun_s: float) -> None:
    await anyio.sleep_until(begun_s + one.begins_s)
    messages = [ChatMessage(role="system", content=one.system)]
    for question, tokens, thinking_s in one.turns:
        await anyio.sleep(thinking_s)
        messages.append(ChatMessage(role="user", content=question))
        request = ChatCompletionRequest(model="echo", messages=list(messages), max_tokens=tokens)
        messages.append(ChatMessage(role="assistant", content=await _answer(request, graph, measured)))


async def _answer(request: ChatCompletionRequest, graph: StandardGraph, measured: Measured) -> str:
    asked_s = anyio.current_time()
    texts: list[str] = []
    async with await graph.generate(Context(request)) as stream:
        async for item in stream:
            if (error := item.extract_error()) is not None:
                raise error
            if item.data is None:
                continue
            if item.data.text:
                if not texts:
                    measured.first_token_s.append(anyio.current_time() - asked_s)
                texts.append(item.data.text)
            if (usage := item.data.completion_usage) is not None:
                details = usage.prompt_tokens_details
                measured.prompt_tokens += usage.prompt_tokens
                measured.cached_tokens += 0 if details is None else details.cached_tokens or 0
    return "".join(texts)


def routers(workers: int, seed: int) -> dict[str, GraphConfig]:
    """The rows of the table, by name."""
    caches = {"num_gpu_blocks": str(CACHE_BLOCKS), "block_size": str(BLOCK_TOKENS)}
    common = partial(GraphConfig, engine="mocker", engine_args=caches, workers=workers, seed=seed)
    return {
        "round robin": common(router="round-robin"),
        "least loaded": common(router="least-loaded"),
        "KV, by events": common(router="kv"),
        "KV, by expected delay": common(router="kv", kv_router=KvRouterConfig(router_placement="expected_delay")),
        "KV, by marginal delay": common(router="kv", kv_router=KvRouterConfig(router_placement="marginal_delay")),
        "KV, approximate": common(router="kv", kv_router=KvRouterConfig(use_kv_events=False)),
    }


def table(workers: int, count: int, seed: int) -> Table:
    """A row for each way of routing the same conversations."""
    caches = f"{CACHE_BLOCKS} blocks of {BLOCK_TOKENS} tokens"
    shown = Table(title=f"{count} conversations, {workers} mock workers of {caches}, seed {seed}")
    for column in ("router", "hit rate", "mean TTFT ms", "p50", "p99", "virtual s"):
        shown.add_column(column, justify="left" if column == "router" else "right")
    talks = conversations(count, Random(seed))
    for name, config in routers(workers, seed).items():
        shown.add_row(name, *run_in_virtual_time(talk, talks, config, backend="asyncio").row())
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conversations", description="Routers on the same conversations."
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    Console(width=100).print(table(arguments.workers, arguments.conversations, arguments.seed))


if __name__ == "__main__":
    main()
