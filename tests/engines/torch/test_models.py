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
    "OPT": SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.3},
    "Falcon": SIZES,
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


async def refusal(model: Any) -> str:
    """Return why the start of an engine of this model is refused."""
    with pytest.raises(InvalidArgument) as refused:
        async with as_engine(engine_of(model)):
            pytest.fail("it started")
    assert refused.value.field == "model_path"
    return str(refused.value)


@pytest.mark.parametrize(
    ("family", "sizes", "why"),
    [
        ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "no keys and values"),
        ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "cannot be computed in parts"),
        ("GPTNeo", {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["local"], 2]]}, "local"),
    ],
)
async def test_a_model_that_is_not_served_is_refused_by_name(family: str, sizes: dict[str, Any], why: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(vocab_size=128, **sizes)
    assert why in await refusal(getattr(transformers, f"{family}ForCausalLM")(config).eval())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_model_that_computes_otherwise_in_parts_is_refused_where_that_is_sure(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch: Any = pytest.importorskip("torch")
    model = model_of("Mistral").to(getattr(torch, dtype))
    plain = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda states, position_ids: plain(states, position_ids - position_ids[:, :1])
    if dtype == "float32":
        assert "computes other logits" in await refusal(model)
        return
    async with as_engine(engine_of(model)):
        assert "its answers may be wrong" in caplog.text
