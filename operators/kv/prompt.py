"""The blocks of a prompt, hashed as the router looks them up: with adapter, tenant, media and look-ahead.

The formula itself is `pipeline.llm.block_hash`. Source: dynamo lib/kv-router/src/protocols.rs, BlockHashOptions,
RequestExtraInfo and compute_block_hash_for_seq. Other than there, the options cannot change under hashes that were
computed: another option is another `PromptBlocks`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property

from attrs import define

from pipeline.llm import block_hash_array, hash_seed, media_hashes, sequence_hashes
from pipeline.protocols import BlockExtraInfo, MmObject, PreprocessedRequest

_PAD_BASE, _PAD_RANGE = 1_000_000, 1 << 30


@define(eq=False)
class PromptBlocks:
    """A prompt cut into blocks, which are hashed once, when they are first needed.

    The tokens must not change: the prompt of a request that grew is another one. Raises InvalidArgument for a block
    size below 1 and for a token that is not a u32.
    """

    token_ids: Sequence[int]
    block_size_tokens: int
    lora_name: str | None = None
    """The adapter, on which the hashes depend; empty for none."""
    cache_namespace: str | None = None
    """The tenant, on which the hashes depend; empty for none."""
    is_eagle: bool = False
    """Whether the workers' blocks look one token ahead."""
    media: Sequence[BlockExtraInfo | None] = ()
    """The media in each block; None for plain text."""

    @classmethod
    def of_request(
        cls, request: PreprocessedRequest, block_size_tokens: int, *, is_eagle: bool = False
    ) -> PromptBlocks:
        """Return the blocks that the request is routed by."""
        tokens, media = request.block_mm_routing_info()
        hints = request.routing
        lora, namespace = (hints.lora_name, hints.cache_namespace) if hints is not None else (None, None)
        return cls(tokens, block_size_tokens, lora, namespace, is_eagle, media or ())

    @cached_property
    def local_hashes(self) -> array[int]:
        """The hash of each whole block, whatever comes before it."""
        return block_hash_array(
            self.token_ids,
            self.block_size_tokens,
            seed=hash_seed(self.lora_name, self.cache_namespace),
            media=media_hashes(self.media) if self.media else (),
            is_eagle=self.is_eagle,
        )

    @cached_property
    def sequence_hashes(self) -> list[int]:
        """The hash of each whole block with everything before it."""
        return sequence_hashes(self.local_hashes)


def media_of_blocks(
    objects: Iterable[MmObject], block_size_tokens: int, total_tokens: int
) -> list[BlockExtraInfo | None]:
    """For each block, the last and unfinished one too, the media in it, at ranges [start, end) counted from its start.

    Given the media of a whole prompt at ranges of its tokens. What lies behind the last token is left out.
    """
    found: list[dict[int, MmObject]] = [{} for _ in range(0, total_tokens, block_size_tokens)]
    for media in objects:
        for start, end in media.offsets:
            last = min(end, total_tokens)
            for index in range(start // block_size_tokens, -(-last // block_size_tokens) if start < last else 0):
                origin = index * block_size_tokens
                inside = max(start - origin, 0), min(last - origin, block_size_tokens)
                found[index].setdefault(media.mm_hash, MmObject(media.mm_hash, [])).offsets.append(inside)
    return [BlockExtraInfo(list(media.values())) if media else None for media in found]


def pad_token(mm_hash: int) -> int:
    """The token that stands for an image wherever an engine fills its place with one token."""
    return _PAD_BASE + mm_hash % _PAD_RANGE
