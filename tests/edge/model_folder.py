"""A model folder whose tokenizer splits as Llama 3's does, and whose template is that of an ordinary chat model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model_folder(folder: Path) -> None:
    """Write its files: a token for each byte, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "</s>", "model_max_length": 8_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"max_position_embeddings": 8_000_000, "vocab_size": len(vocabulary), "eos_token_id": len(vocabulary) - 1}
    (folder / "config.json").write_text(json.dumps(config))
