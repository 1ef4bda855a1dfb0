"""A tiny Llama with fixed random weights in fp32, as a folder that vLLM and Penstock load.

The folder is written without torch and without a download. The same arguments write the same weights, so two servers
over it give the same greedy answer. fp32, because in bf16 a prompt that is computed again may be continued differently
where two logits are close.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from attrs import frozen
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
BYTES_A_TOKEN = 4096
"""Bytes of the KV cache for a token: keys and values of 4 layers, 2 heads of 64 each, in fp32."""


@frozen
class TinyLlama:
    """The shape of the model: 6.6 million parameters."""

    layers: int = 4
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 8192
    context_length: int = 8192

    def write(self, folder: Path, *, seed: int = 0) -> Path:
        """Write configuration, weights, tokenizer and chat template into the folder, and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        _tokenizer(self.vocabulary).save(str(folder / "tokenizer.json"))
        write_safetensors(folder / "model.safetensors", dict(self._weights(seed)))
        for name, content in self._documents():
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        return folder

    def _weights(self, seed: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Yield each tensor by its name in transformers' Llama."""
        random = np.random.default_rng(seed)

        def drawn(*shape: int, deviation: float) -> np.ndarray[Any, Any]:
            return (random.standard_normal(shape) * deviation).astype(np.float32)

        # Answers stay varied and logits apart: with the usual 0.02 a model of this size repeats one token.
        scale = self.hidden**-0.5
        yield "model.embed_tokens.weight", drawn(self.vocabulary, self.hidden, deviation=1.0)
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            yield f"{name}.input_layernorm.weight", np.ones(self.hidden, np.float32)
            yield f"{name}.post_attention_layernorm.weight", np.ones(self.hidden, np.float32)
            for projection, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                weight = drawn(heads * self.head_dim, self.hidden, deviation=scale)
                yield f"{name}.self_attn.{projection}_proj.weight", weight
            yield f"{name}.self_attn.o_proj.weight", drawn(self.hidden, self.heads * self.head_dim, deviation=scale)
            for projection in ("gate", "up"):
                yield f"{name}.mlp.{projection}_proj.weight", drawn(self.intermediate, self.hidden, deviation=scale)
            yield f"{name}.mlp.down_proj.weight", drawn(self.hidden, self.intermediate, deviation=scale)
        yield "model.norm.weight", np.ones(self.hidden, np.float32)
        yield "lm_head.weight", drawn(self.vocabulary, self.hidden, deviation=scale)

    def _documents(self) -> Iterator[tuple[str, dict[str, Any]]]:
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        tokens = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
        yield (
            "config.json",
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "vocab_size": self.vocabulary,
                "max_position_embeddings": self.context_length,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "torch_dtype": "float32",
                **ends,
            },
        )
        yield "generation_config.json", ends
        yield "special_tokens_map.json", tokens
        yield (
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": self.context_length,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
                "add_bos_token": False,
                **tokens,
            },
        )


def _tokenizer(vocabulary: int) -> Tokenizer:
    """A byte-level BPE of fixed merges: pairs of letters, then pairs with a third letter, until there are enough."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet]
    pairs = [(first, second) for first in ascii_lowercase for second in ascii_lowercase]
    triples = (("".join(pair), letter) for letter in ascii_lowercase for pair in pairs)
    merges = list(islice(chain(pairs, triples), vocabulary - len(tokens)))
    tokens += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write fp32 tensors in the format of safetensors: length of the header, header as JSON, data in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
