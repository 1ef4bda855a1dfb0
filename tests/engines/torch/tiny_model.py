"""A tiny Llama with random weights, and what transformers alone makes of a prompt with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import anyio
import pytest

from engines.torch import LoadedModel, ReportProgress, TorchEngine, TorchSettings
from pipeline import Annotated, Context
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

VOCAB = 128
EOS = 3


@lru_cache(maxsize=4)
def tiny_model(seed: int = 0, dtype: str = "float32", *, is_plain: bool = False) -> Any:
    """Return the model, for the CPU, in evaluation mode. An engine changes its own; the plain one stays as it is."""
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        initializer_range=0.6,  # weights as large as that make tokens that differ
    )
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def loader(model: Any = None, *, eos: Sequence[int] = ()) -> Callable[[ReportProgress], LoadedModel]:
    """Return a load of that model, by default the tiny one."""
    return lambda report: LoadedModel(model or tiny_model(), "tiny", tuple(eos))


def tiny_engine(model: Any = None, *, eos: Sequence[int] = (), **settings: Any) -> TorchEngine:
    """Return an engine of that model; unless told otherwise with 256 blocks of 8 tokens, 8 choices, steps of 32."""
    sizes: dict[str, Any] = {
        "block_size_tokens": 8,
        "kv_cache_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    }
    return TorchEngine(loader(model, eos=eos), TorchSettings(**sizes | settings))


def plain_answer(prompt: Sequence[int], tokens: int, model: Any = None) -> list[int]:
    """Return the most likely tokens, one by one, with transformers' own cache."""
    torch: Any = pytest.importorskip("torch")
    model = model or tiny_model(is_plain=True)
    ids, cache, answer = list(prompt), None, list[int]()
    with torch.inference_mode():
        for _ in range(tokens):
            made = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = made.past_key_values
            ids = [int(made.logits[0, -1].argmax())]
            answer += ids
    return answer


def random_prompt(random: Random, low: int, high: int) -> list[int]:
    """Return a prompt of random tokens, of random length from `low` to `high`."""
    return [random.randrange(VOCAB) for _ in range(random.randint(low, high))]


async def chunks_of(engine: Any, request: PreprocessedRequest) -> list[LLMEngineOutput]:
    """Return the chunks of an answer; raise the error that ends it."""
    async with await engine.generate(Context(request)) as stream:
        items: list[Annotated[LLMEngineOutput]] = [item async for item in stream]
    if (error := items[-1].extract_error()) is not None:
        raise error
    return [item.data for item in items if item.data is not None]


async def tokens_of(engine: Any, request: PreprocessedRequest) -> list[int]:
    """Return the tokens of an answer; raise the error that ends it."""
    return [token for chunk in await chunks_of(engine, request) for token in chunk.token_ids]


async def answers_of(engine: Any, requests: list[PreprocessedRequest]) -> list[list[int]]:
    """Return the answers to requests that are sent at the same time."""
    answers: dict[int, list[int]] = {}

    async def ask(number: int) -> None:
        answers[number] = await tokens_of(engine, requests[number])

    async with anyio.create_task_group() as tasks:
        for number in range(len(requests)):
            tasks.start_soon(ask, number)
    return [answers[number] for number in range(len(requests))]
