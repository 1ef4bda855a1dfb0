"""ModelDeploymentCard: everything a front end must know to serve a model.

Source: dynamo lib/llm/src/model_card.rs. Other than there, the bytes the checksum covers are one canonical JSON text,
so checksums of the two do not compare.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Any, Literal

from attrs import define, evolve, field

from .card_files import (
    CheckedFile,
    GenerationConfigFile,
    ModelInfoFile,
    PromptFormatterFile,
    TaggedFile,
    TokenizerFile,
)
from .model_type import ModelType, WorkerType
from .runtime_config import ModelRuntimeConfig
from .wire import U32, never, null, skip

ModelInput = Literal["Text", "Tokens", "Tensor"]


@define(slots=True)
class LoraInfo:
    """The adapter a card is for."""

    name: str
    max_gpu_lora_count: U32 | None = None


@define(slots=True, eq=False)
class ModelDeploymentCard:
    """A model as one worker serves it. Two cards are equal exactly if what their checksum covers is.

    `needs` is a disjunction of conjunctions of worker types. `context_length` is the older place of the context
    length; read `effective_context_length`.
    """

    display_name: str
    slug: str
    kv_cache_block_size: U32
    migration_limit: U32
    model_type: ModelType
    model_input: ModelInput
    source_path: str | None = None
    model_info: ModelInfoFile | None = null()
    tokenizer: TokenizerFile | None = null()
    prompt_formatter: PromptFormatterFile | None = None
    chat_template_file: PromptFormatterFile | None = None
    gen_config: GenerationConfigFile | None = None
    prompt_context: list[Any] | None = None
    architectural_max_context_length: U32 | None = None
    context_length: U32 | None = None
    worker_type: WorkerType | None = null()
    needs: list[list[WorkerType]] = field(factory=list)
    lora: LoraInfo | None = None
    aliases: list[str] = skip(factory=list)
    user_data: Any = None
    runtime_config: ModelRuntimeConfig = field(factory=ModelRuntimeConfig)
    tensor_model_config: Any = None
    media_decoder: Any = null()
    media_fetcher: Any = null()
    router_config: Any = None
    indexer_identity: Any = None
    extra_files: list[CheckedFile] = skip(factory=list)
    mdc_sum: str | None = never(init=False)

    @classmethod
    def named(
        cls,
        display_name: str,
        *,
        kv_cache_block_size: int,
        migration_limit: int = 0,
        model_type: ModelType = ModelType.Chat | ModelType.Completions,
        model_input: ModelInput = "Text",
    ) -> ModelDeploymentCard:
        """A card with the slug of its name and nothing else."""
        return cls(display_name, slugify(display_name), kv_cache_block_size, migration_limit, model_type, model_input)

    @property
    def effective_context_length(self) -> int:
        """In tokens: the worker's, else the architecture's, else the older field's, else 0. An explicit 0 counts."""
        known = (self.runtime_config.context_length, self.architectural_max_context_length, self.context_length)
        return next((length for length in known if length is not None), 0)

    @property
    def effective_source_path(self) -> str:
        return self.display_name if self.source_path is None else self.source_path

    @property
    def role(self) -> WorkerType:
        """The worker type; cards without one are prefill if marked so, else aggregated."""
        if self.worker_type is not None:
            return self.worker_type
        return WorkerType.PREFILL if ModelType.Prefill in self.model_type else WorkerType.AGGREGATED

    def with_projected_context(self) -> ModelDeploymentCard:
        """A copy for older readers: the older field holds the effective length, if there is any."""
        return evolve(self, context_length=self.effective_context_length or None)

    def checksum_content(self) -> bytes:
        """What makes this card this model, as canonical bytes.

        Left out on purpose: runtime settings, user data, adapter, model type and input, and where files are.
        """
        files = (self.model_info, self.tokenizer, self.prompt_formatter, self.chat_template_file, self.gen_config)
        content = {
            "name": self.display_name,
            "source": self.effective_source_path,
            "files": [None if tagged is None else tagged.file.checksum for tagged in files],
            "extra_files": sorted([PurePath(extra.path).name, extra.checksum] for extra in self.extra_files),
            "prompt_context": self.prompt_context,
            "context_length": self.effective_context_length,
            "kv_cache_block_size": self.kv_cache_block_size,
            "worker_type": self.worker_type,
            "needs": self.needs,
            "router_config": self.router_config,
            "indexer_identity": self.indexer_identity,
        }
        if self.aliases:
            content["aliases"] = self.aliases
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelDeploymentCard):
            return NotImplemented
        return self.checksum_content() == other.checksum_content()

    def __hash__(self) -> int:
        return hash(self.checksum_content())


def slugify(name: str) -> str:
    """The name in lower-case letters, digits, `-` and `_`, as a key in discovery."""
    return re.sub(r"[^a-z0-9_-]", "_", name.lower()).lstrip("_")


__all__ = [
    "CheckedFile",
    "GenerationConfigFile",
    "LoraInfo",
    "ModelDeploymentCard",
    "ModelInfoFile",
    "ModelInput",
    "ModelType",
    "PromptFormatterFile",
    "TaggedFile",
    "TokenizerFile",
    "WorkerType",
    "slugify",
]
