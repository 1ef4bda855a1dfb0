"""Tokenizers made on the spot: a byte-level one that is trained, and one with leading spaces and byte tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from operators import HuggingFaceTokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog, then stops", "naïve café, 日本語 and 한국어", "🙂👩‍👩‍👧 done"]
BOS, EOS = "<|begin|>", "<|end|>"


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    """A small byte-level vocabulary: many characters take several tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    text: str = tokenizer.to_str()
    return text


@pytest.fixture(scope="session")
def byte_level(byte_level_json: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(Tokenizer.from_str(byte_level_json))


@pytest.fixture(scope="session")
def word_pieces() -> HuggingFaceTokenizer:
    """Words that bring their leading space, and byte tokens for all that is no word."""
    words = ["<s>", "</s>", "▁Hello", "▁world", "▁", "a", "日"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=False))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return HuggingFaceTokenizer(tokenizer)


Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, byte_level_json: str) -> Folder:
    """Writes a model folder: a keyword for each file, double underscores for dots, dicts for JSON, None for no file."""

    def write(**files: Any) -> Path:
        path = tmp_path / "tiny-model"
        path.mkdir()
        for name, content in {"tokenizer__json": byte_level_json, **files}.items():
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
        return path

    return write
