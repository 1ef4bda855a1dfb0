"""A model card from a model's folder. The one door of json5.

Source: dynamo lib/llm/src/model_card.rs, ModelDeploymentCard::load_from_disk.

Checksums of model cards and of the files they name. The one door of blake3.

Source: dynamo lib/llm/src/model_card.rs (mdcsum) and common/checked_file.rs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import json5
from attrs import evolve
from blake3 import blake3

from ..errors import InvalidArgument
from ..protocols.card import (
    CheckedFile,
    GenerationConfigFile,
    ModelDeploymentCard,
    ModelInfoFile,
    PromptFormatterFile,
    TaggedFile,
    TokenizerFile,
)
from ..protocols.field_rules import U32_MAX


def card_checksum(card: ModelDeploymentCard) -> str:
    """64 hex digits that two cards share exactly if they are equal; kept in the card once computed."""
    if (known := card.mdc_sum) is not None:
        return known
    card.mdc_sum = checksum = blake3(card.checksum_content()).hexdigest()
    return checksum


def file_checksum(path: Path) -> str:
    """Return the file's content as `blake3:<64 hex digits>`. Reads the whole file; OSError as reading raises it."""
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return f"blake3:{hasher.hexdigest()}"


def checked_file(path: Path) -> CheckedFile:
    """Return the file with its checksum and size."""
    return CheckedFile(str(path), file_checksum(path), path.stat().st_size)


F = TypeVar("F", bound=TaggedFile)

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def card_from_folder(folder: Path, *, kv_cache_block_size: int, display_name: str | None = None) -> ModelDeploymentCard:
    """Return the card of the model in `folder`: files, checksums and context length; other fields have their defaults.

    Reads every file it names. Raise InvalidArgument if there is no such folder or its configuration cannot be used;
    OSError as reading does.
    """
    if not folder.is_dir():
        raise wrong_file(folder, "is no folder")
    name = display_name or folder.resolve().name
    card = ModelDeploymentCard.named(name, kv_cache_block_size=kv_cache_block_size)
    return evolve(
        card,
        source_path=str(folder),
        model_info=_find(folder, ModelInfoFile, hf_config_json=CONFIG),
        tokenizer=_find(folder, TokenizerFile, hf_tokenizer_json="tokenizer.json", tik_token_model="tiktoken.model"),
        prompt_formatter=_find(folder, PromptFormatterFile, hf_tokenizer_config_json=TOKENIZER_CONFIG),
        chat_template_file=_find(
            folder,
            PromptFormatterFile,
            hf_chat_template="chat_template.jinja",
            hf_chat_template_json="chat_template.json",
        ),
        gen_config=_find(folder, GenerationConfigFile, hf_generation_config_json="generation_config.json"),
        architectural_max_context_length=architectural_context_length(folder),
    )


def _find(folder: Path, cls: type[F], **names: str) -> F | None:
    """Return the first of these files the folder has, as its kind."""
    for kind, name in names.items():
        if (path := folder / name).is_file():
            return cls(kind, checked_file(path))
    return None


def architectural_context_length(folder: Path) -> int | None:
    """Return the context length in tokens the model's own files give; 0 counts as none.

    Looked for in the configuration, its text part, then the tokenizer's configuration. Raise InvalidArgument for a
    configuration whose value is there and is no length.
    """
    config = read_object(folder / CONFIG)
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        length = part.get("max_position_embeddings", 0)
        if type(length) is not int or not 0 <= length <= U32_MAX:
            raise wrong_file(folder / CONFIG, "max_position_embeddings must be a number of tokens")
        if length:
            return length
    # Tokenizers without a limit have 10**30, so a value out of range is no error.
    limit = read_object(folder / TOKENIZER_CONFIG).get("model_max_length")
    return limit if type(limit) is int and 0 < limit <= U32_MAX else None


def wrong_file(path: Path, problem: str) -> InvalidArgument:
    """Return the error for a file of a model folder; its `field` is the file's name."""
    return InvalidArgument(f"{path}: {problem}", field=path.name)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, read leniently where plain JSON fails; empty if there is no file.

    Raise InvalidArgument that names the file if it holds anything else.
    """
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = json5.loads(text)
        except (ValueError, RecursionError) as error:
            raise wrong_file(path, "is not JSON") from error
    if not isinstance(value, dict):
        raise wrong_file(path, "must hold a JSON object")
    return value
