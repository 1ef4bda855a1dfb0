"""TorchSettings: how large the batch and the KV cache of a TorchEngine are, and which part of a request it serves."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.settings import at_least, finite, one_of, setting

Role = Literal["aggregated", "prefill", "decode"]


@frozen(kw_only=True)
class TorchSettings:
    """Sizes and defaults of a TorchEngine. Raise InvalidArgument, naming the field, for one out of range."""

    group: ClassVar[str] = "Torch engine"

    max_num_seqs: int = setting(16, "Choices that are computed at the same time; more wait.", at_least(1))
    max_num_batched_tokens: int = setting(
        512, "Tokens of a step: first one for each running choice, then parts of prompts.", at_least(1)
    )
    block_size_tokens: int = setting(16, "Tokens of a KV block.", at_least(1))
    kv_cache_blocks: int | None = setting(
        None, "KV blocks of the cache; without it as many as kv_cache_bytes holds.", at_least(1)
    )
    kv_cache_bytes: int = setting(2**30, "Bytes of the KV cache.", at_least(1))
    context_length_tokens: int | None = setting(
        None, "Most tokens of a prompt and its answer; without it what the model allows.", at_least(1)
    )
    caches_prefixes: bool = setting(True, "Whether blocks of earlier requests are used again.")
    default_temperature: float = setting(
        0.0, "Temperature of requests that name none; at 0 the most likely token is taken.", finite(0)
    )
    role: Role = setting(
        "aggregated", "Part of a request that is served here.", one_of("aggregated", "prefill", "decode")
    )

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgument(
                f"must be at least max_num_seqs, {self.max_num_seqs}, got {self.max_num_batched_tokens}",
                field="max_num_batched_tokens",
            )
