"""ModelDeploymentCard: everything a front end must know to serve a model.

Source: dynamo lib/llm/src/model_card.rs. Other than there, the bytes the checksum covers are one canonical JSON text,
so checksums of the two do not compare.

What a worker can do, and its role among the workers of its model.

Source: dynamo lib/llm/src/model_type.rs and worker_type.rs.
"""

from __future__ import annotations

import json
import re
from enum import Flag, StrEnum
from pathlib import PurePath
from typing import Any, Literal

from attrs import define, evolve, field

from ..field_rules import U32, InvalidRecord, never, null, skip
from .files import CheckedFile, GenerationConfigFile, ModelInfoFile, PromptFormatterFile, TokenizerFile
from .runtime_config import ModelRuntimeConfig


class ModelType(Flag):
    """What a worker can do. `Prefill` only marks a prefill worker and opens no surface."""

    Chat = 1
    Completions = 2
    Embedding = 4
    TensorBased = 8
    Prefill = 16
    Images = 32
    Audios = 64
    Videos = 128
    Realtime = 256
    Classify = 512
    Pooling = 1024

    def to_wire(self) -> str:
        """Return the names joined with `|`, in the order of the bits."""
        return "|".join(unit.name or "" for unit in self)

    @classmethod
    def from_wire(cls, value: Any) -> ModelType:
        """Raise InvalidRecord for anything but known names joined with `|`."""
        if not isinstance(value, str):
            raise InvalidRecord("expected model types joined with |")
        flags = cls(0)
        for name in filter(None, (part.strip() for part in value.split("|"))):
            if name not in cls.__members__:
                raise InvalidRecord("expected model types among " + ", ".join(cls.__members__))
            flags |= cls[name]
        return flags

    def names(self) -> list[str]:
        """Return the lower-case names in the order of the bits."""
        return ["tensor" if unit is ModelType.TensorBased else (unit.name or "").lower() for unit in self]

    def endpoints(self, *, anthropic: bool = False) -> list[str]:
        """Return the HTTP surfaces of these types; chat includes responses, and messages where these are enabled."""
        opened = [_ENDPOINTS[unit] for unit in self if unit in _ENDPOINTS]
        if ModelType.Chat in self:
            opened += ["responses", "messages"] if anthropic else ["responses"]
        return opened


_ENDPOINTS = {
    ModelType.Chat: "chat_completions",
    ModelType.Completions: "completions",
    ModelType.Embedding: "embeddings",
    ModelType.Images: "images",
    ModelType.Audios: "audios",
    ModelType.Videos: "videos",
    ModelType.Realtime: "realtime",
    ModelType.Classify: "classify",
    ModelType.Pooling: "pooling",
}


class WorkerType(StrEnum):
    """A worker's role among the others of its model."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
    AGGREGATED = "aggregated"

    @classmethod
    def parse(cls, text: str) -> WorkerType:
        """Return the role a text names, whatever its case and surrounding blanks. Raise InvalidRecord for any other."""
        name = text.strip().lower()
        try:
            return cls(name)
        except ValueError:
            raise InvalidRecord("expected one of " + ", ".join(cls)) from None


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
        """Return a card with the slug of its name and nothing else."""
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
        """Return a copy for older readers: the older field holds the effective length, if there is any."""
        return evolve(self, context_length=self.effective_context_length or None)

    def checksum_content(self) -> bytes:
        """Return the fields that identify the model, as canonical bytes.

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
    """Return the name in lower-case letters, digits, `-` and `_`, as a key in discovery."""
    return re.sub(r"[^a-z0-9_-]", "_", name.lower()).lstrip("_")
