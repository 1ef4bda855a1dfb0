"""ModelDeploymentCard: everything a front end must know to serve a model.

Source: dynamo lib/llm/src/model_card.rs, common/checked_file.rs, model_type.rs, worker_type.rs. Other than there, the
bytes the checksum covers are one canonical JSON text, so checksums of the two do not compare.
"""

from __future__ import annotations

import json
import re
from enum import Flag, StrEnum
from pathlib import PurePath
from typing import Any, ClassVar, Literal, Self

from attrs import define, evolve, field, frozen

from .field_rules import U32, InvalidRecord, never, null, skip
from .runtime_config import STABLE_ROUTING_ID as STABLE_ROUTING_ID
from .runtime_config import STOPS_PREFILLS as STOPS_PREFILLS
from .runtime_config import TOPOLOGY_TAINT_PREFIX as TOPOLOGY_TAINT_PREFIX
from .runtime_config import DisaggregatedEndpoint, ModelRuntimeConfig
from .runtime_config import topology_taint as topology_taint

__all__ = [
    "ByteLevel",
    "CheckedFile",
    "DisaggregatedEndpoint",
    "LoraInfo",
    "ModelDeploymentCard",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "TaggedFile",
    "WorkerType",
]

_CHECKSUM = re.compile(r"blake3:[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


# -- what a worker can do, and its role among the workers of its model


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


# -- the files a card names


@frozen
class CheckedFile:
    """A file by path or URL and the checksum of its content. Raises InvalidRecord for a checksum of another shape."""

    path: str
    """Where the worker has it."""
    checksum: str
    size: int | None = None
    """In bytes."""
    sha256: str | None = None
    """With `size` the name of the object under which other processes find the content; None: there is no object."""

    def __attrs_post_init__(self) -> None:
        if not _CHECKSUM.fullmatch(self.checksum):
            raise InvalidRecord("expected blake3: and 64 lower-case hex digits", "checksum")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise InvalidRecord("expected 64 lower-case hex digits", "sha256")

    def to_wire(self) -> dict[str, Any]:
        plain = {"path": self.path, "checksum": self.checksum, "size": self.size, "sha256": self.sha256}
        return {name: value for name, value in plain.items() if value is not None}

    @classmethod
    def from_wire(cls, value: Any) -> CheckedFile:
        """Raise InvalidRecord for anything but an object of path, checksum and, if they are given, size and sha256."""
        if not isinstance(value, dict):
            raise InvalidRecord("expected an object with path and checksum")
        for name in ("path", "checksum"):
            if not isinstance(value.get(name), str):
                raise InvalidRecord("expected a string", name)
        size = value.get("size")
        if size is not None and (type(size) is not int or size < 0):
            raise InvalidRecord("expected a number of bytes", "size")
        sha256 = value.get("sha256")
        if sha256 is not None and not isinstance(sha256, str):
            raise InvalidRecord("expected a string", "sha256")
        return cls(value["path"], value["checksum"], size, sha256)


@frozen
class TaggedFile:
    """A file and its kind: on the wire an object with the kind as its one key. Subclasses list the valid kinds.

    `is_custom` goes with kinds in `nested_kinds` only, whose file is one level deeper.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    nested_kinds: ClassVar[tuple[str, ...]] = ()
    kind_aliases: ClassVar[dict[str, str]] = {}

    kind: str
    file: CheckedFile
    is_custom: bool = False

    def __attrs_post_init__(self) -> None:
        if self.kind not in self.kinds:
            raise InvalidRecord("expected one of the kinds " + ", ".join(self.kinds))

    def to_wire(self) -> dict[str, Any]:
        if self.kind in self.nested_kinds:
            return {self.kind: {"is_custom": self.is_custom, "file": self.file.to_wire()}}
        return {self.kind: self.file.to_wire()}

    @classmethod
    def from_wire(cls, value: Any) -> Self:
        """Raise InvalidRecord for anything but one known kind with its file."""
        if not isinstance(value, dict) or len(value) != 1:
            raise InvalidRecord("expected an object with one of the keys " + ", ".join(cls.kinds))
        ((key, content),) = value.items()
        kind = cls.kind_aliases.get(key, str(key))
        if kind not in cls.nested_kinds:
            return cls(kind, _file_at(content, str(key)))
        if not isinstance(content, dict) or type(content.get("is_custom")) is not bool:
            raise InvalidRecord("expected an object with is_custom and file", str(key))
        return cls(kind, _file_at(content.get("file"), f"{key}.file"), content["is_custom"])


def _file_at(value: Any, place: str) -> CheckedFile:
    """Return the file in a wire value. Errors carry its place."""
    try:
        return CheckedFile.from_wire(value)
    except InvalidRecord as error:
        raise InvalidRecord(error.message, f"{place}.{error.field}".rstrip(".")) from None


class ModelInfoFile(TaggedFile):
    """The model's configuration."""

    kinds = ("hf_config_json",)


class TokenizerFile(TaggedFile):
    """The tokenizer."""

    kinds = ("hf_tokenizer_json", "tik_token_model")


class PromptFormatterFile(TaggedFile):
    """The chat template, alone or inside a tokenizer configuration."""

    kinds = ("hf_tokenizer_config_json", "hf_chat_template", "hf_chat_template_json")
    nested_kinds = ("hf_chat_template", "hf_chat_template_json")
    kind_aliases: ClassVar[dict[str, str]] = {"hf_chat_template_jinja": "hf_chat_template"}


class GenerationConfigFile(TaggedFile):
    """The model's own generation defaults."""

    kinds = ("hf_generation_config_json",)


# -- the card


@define(slots=True)
class LoraInfo:
    """The adapter a card is for."""

    name: str
    max_gpu_lora_count: U32 | None = None


@frozen
class ByteLevel:
    """The built-in model, whose tokens are bytes: what stands in place of its files."""

    chat_template: str
    """Jinja source."""
    checks_token_ids: bool = True
    """Whether a prompt of ids that are no bytes is refused before it is sent."""


@define(slots=True, eq=False)
class ModelDeploymentCard:
    """A model as one worker serves it. Two cards are equal exactly if what their checksum covers is.

    `needs` is a disjunction of conjunctions of worker types. A worker that `tokenizes` makes tokens of prompts itself,
    and gives the texts of its tokens; the card has no tokenizer then. `context_length` is the older place of the
    context length; read `effective_context_length`.
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
    byte_level: ByteLevel | None = None
    tokenizes: bool = skip(default=False)
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

    @property
    def files(self) -> tuple[TaggedFile | None, ...]:
        """The files of the model, by which it is known: None for each that it has not."""
        return (self.model_info, self.tokenizer, self.prompt_formatter, self.chat_template_file, self.gen_config)

    def with_projected_context(self) -> ModelDeploymentCard:
        """Return a copy for older readers: the older field holds the effective length, if there is any."""
        return evolve(self, context_length=self.effective_context_length or None)

    def checksum_content(self) -> bytes:
        """Return the fields that identify the model, as canonical bytes.

        Left out on purpose: runtime settings, user data, adapter, model type and input, and where files are.
        """
        content = {
            "name": self.display_name,
            "source": self.effective_source_path,
            "files": [None if tagged is None else tagged.file.checksum for tagged in self.files],
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
        if self.byte_level is not None:
            content["byte_level"] = [self.byte_level.chat_template, self.byte_level.checks_token_ids]
        if self.tokenizes:
            content["tokenizes"] = True
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
