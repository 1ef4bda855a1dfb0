"""Block hashes: what names a block of tokens, and what names it with everything before it.

    tokens ──blocks of block_size──► local hashes ──chained──► sequence hashes

A local hash depends on the block's own tokens only; a sequence hash stands for its whole prefix, so two equal ones hold
the same tokens from the start. Engines name the blocks they store by these, routers look prompts up by them. All are
u64.

With `frames` the one door of xxhash in the library. Source: dynamo lib/kv-router/src/protocols.rs,
compute_block_hash_for_seq and compute_seq_hash_for_block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from sys import byteorder

from xxhash import xxh3_64_intdigest

from .errors import InvalidArgument

SEED = 1337

_TOKEN_BYTES = 4
_U32_CODE = next(code for code in "IL" if array(code).itemsize == _TOKEN_BYTES)
_pair = Struct("<QQ").pack


def token_bytes(tokens: Sequence[int]) -> bytes:
    """The tokens as hashed: each a little-endian u32. Raises InvalidArgument for a token that is none."""
    try:
        words = array(_U32_CODE, tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument("a token id is an integer from 0 to 2^32 - 1", field="token_ids", cause=error) from error
    if byteorder == "big":
        words.byteswap()
    return words.tobytes()


def block_hashes(tokens: Sequence[int], block_size_tokens: int, *, seed: int = SEED) -> list[int]:
    """The local hash of each whole block; tokens after the last whole block are left out.

    Raises InvalidArgument for a block size below 1, and as `token_bytes`.
    """
    if block_size_tokens < 1:
        raise InvalidArgument(f"must be at least 1, got {block_size_tokens}", field="block_size")
    content, step = token_bytes(tokens), block_size_tokens * _TOKEN_BYTES
    whole = len(content) - len(content) % step
    return [xxh3_64_intdigest(content[start : start + step], seed) for start in range(0, whole, step)]


def sequence_hashes(local_hashes: Iterable[int], parent: int | None = None) -> list[int]:
    """The sequence hash of each block, given the local hashes in order and the sequence hash before the first.

    Chaining a list in pieces, each from the last hash of the one before, equals chaining it whole.
    """
    chained = []
    for local in local_hashes:
        parent = local if parent is None else xxh3_64_intdigest(_pair(parent, local), SEED)
        chained.append(parent)
    return chained


def hash_seed(lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    """The seed of local hashes for an adapter and a cache namespace; empty names count as none.

    So the same tokens under another adapter, or for another tenant, are other blocks.
    """
    seed = SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed % 2**64
