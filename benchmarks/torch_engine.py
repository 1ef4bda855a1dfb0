"""Tokens a second of TorchEngine beside transformers' continuous batching, on the same model.

    python -m benchmarks.torch_engine [--streams 1 4 8] [--rounds 5] [--threads 1] [--json FILE]

The model is a Llama of 4 layers, hidden 256, 2 KV heads of 64, with 6.6 million random weights in fp32, on the CPU. A
round is, for each number of streams, as many requests at a time as there are streams, of 128 prompt tokens and 64
greedy tokens each, one token a chunk. Both sides take turns in each round, and the figures are medians: tokens a
second, and tokens a second of CPU, which a busy machine disturbs less. A prompt is never used twice, so neither side
finds anything cached. The answers of the first round are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Any

from attrs import asdict, frozen

from engines import as_engine
from engines.torch import LoadedModel, TorchEngine, TorchSettings
from pipeline import Context
from pipeline.protocols import PreprocessedRequest, SamplingOptions, StopConditions

PROMPT_TOKENS = 128
ANSWER_TOKENS = 64
VOCAB = 8192

Ask = Callable[[list[int]], Awaitable[list[int]]]
"""Returns the answer to a prompt."""


@frozen
class Row:
    """The figures of one number of streams."""

    streams: int
    ours_tokens_per_s: float
    theirs_tokens_per_s: float
    ratio: float
    """Median of the ratios of the rounds, ours to theirs."""
    ours_tokens_per_cpu_s: float
    theirs_tokens_per_cpu_s: float
    cpu_ratio: float
    equal_answers: int
    """Answers of the first round that are the same on both sides; as many as there are streams."""


def model() -> Any:
    """Return the model; the same weights at each call."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        initializer_range=0.1,  # with smaller weights many logits are nearly equal, and the order of a sum decides
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(torch.float32).eval()


def ask_ours(stage: Any) -> Ask:
    """Return what sends a prompt to the engine."""

    async def ask(prompt: list[int]) -> list[int]:
        request = PreprocessedRequest(
            prompt,
            stop_conditions=StopConditions(max_tokens=ANSWER_TOKENS, ignore_eos=True),
            sampling_options=SamplingOptions(temperature=0.0),
        )
        async with await stage.generate(Context(request)) as stream:
            return [token async for item in stream if item.data is not None for token in item.data.token_ids]

    return ask


def ask_theirs(manager: Any) -> Ask:
    """Return what sends a prompt to transformers' manager."""
    numbers = count()

    async def ask(prompt: list[int]) -> list[int]:
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        name = f"r{next(numbers)}"

        def receive(result: Any) -> None:
            if result.is_finished() and not done.done():
                done.set_result(list(result.generated_tokens))

        manager.register_result_handler(name, receive)
        manager.add_request(prompt, request_id=name, max_new_tokens=ANSWER_TOKENS, streaming=True)
        return await done

    return ask


@frozen
class Timed:
    """One side's part of a round."""

    answers: list[list[int]]
    tokens_per_s: float
    tokens_per_cpu_s: float


async def timed(ask: Ask, prompts: list[list[int]]) -> Timed:
    """Send these prompts at the same time."""
    begun, cpu = perf_counter(), process_time()
    answers = await asyncio.gather(*map(ask, prompts))
    tokens = sum(map(len, answers))
    return Timed(answers, tokens / (perf_counter() - begun), tokens / (process_time() - cpu))


async def compare(ours: Ask, theirs: Ask, streams: int, rounds: int, random: Random) -> Row:
    """Return the row of one number of streams."""
    pairs: list[tuple[Timed, Timed]] = []
    equal = 0
    for number in range(rounds + 1):  # the first one warms up
        prompts = [[random.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
        order = (ours, theirs) if number % 2 else (theirs, ours)
        measured = {ask: await timed(ask, prompts) for ask in order}
        if number == 0:
            both = zip(measured[ours].answers, measured[theirs].answers, strict=True)
            equal = sum(mine == other for mine, other in both)
        else:
            pairs.append((measured[ours], measured[theirs]))
    return Row(
        streams,
        round(median(mine.tokens_per_s for mine, _ in pairs), 1),
        round(median(other.tokens_per_s for _, other in pairs), 1),
        round(median(mine.tokens_per_s / other.tokens_per_s for mine, other in pairs), 2),
        round(median(mine.tokens_per_cpu_s for mine, _ in pairs), 1),
        round(median(other.tokens_per_cpu_s for _, other in pairs), 1),
        round(median(mine.tokens_per_cpu_s / other.tokens_per_cpu_s for mine, other in pairs), 2),
        equal,
    )


async def measure(streams: list[int], rounds: int) -> list[Row]:
    """Return a row for each number of streams, with both sides running throughout."""
    transformers: Any = import_module("transformers")
    most = max(streams)
    blocks = most * (PROMPT_TOKENS + ANSWER_TOKENS) // 32 + most
    batching = transformers.ContinuousBatchingConfig(
        page_size=32, num_blocks=blocks, max_batch_tokens=512, use_cuda_graph=False, use_async_batching=False
    )
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
    own, other = model(), model()  # both before the manager's thread, which draws numbers too
    manager = other.init_continuous_batching(generation, batching)
    settings = TorchSettings(max_num_seqs=most, block_size_tokens=32, kv_cache_blocks=blocks)
    engine = TorchEngine(lambda report: LoadedModel(own, "benchmark"), settings)
    manager.start()
    try:
        async with as_engine(engine) as stage:
            ours, theirs, random = ask_ours(stage), ask_theirs(manager), Random(1)
            return [await compare(ours, theirs, each, rounds, random) for each in streams]
    finally:
        manager.stop(block=True)


def main() -> None:
    """Measure, print a table, and write it as JSON if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_module("torch").set_num_threads(options.threads)
    rows = asyncio.run(measure(options.streams, options.rounds))
    print("| streams | TorchEngine, tokens/s | transformers, tokens/s | ratio | of CPU | of CPU | ratio | equal |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        figures = [row.ours_tokens_per_s, row.theirs_tokens_per_s, row.ratio]
        figures += [row.ours_tokens_per_cpu_s, row.theirs_tokens_per_cpu_s, row.cpu_ratio, row.equal_answers]
        print("|", " | ".join([str(row.streams), *(f"{each:,}" for each in figures)]), "|")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
