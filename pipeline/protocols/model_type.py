"""What a worker can do, and its role among the workers of its model.

Source: dynamo lib/llm/src/model_type.rs and worker_type.rs.
"""

from __future__ import annotations

from enum import Flag, StrEnum
from typing import Any

from .wire import InvalidRecord


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
        """The names joined with `|`, in the order of the bits."""
        return "|".join(unit.name or "" for unit in self)

    @classmethod
    def from_wire(cls, value: Any) -> ModelType:
        """Raises InvalidRecord for anything but known names joined with `|`."""
        if not isinstance(value, str):
            raise InvalidRecord("expected model types joined with |")
        flags = cls(0)
        for name in filter(None, (part.strip() for part in value.split("|"))):
            if name not in cls.__members__:
                raise InvalidRecord("expected model types among " + ", ".join(cls.__members__))
            flags |= cls[name]
        return flags

    def names(self) -> list[str]:
        """The lower-case names in the order of the bits."""
        return ["tensor" if unit is ModelType.TensorBased else (unit.name or "").lower() for unit in self]

    def endpoints(self, *, anthropic: bool = False) -> list[str]:
        """The HTTP surfaces these types open; chat also opens responses, and messages where those are enabled."""
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
        """The role a text names, whatever its case and surrounding blanks. Raises InvalidRecord for any other."""
        name = text.strip().lower()
        try:
            return cls(name)
        except ValueError:
            raise InvalidRecord("expected one of " + ", ".join(cls)) from None
