"""Models of other forms than Llama's: windows of attention, one head for all, learned positions."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from engines import as_engine
from engines.torch import LoadedModel, TorchEngine, TorchSettings
from pipeline import InvalidArgument

from .tiny_model import answers_of, plain_answer, random_prompt, tokens_of
from .worlds import request_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": SIZES | {"num_key_value_heads": 2, "sliding_window": 12},
    "Qwen2": SIZES
    | {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "Gemma2": SIZES | {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 12},
    "GPT2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 256, "initializer_range": 0.3},
}


def model_of(family: str) -> Any:
    """Return a new model of a family, with the same weights each time."""
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    names = {"GPT2": "GPT2LMHeadModel"}
    return getattr(transformers, names.get(family, f"{family}ForCausalLM"))(config).eval()


def engine_of(model: Any, **settings: Any) -> TorchEngine:
    sizes: dict[str, Any] = {"block_size_tokens": 8, "kv_cache_blocks": 128, "max_num_seqs": 4}
    sizes |= {"max_num_batched_tokens": 16} | settings
    return TorchEngine(lambda report: LoadedModel(model, "tiny"), TorchSettings(**sizes))


@pytest.mark.parametrize("family", FAMILIES)
async def test_answers_in_batches_and_on_prefixes_equal_plain_decoding(family: str) -> None:
    random, plain = Random(1), model_of(family)
    prompts = [random_prompt(random, 5, 60) for _ in range(8)]
    wanted = [plain_answer(prompt, 12, plain) for prompt in prompts]
    async with as_engine(engine_of(model_of(family))) as engine:
        requests = [request_of(prompt, max_tokens=12) for prompt in prompts]
        assert await answers_of(engine, requests) == wanted
        assert await answers_of(engine, requests) == wanted


async def test_a_model_in_half_precision_answers() -> None:
    torch: Any = pytest.importorskip("torch")
    made = engine_of(model_of("Mistral").to(torch.bfloat16))
    async with as_engine(made) as engine:
        assert len(await tokens_of(engine, request_of(range(20), max_tokens=30))) == 30
        assert made.store.layout.dtype == "bfloat16"
        assert made.store.layout.bytes_per_token == 4 * 2 * 2 * 16 * 2


async def test_a_model_without_keys_and_values_is_refused() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=128, state_size=4)
    engine = engine_of(transformers.MambaForCausalLM(config).eval())
    with pytest.raises(InvalidArgument) as refused:
        async with as_engine(engine):
            pytest.fail("it started")
    assert refused.value.field == "model_path"
