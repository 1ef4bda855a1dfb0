"""The extra keys of an engine's stored blocks: the media in them, and the tenant they are of.

One list for each block, None for a block without; a bare list of texts is the first block's. Among the keys stand the
adapter's name, a tenant's salt, names of media, bare or with a place in the block, and others that are not for us.
Source: vllm/v1/core/kv_cache_utils.py; dynamo lib/kv-router/src/zmq_wire/extra_keys.rs.
"""

from __future__ import annotations

import re
from typing import Any

from pipeline.block_hash import SEED, hash_seed
from pipeline.protocols import BlockExtraInfo, MmObject

SALT_PREFIX = "dynamo-cache-salt:"
"""Marks a tenant's salt among the keys, where it could be taken for a name."""

_MEDIA_HASH = re.compile(r"([0-9a-fA-F]{16})[0-9a-fA-F]{48}")
"""The hash we know media by is the beginning of the engine's."""


def cache_namespace(extra_keys: Any, lora_name: str | None) -> str | None:
    """The salt among the first block's keys, where engines put it; the adapter's name is none, however it looks."""
    keys = [key for key in next(iter(_by_block(extra_keys)), []) if type(key) is str]
    if lora_name in keys:
        keys.remove(lora_name)
    return next((key[len(SALT_PREFIX) :] for key in keys if key.startswith(SALT_PREFIX) and key != SALT_PREFIX), None)


def media_of(extra_keys: Any, lora_name: str | None) -> list[BlockExtraInfo | None]:
    """The media of each block; their places in it are not said."""
    hashes = [
        [found for key in keys if key != lora_name and (found := _media_hash(key)) is not None]
        for keys in _by_block(extra_keys)
    ]
    return [BlockExtraInfo([MmObject(found, []) for found in block]) if block else None for block in hashes]


def _by_block(extra_keys: Any) -> list[list[Any]]:
    if type(extra_keys) is not list:
        return []
    if any(type(keys) is str for keys in extra_keys):
        return [extra_keys]
    return [keys if type(keys) is list else [] for keys in extra_keys]


def _media_hash(key: Any) -> int | None:
    """Of a text only if it looks like one; with a place in the block it is one, in whatever form."""
    has_place = type(key) is list and len(key) == 2 and type(key[1]) is int
    text = key[0] if has_place else key
    if type(text) is not str or not text:
        return None
    if matched := _MEDIA_HASH.fullmatch(text):
        return int(matched[1], 16)
    return (hash_seed(text) - SEED) % 2**64 if has_place else None  # the plain XXH3 of the text
